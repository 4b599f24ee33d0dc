"""Prints a plan, and writes it as JSON. Each line with figures from computed costs says that they were not measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from pd_cluster.output_files import write_output
from pd_cluster.plan.breaking_load import MOST
from pd_cluster.plan.cost_sources import CostSource
from pd_cluster.plan.layout_search import Plan, Ranked
from pd_cluster.plan.plan_goals import PlanGoals
from pd_cluster.plan.start_commands import StartCommands
from pd_cluster.result_tables import print_table

HEADERS = ("layout", "devices", "chunk", "seats", "policy", "in time", "breaks at", "goodput/device", "binds")
RIGHT = ("devices", "chunk", "seats", "in time", "breaks at", "goodput/device")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    model: str
    goals: PlanGoals
    plan: Plan
    source: CostSource

    @property
    def start(self) -> StartCommands:
        source = self.source
        first = self.plan.first.candidate
        per_host = source.devices_per_host
        return StartCommands(model=self.model, candidate=first, kind=source.kind, devices_per_host=per_host)

    def show(self) -> None:
        headers = [*HEADERS, *(["costs"] if self.source.remark else [])]
        print_table(self.title, headers, [self._row(each) for each in self.plan.ranked], RIGHT)
        lines = [self.answer, self.verdict, *(f"left out: {reason}" for reason in self.plan.left_out)]
        for line in lines:
            print(self._marked(line))
        for title, commands in self.start_sections.items():
            print(f"\n{self._marked(title)}:")
            print("\n".join(f"  {line}" for line in commands))

    @property
    def title(self) -> str:
        plan = self.plan
        goals = ", ".join(f"{name[6:].upper()} {goal:g} s" for name, goal in self.goals.named.items() if goal)
        return self._marked(
            f"{self.model} on {self.source.name}: {plan.num_requests} requests, {plan.rate_per_s:.3g}/s; goals: "
            f"{goals} for {self.goals.share:.0%}; highest loads found with the first {plan.num_for_limits}"
        )

    @property
    def answer(self) -> str:
        first = self.plan.first
        if self.plan.is_met:
            return f"the smallest layout that meets the goals: {first.candidate.name}, {_devices(first)}"
        strain = first.trial.strain
        far = f"takes {strain:.3g} times the goals" if math.isfinite(strain) else "leaves too many requests unanswered"
        return (
            f"no layout meets the goals; the nearest, {first.candidate.name}, {far}, and meets them up to "
            f"{self._load(first)}"
        )

    @property
    def verdict(self) -> str:
        """Says whether to split, by comparing the best layout of each kind on the same number of devices."""
        first = self.plan.first
        other = self.plan.best_of_kind(not first.candidate.is_hybrid)
        if other is None:
            return (
                "do not split: one instance is enough" if first.candidate.is_hybrid else "split: no other layout fits"
            )
        word = "do not split" if first.candidate.is_hybrid else "split"
        return (
            f"{word}: {first.candidate.name} meets the goals up to {self._load(first)}, {other.candidate.name}, the "
            f"best that {'splits' if first.candidate.is_hybrid else 'does not'}, up to {self._load(other)}"
        )

    @property
    def start_sections(self) -> dict[str, list[str]]:
        """Returns title -> command lines that start the layout."""
        start = self.start
        found = {"on one machine": start.on_this_machine, "from rank tables": start.from_tables}
        if start.candidate.is_hybrid:
            found = {"on one machine": start.on_this_machine, "on several": start.joining}
        return {title: lines for title, lines in (*found.items(), ("in Kubernetes", start.helm)) if lines}

    def _load(self, ranked: Ranked) -> str:
        if not ranked.limit:
            return "no load"
        at_least = "at least " if ranked.limit >= MOST else ""
        return f"{at_least}{ranked.limit:.2g} times this load ({ranked.limit * self.plan.rate_per_s:.3g}/s)"

    def _row(self, ranked: Ranked) -> list[str]:
        layout, trial = ranked.candidate.layout, ranked.trial
        limit = f"{ranked.limit:.2g} x" if ranked.limit else "no load"
        cells = [
            *(ranked.candidate.name, str(ranked.candidate.num_devices)),
            *(str(layout.max_num_batched_tokens), str(layout.max_num_seqs), layout.routing_policy),
            *(f"{trial.share_met:.0%}", limit, f"{ranked.goodput_per_device:.3g}/s", ranked.binding),
        ]
        return [*cells, self.source.remark] if self.source.remark else cells

    def _marked(self, line: str) -> str:
        return f"{line} ({self.source.remark})" if self.source.remark else line

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": self.model,
            "device": self.source.name,
            "measured": not self.source.remark,
            "goals": {**self.goals.named, "share": self.goals.share},
            "num_requests": plan.num_requests,
            "rate_per_s": plan.rate_per_s,
            "met": plan.is_met,
            "answer": self._marked(self.answer),
            "verdict": self._marked(self.verdict),
            "layouts": [_to_json(each) for each in plan.ranked],
            "left_out": plan.left_out,
            "start": self.start_sections,
        }

    def write(self, file: str) -> None:
        """Raises ConfigError when the file cannot be written."""
        write_output(file, "--json", (json.dumps(self.to_json(), indent=2) + "\n").encode())


def _to_json(ranked: Ranked) -> dict[str, Any]:
    layout, trial = ranked.candidate.layout, ranked.trial
    return {
        "layout": ranked.candidate.name,
        "num_prefill": layout.num_prefill,
        "num_decode": layout.num_decode,
        "num_hybrid": layout.num_hybrid,
        "tensor_parallel_size": ranked.candidate.tp_size,
        "num_devices": ranked.candidate.num_devices,
        "max_num_batched_tokens": layout.max_num_batched_tokens,
        "max_num_seqs": layout.max_num_seqs,
        "routing_policy": layout.routing_policy,
        "met": trial.is_met,
        "share_met": trial.share_met,
        "strain": trial.strain if math.isfinite(trial.strain) else None,
        "breaks_at": ranked.limit,
        "goodput_per_device": ranked.goodput_per_device,
        "binding": ranked.binding,
    }


def _devices(ranked: Ranked) -> str:
    number = ranked.candidate.num_devices
    return f"{number} device{'s' * (number != 1)}"
