"""One run of `run-batch`: opens its files, skips answered requests, answers the rest, and reports the result."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pd_cluster.errors import ConfigError, InstanceLost, PdClusterError, Unavailable
from pd_cluster.offline.batch_progress import shown
from pd_cluster.offline.batch_runner import BatchRunner
from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.output_files import open_output
from pd_cluster.service.files.batch_lines import (
    Answered,
    BatchEntry,
    BatchPlan,
    Output,
    OutputFailed,
    answered_in,
    entries_of,
    plan,
)

STANDARD = "-"
SYNC_EVERY_S = 1.0
INTERRUPTED = 130  # exit code, as in shells after Ctrl-C


class Target(NamedTuple):
    """The output. `file` is set if the output can be read, so that another run can continue it."""

    fd: int
    file: BinaryIO | None


@dataclass(frozen=True, slots=True)
class BatchJob:
    source: str
    target: str
    config: OfflineConfig
    concurrency: int

    def run(self) -> int:
        """Returns the exit code. Raises ConfigError before any work, PdClusterError if the engine has ended."""
        started_s = time.monotonic()
        with opened_source(self.source) as source, opened_target(self.target) as target:
            if target.file is not None and os.path.sameopenfile(source.fileno(), target.fd):
                raise ConfigError(f"-o {self.target}: the same file as the input; give another one")
            answered = Answered(set(), 0) if target.file is None else answered_in(target.file, self.target)
            entries = partial(entries_of, source)
            found = plan(entries, answered.keys, self.source)
            if target.file is not None:
                os.ftruncate(target.fd, answered.nbytes)
            if num_before := found.num_lines - found.num_left:
                _say(f"{num_before:,} of {found.num_lines:,} requests already have their answers in {self.target}")
            left = (entry for entry in entries() if entry.key not in answered.keys)
            return self._answer(left, found, Output(target.fd), started_s, target.file is not None)

    def _answer(
        self, left: Iterator[BatchEntry], found: BatchPlan, output: Output, started_s: float, resumes: bool
    ) -> int:
        batch: BatchRunner | None = None
        try:
            if found.num_left:
                with OfflineService(self.config) as offline:
                    batch = BatchRunner(offline.service, output.write, self.concurrency)
                    offline.run(_shown(batch, left, found.num_left, output))
        except KeyboardInterrupt:
            _say(f"stopped; {self._so_far(batch, found, resumes)}")
            return INTERRUPTED
        except (Unavailable, InstanceLost, OutputFailed) as error:
            raise PdClusterError(f"run-batch: {error}; {self._so_far(batch, found, resumes)}") from None
        _say(self._summary(batch, found, time.monotonic() - started_s))
        return 0

    def _so_far(self, batch: BatchRunner | None, found: BatchPlan, resumes: bool) -> str:
        num_done = found.num_lines - found.num_left + (batch.counts.num_done if batch is not None else 0)
        way_on = "the same command continues from there" if resumes else "with an output file, a run can be continued"
        return f"{num_done:,} of {found.num_lines:,} requests have their answers in {self.target}; {way_on}"

    def _summary(self, batch: BatchRunner | None, found: BatchPlan, took_s: float) -> str:
        if batch is None:
            return f"nothing to do; {found.num_lines:,} requests, all answered in {self.target}"
        counts = batch.counts
        failed = f"{counts.num_failed:,} of them with an error"
        if counts.first_failure:
            failed += f" (the first is {counts.first_failure})"
        return (
            f"{counts.num_done:,} requests answered in {self.target}, {failed}; "
            f"{counts.num_output_tokens:,} output tokens in {took_s:.1f} s"
        )


async def _shown(batch: BatchRunner, left: Iterator[BatchEntry], total: int, output: Output) -> None:
    async with shown(batch.counts, total), _synced(output):
        await batch.run(left)


@contextlib.asynccontextmanager
async def _synced(output: Output) -> AsyncIterator[None]:
    """Syncs the output regularly and at the end: a power cut during the batch loses only the most recent answers."""

    async def sync() -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            await asyncio.to_thread(output.sync)  # errors are left to the next write, which raises them, too

    syncing = asyncio.create_task(sync())
    try:
        yield
    finally:
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)
        output.sync()


def _say(line: str) -> None:
    print(f"run-batch: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def opened_source(name: str) -> Iterator[BinaryIO]:
    """Opens the input. Copies a pipe to a temporary file, because the input is read twice. Raises ConfigError."""
    _check_local("-i", name)
    with contextlib.ExitStack() as stack:
        try:
            source: BinaryIO = sys.stdin.buffer if name == STANDARD else stack.enter_context(Path(name).open("rb"))
            if name == STANDARD or not source.seekable():
                copy = stack.enter_context(tempfile.TemporaryFile(prefix="pd-cluster-"))
                shutil.copyfileobj(source, copy)
                source = copy
        except OSError as error:
            raise ConfigError(f"-i {name}: cannot be read: {error.strerror}") from None
        yield source


@contextlib.contextmanager
def opened_target(name: str) -> Iterator[Target]:
    """Opens the output. Raises ConfigError, also if another run writes it."""
    _check_local("-o", name)
    if name == STANDARD:
        yield Target(sys.stdout.fileno(), None)
        return
    try:
        is_new = not Path(name).exists()
        is_file = is_new or stat.S_ISREG(Path(name).stat().st_mode)
    except OSError as error:
        raise ConfigError(f"-o {name}: cannot be written: {error.strerror}") from None
    fd = open_output(name, "-o", os.O_RDWR if is_file else os.O_WRONLY)
    with os.fdopen(fd, "rb" if is_file else "wb", closefd=True) as file:
        if is_new:
            _sync_folder_of(name)
        if is_file:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"-o {name}: another run-batch writes it; wait for its end, or end it") from None
        yield Target(fd, file if is_file else None)


def _sync_folder_of(name: str) -> None:
    """Syncs the folder, so that a power cut does not lose the file itself."""
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        fd = os.open(Path(name).absolute().parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _check_local(flag: str, name: str) -> None:
    if name.lower().startswith(("http://", "https://")):
        raise ConfigError(f"{flag} {name}: must be a file, or - for standard input or output; transfer it with curl")
