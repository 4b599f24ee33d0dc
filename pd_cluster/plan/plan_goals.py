"""Measures how far a load's outcomes are from its goals, as one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pd_cluster.bench.outcomes import Outcome, Slo
from pd_cluster.errors import ConfigError

USUAL_SHARE = 0.9  # the share of requests that must be within the goals: DistServe's goodput


class PlanGoals(msgspec.Struct, frozen=True):
    """A load meets its goals if `share` of its requests meet `slo`."""

    slo: Slo
    share: float = USUAL_SHARE

    def check(self) -> None:
        """Raises ConfigError."""
        for name, value in self.named.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} {value:g}: expected a number of seconds, 0 for no goal")
        if not any(self.named.values()):
            raise ConfigError(f"{', '.join(self.named)}: none is above 0; give a goal in seconds")
        if not 0 < self.share <= 1:
            raise ConfigError(f"--slo-share {self.share:g}: expected a share above 0 and at most 1")

    @property
    def named(self) -> dict[str, float]:
        return {"--slo-ttft": self.slo.ttft_s, "--slo-tpot": self.slo.tpot_s, "--slo-e2e": self.slo.e2e_s}

    def strain(self, outcomes: Sequence[Outcome]) -> float:
        """Returns the worst ratio of times to goals among the best `share` of requests.

        The goals are met if the ratio is at most 1. The ratio is infinite if too many requests fail.
        """
        if not outcomes:
            return math.inf
        ratios = sorted(max(self.ratios(each).values()) for each in outcomes)
        return ratios[math.ceil(self.share * len(ratios)) - 1]

    def ratios(self, outcome: Outcome) -> dict[str, float]:
        """Returns a request's times divided by their goals, by flag; infinite if it got no answer."""
        if outcome.error or outcome.first_s is None or outcome.last_s is None:
            return dict.fromkeys((name for name, goal in self.named.items() if goal), math.inf)
        taken = {"--slo-ttft": outcome.ttft_s, "--slo-tpot": outcome.tpot_s, "--slo-e2e": outcome.e2e_s}
        return {name: (taken[name] or 0.0) / goal for name, goal in self.named.items() if goal}
