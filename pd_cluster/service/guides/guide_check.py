"""Checks whether a guide can be used, in a child process with a deadline, where it can do no harm.

Verdicts are cached. Knows nothing of HTTP or of a guide's contents.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pd_cluster.errors import GuideError
from pd_cluster.service.concurrency.child_pool import ChildCrashed, ChildPool, ChildTimeout
from pd_cluster.service.concurrency.fair_slots import current_client
from pd_cluster.types import Guide

MAX_VERDICTS = 4096


class CheckSettings(msgspec.Struct, frozen=True):
    """The first line that is sent to a child."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckAnswer(msgspec.Struct, frozen=True):
    """`error` is empty for a valid guide, and for the line that reports a ready child."""

    error: str = ""


@dataclass(slots=True, eq=False)
class _Check:
    task: asyncio.Task[str]
    num_waiting: int = 0


class GuideCheck:
    """Rejects invalid guides. `num_checked` counts guides without a cached verdict."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: frozenset[int], timeout_s: float = 4.0
    ) -> None:
        settings = CheckSettings(str(tokenizer_file), vocab_size, tuple(sorted(eos_token_ids)))
        self.children = ChildPool(
            "pd_cluster.service.guides.guide_child", msgspec.json.encode(settings), timeout_s, "guide", _started
        )
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # digest of a guide -> its error, or ""
        self.running: dict[tuple[str, bytes], _Check] = {}  # (client, digest): each client has its own turn
        self.num_checked = 0

    async def check(self, guide: Guide) -> None:
        """Raises GuideError for an invalid guide, NoCapacity if too many guides are being checked."""
        key = hashlib.sha256(msgspec.json.encode(guide)).digest()
        error = self._verdicts.get(key)
        if error is None:
            error = await self._new_verdict(key, guide)
        else:
            self._verdicts.move_to_end(key)
        if error:
            raise GuideError(error)

    async def close(self) -> None:
        tasks = [check.task for check in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.children.close()

    async def _new_verdict(self, key: bytes, guide: Guide) -> str:
        """Shares one check among a client's requests with the same guide; the check is cancelled when all of them have
        left.
        """
        by = (current_client.get(), key)
        check = self.running.get(by)
        if check is None:
            check = self.running[by] = _Check(asyncio.create_task(self._checked(key, guide)))
            check.task.add_done_callback(lambda _: self.running.pop(by))
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting:
                check.task.cancel()

    async def _checked(self, key: bytes, guide: Guide) -> str:
        """Checks a guide. A lack of time or memory may be temporary, so such a verdict is not cached."""
        self.num_checked += 1
        try:
            answer = await self.children.ask(msgspec.json.encode(guide))
        except ChildTimeout as error:
            return f"it is {error} (--guided-timeout); make it simpler"
        except ChildCrashed:
            return "it takes too much memory, or is nested too deeply; make it simpler"
        found = self._verdicts[key] = msgspec.json.decode(answer, type=CheckAnswer).error
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return found


def _started(line: bytes) -> None:
    """Raises GuideError with the child's own message when this model's outputs cannot be guided."""
    if error := msgspec.json.decode(line, type=CheckAnswer).error:
        raise GuideError(error)
