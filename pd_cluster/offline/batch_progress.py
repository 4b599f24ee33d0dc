"""Shows a batch's progress on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pd_cluster.offline.batch_runner import Counts

LINE_EVERY_S, BAR_EVERY_S = 5.0, 0.2


@contextlib.asynccontextmanager
async def shown(counts: Counts, total: int) -> AsyncIterator[None]:
    """Shows the progress. `total`: the number of requests of this run."""
    showing = asyncio.create_task(_bar(counts, total) if sys.stderr.isatty() else _lines(counts, total))
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _bar(counts: Counts, total: int) -> None:
    columns = (TextColumn("run-batch"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}"))
    started_s = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, more="")
        try:
            while True:
                bar.update(task, completed=counts.num_done, more=_more(counts, time.monotonic() - started_s))
                await asyncio.sleep(BAR_EVERY_S)
        finally:
            bar.update(task, completed=counts.num_done, more=_more(counts, time.monotonic() - started_s))


async def _lines(counts: Counts, total: int) -> None:
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        more = _more(counts, time.monotonic() - started_s)
        print(f"run-batch: {counts.num_done:,} of {total:,} requests, {more}", file=sys.stderr, flush=True)


def _more(counts: Counts, took_s: float) -> str:
    failed = f", {counts.num_failed:,} with an error" if counts.num_failed else ""
    return f"{counts.num_output_tokens / max(took_s, 1e-3):,.0f} output tokens/s{failed}"
