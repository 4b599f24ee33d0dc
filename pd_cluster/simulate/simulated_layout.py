"""The layout and the result of a simulation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pd_cluster.bench.outcomes import GapCounts, InstanceSample, Outcome
from pd_cluster.cluster.placement.outside_policy import policy_of
from pd_cluster.errors import ConfigError
from pd_cluster.settings.routing_settings import RoutingConfig

AUTO_ROLES = ("", "cost", "rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLayout:
    """The numbers of instances by role, and the settings that a search varies. None: the value in the costs."""

    num_prefill: int = 0
    num_decode: int = 0
    num_hybrid: int = 0
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_blocks: int | None = None
    routing_policy: str = RoutingConfig().policy
    auto_role: str = ""  # "", cost or rules
    are_neighbours: bool = False  # all instances share one host
    pulls_prefixes: bool = False  # as with --prefix-pull

    def check(self, named: str = "layout") -> None:
        """Raises ConfigError for an impossible layout."""
        has_pairs = bool(self.num_prefill or self.num_decode)
        if self.num_instances < 1 or min(self.num_prefill, self.num_decode, self.num_hybrid) < 0:
            raise ConfigError(f"{named}: there is no instance; give 1H or 1P1D")
        if has_pairs and self.num_hybrid:
            raise ConfigError(f"{named}: hybrid instances cannot be combined with P and D; leave out H, or P and D")
        if has_pairs and not (self.num_prefill and self.num_decode):
            raise ConfigError(f"{named}: give both P and D; instances that do both are H")
        policy_of(self.routing_policy)
        if self.auto_role not in AUTO_ROLES:
            raise ConfigError(f"--auto-role {self.auto_role}: expected {' or '.join(filter(None, AUTO_ROLES))}")

    @property
    def routing(self) -> RoutingConfig:
        """Returns the scheduler's default routing settings, with this layout's policy."""
        return RoutingConfig(policy=self.routing_policy)

    @property
    def num_instances(self) -> int:
        return self.num_prefill + self.num_decode + self.num_hybrid


LAYOUT = re.compile(r"(?:([0-9]+)P)?(?:([0-9]+)D)?(?:([0-9]+)H)?", re.IGNORECASE)
MOST_INSTANCES = 10_000


Sizes = tuple[int | None, int | None, int | None]


def layout_of(written: str, sizes: Sizes = (None, None, None), flag: str = "--layout", **more: Any) -> SimulatedLayout:
    """Parses `2P1D`, or `1H` for hybrid instances. Raises ConfigError.

    `sizes`: max_num_batched_tokens, max_num_seqs and num_blocks; None: the value in the costs. `more`: further fields.
    """
    found = LAYOUT.fullmatch(written.strip())
    numbers = [int(each or 0) for each in found.groups()] if found is not None else [0]
    if found is None or not 1 <= sum(numbers) <= MOST_INSTANCES:
        expected = f"expected numbers of instances such as 2P1D, or 1H, {MOST_INSTANCES} at most"
        raise ConfigError(f"{flag} {written!r}: {expected}")
    more |= dict(zip(("num_prefill", "num_decode", "num_hybrid"), numbers, strict=True))
    more |= dict(zip(("max_num_batched_tokens", "max_num_seqs", "num_blocks"), sizes, strict=True))
    layout = SimulatedLayout(**more)
    layout.check(f"{flag} {written}")
    return layout


@dataclass(slots=True)
class Simulated:
    """The result of a simulation. `duration_s`: the simulated time from the first arrival to the last answer."""

    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[InstanceSample] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)  # deaths, joins, changes of role
    gaps: GapCounts = field(default_factory=GapCounts)  # between the tokens of all requests
    duration_s: float = 0.0
