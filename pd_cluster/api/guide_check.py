"""Whether a guide can be followed, found out where it can do no harm: in a child process that has a deadline.

Children are started when they are first needed, used again, and killed when a guide takes too long; verdicts are kept.
Knows nothing of HTTP, nor of what is in a guide.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from pd_cluster.errors import GuideError, Unavailable
from pd_cluster.types import Guide

log = logging.getLogger(__name__)

MAX_CHILDREN = 2  # one guide that takes long does not keep all others waiting
MAX_WAITING = 64
MAX_VERDICTS = 4096
START_TIMEOUT_S = 60.0  # to import and to read the tokenizer


class CheckSettings(msgspec.Struct, frozen=True):
    """The first line that a child gets."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckAnswer(msgspec.Struct, frozen=True):
    """`error` is empty for a good guide, and for the line that says that the child is ready."""

    error: str = ""


class GuideCheck:
    """Tells good guides from bad ones. `num_checked` and `num_killed` count what was not known already."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: frozenset[int], timeout_s: float = 5.0
    ) -> None:
        self._settings = CheckSettings(str(tokenizer_file), vocab_size, tuple(sorted(eos_token_ids)))
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(MAX_CHILDREN)
        self._idle: list[_Child] = []
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # digest of a guide -> what is wrong with it, or ""
        self._running: dict[bytes, asyncio.Task[str]] = {}
        self.num_checked = 0
        self.num_killed = 0

    async def check(self, guide: Guide) -> None:
        """Raises GuideError for a bad one, Unavailable when too many are being checked."""
        key = hashlib.sha256(msgspec.json.encode(guide)).digest()
        error = self._verdicts.get(key)
        if error is None:
            error = await self._new_verdict(key, guide)
        self._verdicts.move_to_end(key)
        if error:
            raise GuideError(error)

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._idle:
            await self._idle.pop().kill()

    async def _new_verdict(self, key: bytes, guide: Guide) -> str:
        """Who asks for the same guide meanwhile waits for the same check; who leaves does not stop it."""
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise Unavailable(f"{len(self._running)} guides are being checked; try again")
            task = self._running[key] = asyncio.create_task(self._checked(guide))
            task.add_done_callback(lambda _: self._running.pop(key))
        error = self._verdicts[key] = await asyncio.shield(task)
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return error

    async def _checked(self, guide: Guide) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable(f"no guide could be checked for {self._timeout_s:g} s; try again") from None
        try:
            return await self._try(guide)
        finally:
            self._free.release()

    async def _try(self, guide: Guide) -> str:
        """What is wrong with it. A child that was there already may have been broken before: then a new one tells."""
        self.num_checked += 1
        child = self._idle.pop() if self._idle else None
        if child is not None:
            with contextlib.suppress(ConnectionError, EOFError):
                return await self._ask(child, guide)
        child = await _Child.start(self._settings)
        try:
            return await self._ask(child, guide)
        except (ConnectionError, EOFError):
            return "it takes too much memory, or is nested too deeply; make it simpler"

    async def _ask(self, child: _Child, guide: Guide) -> str:
        """The child is idle after it, or dead. Raises EOFError or ConnectionError when it broke."""
        error: str | None = None
        try:
            error = await asyncio.wait_for(child.ask(guide), self._timeout_s)
        except TimeoutError:
            return f"it is not ready after {self._timeout_s:g} s (--guided-timeout); make it simpler"
        finally:
            if error is None:
                self.num_killed += 1
                await child.kill()
            else:
                self._idle.append(child)
        return error


class _Child:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, settings: CheckSettings) -> _Child:
        """Ready for guides. Raises GuideError with its own words when this model's outputs cannot be guided."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pd_cluster.api.guide_child",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        child = cls(process, *await asyncio.open_connection(sock=ours))
        error: str | None = None
        try:
            error = await asyncio.wait_for(child._exchange(settings), START_TIMEOUT_S)
            if error:
                raise GuideError(error)
        except (TimeoutError, ConnectionError, EOFError):
            log.error("the process that checks guides did not start within %g s", START_TIMEOUT_S)
            raise Unavailable("guides cannot be checked right now; the server's log has the details") from None
        finally:
            if error != "":
                await child.kill()
        return child

    async def ask(self, guide: Guide) -> str:
        """What is wrong with it, "" for nothing. Raises EOFError when the child broke."""
        return await self._exchange(guide)

    async def _exchange(self, message: msgspec.Struct) -> str:
        self._writer.write(msgspec.json.encode(message) + b"\n")
        await self._writer.drain()
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return msgspec.json.decode(line, type=CheckAnswer).error

    async def kill(self) -> None:
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
