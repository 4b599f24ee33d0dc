"""Faults of `benchmarks faults` that requests trigger: deaths at a first token, three times the load, one greedy
client.

Every script waits until the cluster is complete again, and reports its observations.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from benchmarks.faults.fault_scripts import DEATH_GOAL_S
from benchmarks.faults.fault_types import Fault, FaultContext, FaultObservations
from benchmarks.faults.faulted_cluster import FaultedCluster
from benchmarks.mixed_load import Answer
from pd_cluster.errors import PdClusterError
from pd_cluster.result_tables import counted

NUM_KILLS = 4  # kills per role
NUM_LONGEST = 40  # number of the longest requests that are watched
OVERLOAD, OVERLOAD_S = 3.0, 10.0
NUM_HOGS, HOG_ROUNDS, HOG_N = 4, 3, 128


async def kill_at_first_token(context: FaultContext, role: str) -> FaultObservations:
    """Kills the rank of the instance that serves a request at the request's first token, several times."""
    seen, stage = FaultObservations(), context.stage
    by_length = sorted(range(NUM_LONGEST), key=lambda number: -int(context.body_of(number)["max_tokens"]))
    for number in by_length[:NUM_KILLS]:
        seeing: list[asyncio.Task[float]] = []

        def first_token(served_by: tuple[str, ...], seeing: list[asyncio.Task[float]] = seeing) -> None:
            killed = [name for name in served_by if name.startswith(role)][:1]
            seeing.extend(asyncio.ensure_future(_detected(stage, name, stage.kill_ranks(name))) for name in killed)

        sent_s = time.monotonic()
        sample = await stage.stream(context.body_of(number), first_token)
        seen.answers.append(Answer(number, sent_s, time.monotonic(), sample))
        seen.detected_s.extend(await asyncio.gather(*seeing))
        await stage.whole()
    if not seen.detected_s:
        raise PdClusterError(f"no request was served by a {role} instance, so none could be killed")
    seen.figures.append(counted("killed at a first token", len(seen.detected_s), "instances"))
    return seen


async def _detected(stage: FaultedCluster, name: str, at_s: float) -> float:
    return await stage.lost(name) - at_s


async def overload(context: FaultContext) -> FaultObservations:
    """Does nothing for a while: the load itself is the fault."""
    await asyncio.sleep(OVERLOAD_S)
    return FaultObservations()


async def hog(context: FaultContext) -> FaultObservations:
    """Sends one client's requests for many sequences, several at a time, next to the ordinary requests.

    The first sequence of each must equal the answer to the ordinary request with its number; the other sequences must
    be the same for all.
    """
    seen = FaultObservations()
    number = next(at for at in range(NUM_LONGEST) if "seed" in context.body_of(at))
    others: set[tuple[Any, ...]] = set()

    async def ask(at: int) -> None:
        body = {**context.body_of(number), "n": HOG_N, "cache_salt": f"hog {at}"}
        for _ in range(HOG_ROUNDS):
            sent_s = time.monotonic()
            sample, sequences = await context.stage.whole_answer(body)
            seen.answers.append(Answer(number, sent_s, time.monotonic(), sample))
            if sample.error is None:
                others.add(tuple(sequences))

    await asyncio.gather(*(ask(at) for at in range(NUM_HOGS)))
    num_refused = sum(answer.is_refused for answer in seen.answers)
    num_failed = sum(not answer.is_complete and not answer.is_refused for answer in seen.answers)
    figures = [
        counted("hog requests", len(seen.answers), "answers"),
        counted("hog refused", num_refused, "answers"),
        counted("hog failed", num_failed, "requests", 0),
        counted("hog different", max(0, len(others) - 1), "requests", 0),
    ]
    return replace(seen, figures=figures)


CLIENT_FAULTS: dict[str, Fault] = {
    "token-one-prefill": Fault(
        "kill -9 of the prefill instance at a first token", lambda m: kill_at_first_token(m, "prefill"), DEATH_GOAL_S
    ),
    "token-one-decode": Fault(
        "kill -9 of the decode instance at a first token", lambda m: kill_at_first_token(m, "decode"), DEATH_GOAL_S
    ),
    "overload": Fault("three times the capacity", overload, load=OVERLOAD),
    "hog": Fault(f"a client with n={HOG_N}", hog),
}
