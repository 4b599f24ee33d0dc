"""Lists a cluster's current problems, worst first, each with a remedy. Pure: it reads instances and figures.

`pd-cluster status`, `pd-cluster top` and the dashboard show the same list. Knows nothing of how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.overview.request_history import RequestHistory
from pd_cluster.cluster.placement.routing_policy import refused_links
from pd_cluster.settings.routing_settings import RoutingConfig

LAST_S = 60.0  # the period whose failed and moved requests count
SHORT_OF = {"window": "blocks of windows", "state": "states (--max-num-seqs, --state-cache)"}
FULL_SHARE = 0.95  # the share of a pool's blocks that is held when it counts as full
Severity = Literal["critical", "warning", "notice"]
ORDER: tuple[Severity, ...] = ("critical", "warning", "notice")


@dataclass(frozen=True, slots=True)
class Problem:
    """`reason` may contain addresses and paths, so only operators see it and `way_out`."""

    severity: Severity
    text: str
    way_out: str
    instance_id: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        text = f"{self.text}: {self.reason}" if self.reason else self.text
        return {**self.to_public(), "text": text, "way_out": self.way_out}

    def to_public(self) -> dict[str, Any]:
        return {"severity": self.severity, "text": self.text, "instance_id": self.instance_id}


def problems_of(instances: Sequence[Instance], history: RequestHistory, routing: RoutingConfig) -> list[Problem]:
    """Returns all problems, critical ones first; [] if all planned instances serve and no request failed."""
    found = [*_roles(instances), *_instances(instances), *_links(instances), *_requests(history, routing)]
    return sorted(found, key=lambda problem: ORDER.index(problem.severity))


def _roles(instances: Sequence[Instance]) -> list[Problem]:
    serving = [each for each in instances if each.takes_requests]
    if instances and all(each.is_ready and each.load.sleep_level for each in instances):
        return [
            Problem(
                "notice", "the cluster is asleep, and serves no requests", "POST /wake_up on the admin port wakes it"
            )
        ]
    if not serving:
        return [
            Problem(
                "critical",
                "no instance takes requests: requests wait, or get a 503",
                "see each instance's state and its log: `pd-cluster logs NAME`",
            )
        ]
    return [
        Problem(
            "warning",
            f"no {role} instance takes requests: the other instances do its work, more slowly",
            f"restart one, or give the role to another instance: `pd-cluster instances role NAME {role}`",
        )
        for role in ("prefill", "decode")
        if not any(each.role == role for each in serving)
    ]


def _instances(instances: Sequence[Instance]) -> list[Problem]:
    found = []
    for each in instances:
        if not each.is_ready:
            is_late = each.state == "forming" and bool(each.reason)  # its unit has been incomplete for long
            severity: Severity = "warning" if is_late or each.state in ("failed", "unreachable") else "notice"
            way_out = f"`pd-cluster logs {each.name}`; docs/operations.md explains the states"
            found.append(Problem(severity, f"{each.name} is {each.shown_state}", way_out, each.name, each.reason))
            continue
        if each.service == "out" or each.load.is_draining:
            way_out = f"`pd-cluster instances drain --undo {each.name}` puts it back in service"
            found.append(Problem("notice", f"{each.name} is {each.shown_state}", way_out, each.name))
        found += _full(each)
    return found


def _full(instance: Instance) -> Iterator[Problem]:
    """Yields a problem for each resource that requests wait for: blocks, blocks of windows, or states."""
    load = instance.load
    kinds = [("KV blocks", load.num_held_blocks, load.num_blocks)]
    kinds += [(SHORT_OF.get(each.rule, "KV blocks"), each.num_held, each.num_blocks) for each in load.groups]
    for what, num_held, num_blocks in kinds:
        if load.num_waiting and num_blocks and num_held >= FULL_SHARE * num_blocks:
            text = f"{instance.name}: {load.num_waiting} requests wait for {what}; {num_held} of {num_blocks} are held"
            way_out = "add an instance of its role, or limit max_tokens; `--slo-ttft` refuses early"
            yield Problem("warning", text, way_out, instance.name)


def _links(instances: Sequence[Instance]) -> list[Problem]:
    way_out = "`pd-cluster check --network` tests the network between the two"
    pairs = (link.partition(": ") for link in refused_links(instances))
    found = [
        Problem("warning", f"no KV cache can be sent from {pair}", way_out, reason=state) for pair, _, state in pairs
    ]
    return found + [
        Problem(
            "warning",
            f"{prefill.name} gets no images from {encoder.name}, and computes them itself",
            'the reason says what differs; see "Encoders" in docs/multimodal.md',
            reason=str(prefill.link_to(encoder)),
        )
        for encoder in instances
        for prefill in instances
        if encoder.role == "encode" and prefill.role == "prefill" and prefill.link_to(encoder).phase == "refused"
    ]


def _requests(history: RequestHistory, routing: RoutingConfig) -> list[Problem]:
    found = []
    if failed := history.total("failed_per_s", LAST_S):
        text = f"{failed} {_requests_word(failed)} failed in the last minute"
        found.append(Problem("critical", text, "`pd-cluster trace` lists them with their errors"))
    if moved := history.total("replayed_per_s", LAST_S):
        text = f"{moved} {_requests_word(moved)} continued on another instance in the last minute"
        found.append(Problem("notice", text, "their answers are complete; the events show which instance was lost"))
    if refused := history.total("refused_per_s", LAST_S):
        text = f"the cluster refused {refused} {_requests_word(refused)} in the last minute"
        found.append(Problem("warning", text, "add instances, or change --max-queue-time and the --slo flags"))
    if (sample := history.last_sample()) is not None:
        for name, goal_s, flag in (
            ("ttft", routing.slo_ttft_s, "--slo-ttft"),
            ("tpot", routing.slo_tpot_s, "--slo-tpot"),
        ):
            value_s = sample[f"{name}_p99_s"]
            if goal_s and value_s is not None and value_s > goal_s:
                text = f"{name.upper()} p99 is {value_s:.3g} s; the objective of {flag} is {goal_s:g} s"
                found.append(Problem("warning", text, "add instances of the slower role, or relax the objective"))
    return found


def _requests_word(number: int) -> str:
    return "request" if number == 1 else "requests"
