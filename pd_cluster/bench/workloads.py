"""Named workloads: requests with seeded lengths, shared prefixes and arrival times.

| name | prompts |
|---|---|
| `fixed` | all of the given length, nothing shared |
| `log-normal` | log-normal lengths with the given means, nothing shared |
| `shared-prefix` | all of the given length; the first part is one of a few prefixes |
| `conversation` | sessions: each turn's prompt is the whole conversation before it and a log-normal message |
| `tool-agent` | sessions that open with the shared definitions of tools; each turn adds the result of a tool |

Pure: the same `Workload` gives the same requests everywhere. Knows nothing of servers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, get_args

import msgspec

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.errors import ConfigError

WorkloadName = Literal["fixed", "log-normal", "shared-prefix", "conversation", "tool-agent"]
ArrivalProcess = Literal["poisson", "constant"]
WORKLOAD_NAMES: tuple[str, ...] = get_args(WorkloadName)
BLOCK_TOKENS = 16  # the block size of the prompts' `hash_ids`; lengths of shared prefixes are whole blocks
MOST_TOKENS = 1 << 20  # maximum number of tokens of a message or an answer

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A workload's name and parameters; `arrivals_of` makes its requests. Lengths are means, in tokens."""

    name: WorkloadName = "fixed"
    num_requests: int = 100
    rate_per_s: float = 1.0  # the rate of all requests, including the turns of sessions
    process: ArrivalProcess = "poisson"  # how requests or, in sessions, first turns arrive
    num_prompt_tokens: int = 512  # in sessions, the length of the first message with the tools' definitions
    num_output_tokens: int = 128
    sigma: float = 0.6  # standard deviation of a log-normal length's logarithm
    num_prefixes: int = 4  # different shared prefixes, equally frequent
    prefix_share: float = 0.5  # the prefix's share of `num_prompt_tokens`
    num_turns: int = 4  # turns of each session
    pause_s: float = 5.0  # mean time from one turn's arrival to the next, exponential
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError that names the field."""
        if self.name not in WORKLOAD_NAMES:
            raise ConfigError(f"workload {self.name}: expected one of {', '.join(WORKLOAD_NAMES)}")
        if self.process not in get_args(ArrivalProcess):
            raise ConfigError(f"workload {self.name}: process {self.process}: expected poisson or constant")
        for field in ("num_requests", "num_prompt_tokens", "num_output_tokens", "num_prefixes", "num_turns"):
            if not 1 <= getattr(self, field) <= MOST_TOKENS:
                raise ConfigError(f"workload {self.name}: {field} {getattr(self, field)}: expected 1 to {MOST_TOKENS}")
        for field, least, most in (
            ("rate_per_s", 1e-6, 1e6),
            ("sigma", 0.0, 3.0),
            ("prefix_share", 0.0, 1.0),
            ("pause_s", 0.0, 1e6),
        ):
            if not least <= getattr(self, field) <= most:
                raise ConfigError(
                    f"workload {self.name}: {field} {getattr(self, field):g}: expected {least:g} to {most:g}"
                )

    @property
    def prefix_tokens(self) -> int:
        """The shared prefix's length, rounded to whole blocks; 0 without shared prefixes."""
        if self.name not in ("shared-prefix", "tool-agent"):
            return 0
        num_blocks = round(self.prefix_share * self.num_prompt_tokens / BLOCK_TOKENS)
        return BLOCK_TOKENS * min(num_blocks, self.num_prompt_tokens // BLOCK_TOKENS)


def arrivals_of(workload: Workload) -> list[Arrival]:
    """Returns the requests in order of time. Raises ConfigError."""
    workload.check()
    makers: dict[str, Callable[[Workload, _Drawing], list[Arrival]]] = {
        "fixed": _single,
        "log-normal": _single,
        "shared-prefix": _single,
        "conversation": _sessions,
        "tool-agent": _sessions,
    }
    return makers[workload.name](workload, _Drawing(workload))


def times_of(rate_per_s: float, process: ArrivalProcess, rng: random.Random) -> Iterator[float]:
    """Yields the arrival times of an endless process in seconds; the first is 0."""
    at_s = 0.0
    while True:
        yield at_s
        at_s += rng.expovariate(rate_per_s) if process == "poisson" else 1 / rate_per_s


class _Drawing:
    """A workload's random numbers, from independent streams for times and lengths, and its counter of block ids."""

    def __init__(self, workload: Workload) -> None:
        self.times = random.Random(f"times {workload.seed}")
        self.pauses = random.Random(f"pauses {workload.seed}")
        self._lengths = random.Random(f"lengths {workload.seed}")
        self._prefixes = random.Random(f"prefixes {workload.seed}")
        self._sigma = workload.sigma
        self._num_prefixes = workload.num_prefixes
        self._num_prefix_blocks = workload.prefix_tokens // BLOCK_TOKENS
        self._fresh = itertools.count(self._num_prefixes * self._num_prefix_blocks)

    def length(self, mean: float) -> int:
        """Draws a log-normal length with this mean, 1 at least."""
        mu = math.log(mean) - self._sigma**2 / 2
        return max(1, min(MOST_TOKENS, round(self._lengths.lognormvariate(mu, self._sigma))))

    def prefix(self) -> tuple[int, ...]:
        """Returns the ids of one shared prefix, the same in every run."""
        first = self._num_prefix_blocks * self._prefixes.randrange(self._num_prefixes)
        return tuple(range(first, first + self._num_prefix_blocks))

    def extended(self, ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Returns ids for a prompt of `num_tokens` that begins with the whole blocks `ids`."""
        return (*ids, *itertools.islice(self._fresh, -(-num_tokens // BLOCK_TOKENS) - len(ids)))


def _single(workload: Workload, drawing: _Drawing) -> list[Arrival]:
    found = []
    times = times_of(workload.rate_per_s, workload.process, drawing.times)
    for at_s in itertools.islice(times, workload.num_requests):
        num_prompt, num_output = workload.num_prompt_tokens, workload.num_output_tokens
        if workload.name == "log-normal":
            num_prompt, num_output = drawing.length(num_prompt), drawing.length(num_output)
        ids = drawing.extended(drawing.prefix(), num_prompt)
        found.append(_arrival(at_s, num_prompt, num_output, ids, ""))
    return found


def _sessions(workload: Workload, drawing: _Drawing) -> list[Arrival]:
    """Makes sessions until there are enough requests, and drops surplus ones at the end."""
    found: list[Arrival] = []
    starts = times_of(workload.rate_per_s / workload.num_turns, workload.process, drawing.times)
    for number in range(-(-workload.num_requests // workload.num_turns)):
        found += _session(workload, drawing, next(starts), f"session-{number}")
    return sorted(found, key=lambda each: each.at_s)[: workload.num_requests]


def _session(workload: Workload, drawing: _Drawing, at_s: float, session: str) -> Iterator[Arrival]:
    """Yields the turns. A turn shares the previous prompt's whole blocks; blocks with tokens of answers are new."""
    ids, num_tokens = drawing.prefix(), workload.prefix_tokens
    message_tokens = max(1, workload.num_prompt_tokens - workload.prefix_tokens)
    for turn in range(workload.num_turns):
        if turn:
            at_s += drawing.pauses.expovariate(1 / workload.pause_s) if workload.pause_s else 0.0
        num_tokens += drawing.length(message_tokens)
        num_output = drawing.length(workload.num_output_tokens)
        ids = drawing.extended(ids, num_tokens)
        yield _arrival(at_s, num_tokens, num_output, ids, session)
        ids = ids[: num_tokens // BLOCK_TOKENS]
        num_tokens += num_output


def _arrival(at_s: float, num_prompt: int, num_output: int, ids: tuple[int, ...], session: str) -> Arrival:
    return Arrival(
        at_s=at_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        hash_ids=ids,
        block_tokens=BLOCK_TOKENS,
        session=session,
    )
