"""A comparison as data: loads, goals and servers. comparison_file.py reads it from a file."""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any

import msgspec

from pd_cluster import host
from pd_cluster.bench.outcomes import Slo
from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.bench.trace_files import TraceScale, read_trace
from pd_cluster.bench.workloads import Workload, arrivals_of
from pd_cluster.errors import ConfigError
from pd_cluster.settings.serve_options import settings

LAYOUT = re.compile(r"([1-9][0-9]*)P([1-9][0-9]*)D|([1-9][0-9]*)H")
SALT = 1 << 40  # maximum number of block ids in one round's load at one speed
MOST_NAME_CHARS = 40
Idle = Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)]


class GoalsInTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Goals in seconds, or as multiples of the first server's idle medians; None: no goal."""

    ttft_s: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    tpot_s: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    e2e_s: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    ttft_idle: Idle | None = None
    tpot_idle: Idle | None = None

    @property
    def needs_idle(self) -> bool:
        return self.ttft_idle is not None or self.tpot_idle is not None

    def slo(self, idle_ttft_s: float, idle_tpot_s: float) -> Slo:
        return Slo(
            self.ttft_s or (self.ttft_idle or 0.0) * idle_ttft_s,
            self.tpot_s or (self.tpot_idle or 0.0) * idle_tpot_s,
            self.e2e_s or 0.0,
        )


class ComparedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server: our layout of instances with their settings, vLLM's server with its flags, or an address."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME_CHARS)]
    layout: str = ""
    settings: dict[str, Any] = {}
    vllm: str = ""
    flags: list[str] = []
    env: dict[str, str] = {}
    url: str = ""

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The numbers of prefill, decode and hybrid instances."""
        found = LAYOUT.fullmatch(self.layout)
        assert found is not None
        prefill, decode, hybrid = (int(number or 0) for number in found.groups())
        return prefill, decode, hybrid

    @property
    def serve_flags(self) -> list[str]:
        given = (settings()[name].flags(value) for name, value in self.settings.items())
        return ["=".join(flag) for flags in given for flag in flags]


class LoadPart(msgspec.Struct, frozen=True, kw_only=True):
    """A workload or a trace file; a load may combine several."""

    workload: Workload = Workload()
    trace: str = ""
    scale: TraceScale = TraceScale()

    def arrivals(self, round_: int) -> list[Arrival]:
        """Returns the requests; a workload draws new times and lengths for each round. Raises ConfigError."""
        if self.trace:
            return read_trace(self.trace, self.scale)
        return arrivals_of(msgspec.structs.replace(self.workload, seed=self.workload.seed + round_))


class ComparisonSpec(msgspec.Struct, frozen=True, kw_only=True):
    workload: list[LoadPart]
    server: list[ComparedServer]
    goals: GoalsInTimes = GoalsInTimes()
    model: str = ""
    cores: str = ""
    rounds: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    speeds: list[Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]] = []
    concurrency: list[Annotated[int, msgspec.Meta(ge=1, le=10_000)]] = []
    client_processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # guidellm's processes that send requests
    num_warmup_requests: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8
    deadline_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 1800.0  # for one server's load at one level

    @property
    def core_set(self) -> frozenset[int]:
        return cores_of(self.cores) if self.cores else host.cores()

    @property
    def levels(self) -> list[float]:
        """The loads of each run: multiples of the arrival rate, or concurrent requests."""
        return [*self.concurrency] or self.speeds or [1.0]

    @property
    def level_name(self) -> str:
        """The level in words; "" for the single default level."""
        return "at once" if self.concurrency else "speed" if self.speeds else ""

    def arrivals(self, round_: int, level: float) -> list[Arrival]:
        """Returns a round's load, the same for each server, with prompts unique to the round and level."""
        found: list[Arrival] = []
        for at, part in enumerate(self.workload):
            salt = (round_ * len(self.levels) + self.levels.index(level)) * len(self.workload) + at
            found += salted(part.arrivals(round_), salt * SALT)
        speed = 1.0 if self.concurrency else level
        paced = (msgspec.structs.replace(each, at_s=each.at_s / speed) for each in found)
        return sorted(paced, key=lambda each: each.at_s)


def salted(arrivals: list[Arrival], first: int) -> list[Arrival]:
    """Gives the prompts' blocks new ids, from `first` on; blocks that were shared stay shared."""
    fresh, known = itertools.count(first), dict[int, int]()

    def ids_of(arrival: Arrival) -> tuple[int, ...]:
        if not arrival.hash_ids:
            return tuple(itertools.islice(fresh, -(-arrival.num_prompt_tokens // arrival.block_tokens)))
        return tuple(known[each] if each in known else known.setdefault(each, next(fresh)) for each in arrival.hash_ids)

    return [msgspec.structs.replace(arrival, hash_ids=ids_of(arrival)) for arrival in arrivals]


def cores_of(text: str) -> frozenset[int]:
    """Parses cores in the kernel's format, such as 0-3,8. Raises ConfigError."""
    found: set[int] = set()
    for run in text.split(","):
        first, dash, last = run.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ConfigError(f"cores: {text!r}: expected cores such as 0-3,8")
        if int(last or first) > 1 << 16:
            raise ConfigError(f"cores: {text!r}: no host has that many; give cores such as 0-3")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
