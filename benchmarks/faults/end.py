"""Sends SIGTERM to every process of a cluster at once, under load: what ends, how, and how soon; then starts again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from benchmarks.faults.ground import Ground
from benchmarks.faults.terms import Fault, Means, Seen
from benchmarks.load import Answer
from benchmarks.processes import family
from pd_cluster.tables import Result

DRAIN_S = 10.0
NUM_STREAMS = 24  # of the script itself, so that the signal meets some
MARGIN_S = 5.0  # for in-band errors and for releasing memory


class Stopping(Ground):
    """A launcher that restarts nothing."""

    restart = "no"
    arguments = (f"--drain-timeout={DRAIN_S:g}",)


async def terminate_all(means: Means) -> Seen:
    """Ends parents, ranks, preloader, scheduler and its children, as a host does on shutdown, amid streams."""
    begun: list[int] = []
    streams = [asyncio.ensure_future(_stream(means, number, begun)) for number in range(NUM_STREAMS)]
    try:
        await means.stage.until(f"{NUM_STREAMS} streams have begun", lambda: len(begun) == NUM_STREAMS)
        return await _end_all(means, streams)
    finally:
        for stream in streams:
            stream.cancel()


async def _stream(means: Means, number: int, begun: list[int]) -> Answer:
    sent_s = time.monotonic()
    sample = await means.stage.stream(means.body_of(number), lambda served_by: begun.append(number))
    return Answer(number, sent_s, time.monotonic(), sample)


async def _end_all(means: Means, streams: list[asyncio.Task[Answer]]) -> Seen:
    pids = [pid for pid in family(os.getpid()) if pid != os.getpid()]
    at_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    await means.stage.until(f"all {len(pids)} processes have ended", lambda: not any(map(_runs, pids)))
    took_s = time.monotonic() - at_s
    answers = await asyncio.gather(*streams)
    await means.stage.start_again()
    back_s = await means.stage.served(means.probe)
    await means.stage.whole()
    ended = Result(name="ended after", value=took_s, unit="s", better="lower", goal=DRAIN_S + MARGIN_S)
    return Seen(back_s=back_s, told_to_end_s=at_s, answers=answers, figures=[ended])


def _runs(pid: int) -> bool:
    """Returns whether the process runs; one that is not reaped yet has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


END_FAULTS: dict[str, Fault] = {
    "terminate-all": Fault("SIGTERM of every process at once", terminate_all, ground=Stopping()),
}
