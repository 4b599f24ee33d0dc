"""Checks whether a guide can be followed, where it can do no harm: in a child process that has a deadline.

Verdicts are cached. Knows nothing of HTTP, or of a guide's contents.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from pathlib import Path

import msgspec

from pd_cluster.errors import GuideError, NoRoom
from pd_cluster.service.helpers.children import Broke, Children, TookTooLong
from pd_cluster.types import Guide

MAX_WAITING = 64
MAX_VERDICTS = 4096


class CheckSettings(msgspec.Struct, frozen=True):
    """The first line that is sent to a child."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckAnswer(msgspec.Struct, frozen=True):
    """`error` is empty for a good guide, and for the line that reports that the child is ready."""

    error: str = ""


class GuideCheck:
    """Separates good guides from bad ones. `num_checked` counts guides without a cached verdict."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: frozenset[int], timeout_s: float = 4.0
    ) -> None:
        settings = CheckSettings(str(tokenizer_file), vocab_size, tuple(sorted(eos_token_ids)))
        self.children = Children(
            "pd_cluster.service.guides.guide_child", msgspec.json.encode(settings), timeout_s, "guide", _started
        )
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # digest of a guide -> its error, or ""
        self._running: dict[bytes, asyncio.Task[str]] = {}
        self.num_checked = 0

    async def check(self, guide: Guide) -> None:
        """Raises GuideError for a bad guide, NoRoom when too many are being checked."""
        key = hashlib.sha256(msgspec.json.encode(guide)).digest()
        error = self._verdicts.get(key)
        if error is None:
            error = await self._new_verdict(key, guide)
        else:
            self._verdicts.move_to_end(key)
        if error:
            raise GuideError(error)

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.children.close()

    async def _new_verdict(self, key: bytes, guide: Guide) -> str:
        """Shares one check among all who request the same guide; a caller that leaves does not stop it."""
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise NoRoom(f"{len(self._running)} guides are being checked; try again")
            task = self._running[key] = asyncio.create_task(self._checked(key, guide))
            task.add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(task)

    async def _checked(self, key: bytes, guide: Guide) -> str:
        """Checks a guide. Lack of time or memory may be temporary, so such a verdict is not kept."""
        self.num_checked += 1
        try:
            answer = await self.children.ask(msgspec.json.encode(guide))
        except TookTooLong as error:
            return f"it is {error} (--guided-timeout); make it simpler"
        except Broke:
            return "it takes too much memory, or is nested too deeply; make it simpler"
        found = self._verdicts[key] = msgspec.json.decode(answer, type=CheckAnswer).error
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return found


def _started(line: bytes) -> None:
    """Raises GuideError with the child's own message when this model's outputs cannot be guided."""
    if error := msgspec.json.decode(line, type=CheckAnswer).error:
        raise GuideError(error)
