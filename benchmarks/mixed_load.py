"""The requests of `benchmarks faults`, and their answers. Requests have mixed lengths, are greedy or seeded, and arrive
as a Poisson process.

The clock and the sleep are parameters. Knows nothing of clusters or faults.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from pd_cluster.client.streaming_client import Sample, measure
from pd_cluster.errors import GenerationError

NUM_TOKEN_IDS = 256  # every vocabulary has these
SHORTEST, LONGEST_PROMPT, LONGEST_OUTPUT = 8, 256, 64  # tokens

Send = Callable[[Mapping[str, Any]], Awaitable[Sample]]


async def answered(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> Sample:
    """Sends a request and returns its sample. Raises GenerationError if the request fails."""
    sample = await measure(client, url, body)
    if sample.error is not None or sample.ttft_s is None:
        raise GenerationError(f"a request failed: {sample.error}")
    return sample


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. These fields alone determine its answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None  # None: greedy

    def body(self, model: str, salt: str) -> dict[str, Any]:
        """Returns the body. `salt` separates two runs in the prefix cache, so that the second also moves KV cache."""
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
    """The outcome of the request with this number in a run. `sent_s` and `ended_s` are of one clock."""

    number: int
    sent_s: float
    ended_s: float
    sample: Sample

    @property
    def is_complete(self) -> bool:
        return self.sample.error is None

    @property
    def is_refused(self) -> bool:
        """Whether the server reported overload, with the time after which to try again."""
        return self.sample.status == 429 and self.sample.retry_after is not None


def make_asks(rng: random.Random, number: int) -> list[LoadRequest]:
    """Makes requests. Every other one samples, each with a different seed."""
    return [
        LoadRequest(
            tuple(rng.randrange(NUM_TOKEN_IDS) for _ in range(rng.randint(SHORTEST, LONGEST_PROMPT))),
            rng.randint(SHORTEST, LONGEST_OUTPUT),
            rng.getrandbits(32) if at % 2 else None,
        )
        for at in range(number)
    ]


def poisson(rng: random.Random, rate_per_s: float) -> Iterator[float]:
    """Yields times between arrivals, in seconds."""
    while True:
        yield rng.expovariate(rate_per_s)


class Load:
    """Sends each request at its time, whatever the outcome of earlier ones."""

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
        """Sends requests until `is_enough` is true for their number, and waits until all have ended."""
        due_s = self._clock()
        async with asyncio.TaskGroup() as group:
            for number, gap_s in zip(itertools.count(), self._gaps_s, strict=False):
                if is_enough(number):
                    return
                due_s += gap_s
                await self._sleep(max(0.0, due_s - self._clock()))
                group.create_task(self.one(number))

    async def closed_loop(self, number: int, concurrency: int) -> float:
        """Sends this many requests, `concurrency` at a time.

        Returns the rate per second while `concurrency` requests were running.
        """
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
