"""The requests of `bench faults`: mixed lengths, greedy and seeded, arriving by a Poisson process, and what came back.

The clock and the sleep are injected. Knows nothing of clusters or faults.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pd_cluster.bench.client import Sample

NUM_TOKEN_IDS = 256  # every vocabulary has these
SHORTEST, LONGEST_PROMPT, LONGEST_OUTPUT = 8, 256, 64  # tokens

Send = Callable[[Mapping[str, Any]], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Which tokens answer it follows from these fields alone."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None  # None: greedy

    def body(self, model: str, salt: str) -> dict[str, Any]:
        """`salt` keeps the prefix caches of two runs apart, so that the second has to move KV cache, too."""
        drawn = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "cache_salt": salt,
            **drawn,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a run's request of this number, sent and ended at these times of one clock."""

    number: int
    sent_s: float
    ended_s: float
    sample: Sample

    @property
    def is_complete(self) -> bool:
        return self.sample.error is None


def make_asks(rng: random.Random, number: int) -> list[Ask]:
    """Every other one is drawn, with a seed of its own."""
    return [
        Ask(
            tuple(rng.randrange(NUM_TOKEN_IDS) for _ in range(rng.randint(SHORTEST, LONGEST_PROMPT))),
            rng.randint(SHORTEST, LONGEST_OUTPUT),
            rng.getrandbits(32) if at % 2 else None,
        )
        for at in range(number)
    ]


def poisson(rng: random.Random, rate_per_s: float) -> Iterator[float]:
    """Times between arrivals, in seconds."""
    while True:
        yield rng.expovariate(rate_per_s)


class Load:
    """Sends requests one after the other, each at its time, whatever became of those before."""

    def __init__(
        self,
        body_of: Callable[[int], Mapping[str, Any]],
        gaps_s: Iterable[float],
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.answers: list[Answer] = []
        self._body_of = body_of
        self._gaps_s = gaps_s
        self._send = send
        self._clock = clock
        self._sleep = sleep

    async def run(self, is_enough: Callable[[int], bool]) -> None:
        """Until as many have been sent as `is_enough` says, and all of them have ended."""
        due_s = self._clock()
        async with asyncio.TaskGroup() as group:
            for number, gap_s in zip(itertools.count(), self._gaps_s, strict=False):
                if is_enough(number):
                    return
                due_s += gap_s
                await self._sleep(max(0.0, due_s - self._clock()))
                group.create_task(self.one(number))

    async def closed_loop(self, number: int, concurrency: int) -> float:
        """So many requests, `concurrency` at a time. Returns how many a second while all places were taken."""
        waiting = iter(range(number))

        async def worker() -> None:
            for at in waiting:
                await self.one(at)

        started_s = self._clock()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        last_sent_s = max(answer.sent_s for answer in self.answers)
        num_ended = sum(answer.ended_s <= last_sent_s for answer in self.answers)
        return num_ended / (last_sent_s - started_s) if last_sent_s > started_s else 0.0

    async def one(self, number: int) -> None:
        sent_s = self._clock()
        sample = await self._send(self._body_of(number))
        self.answers.append(Answer(number, sent_s, self._clock(), sample))
