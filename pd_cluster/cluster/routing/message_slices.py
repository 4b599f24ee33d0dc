"""Handles workers' large messages in slices, so that the event loop reads requests and first tokens in between.

A step of a full decode instance yields hundreds of tokens. Each wakes a reader and causes a write; without slices they
would block the loop for milliseconds. Waiting items are kept by leg, so a loop that has fallen behind hands each reader
all its tokens at once and catches up. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pd_cluster import wire
from pd_cluster.types import LegEnd, TokenOutput

SLICE_NUM_TOKENS = 8
SHARE = 8  # a slice handles at least 1 / SHARE of the waiting legs, so that all of them make progress
MOST_OF_LEG = 64  # the most items of one leg in a slice

Leg = tuple[str, str]  # connection, request id


class MessageSlices:
    """Handles the items of one leg in order; legs take turns in the order in which they began to wait.

    `handle` also receives the time when the first of the items was received.
    """

    def __init__(self, handle: Callable[[str, wire.Outputs, float], None]) -> None:
        self._handle = handle
        self._waiting: dict[Leg, list[TokenOutput | LegEnd]] = {}
        self._heard_s: dict[Leg, float] = {}  # leg -> when its first waiting item was received

    def add(self, conn: str, outputs: wire.Outputs, heard_s: float) -> None:
        """Handles a small message at once unless its legs have waiting items; divides others into slices."""
        waiting = self._waiting
        is_small = len(outputs.tokens) + len(outputs.ended) <= SLICE_NUM_TOKENS
        if is_small and not waiting:  # the usual case
            self._handle(conn, outputs, heard_s)
            return
        items: list[TokenOutput | LegEnd] = [*outputs.tokens, *outputs.ended]
        if is_small and not any((conn, item.request_id) in waiting for item in items):
            self._handle(conn, outputs, heard_s)
            return
        if outputs.prompts or outputs.events or outputs.pooled:  # a prompt's outputs come before its tokens
            self._handle(conn, msgspec.structs.replace(outputs, tokens=[], ended=[]), heard_s)
        is_first = not waiting
        for item in items:
            leg = conn, item.request_id
            waiting.setdefault(leg, []).append(item)
            self._heard_s.setdefault(leg, heard_s)
        if is_first:
            self._next()

    def forget(self, request_id: str) -> None:
        """Drops waiting items of a request."""
        for leg in [leg for leg in self._waiting if leg[1] == request_id]:
            del self._waiting[leg], self._heard_s[leg]

    def _next(self) -> None:
        chosen: dict[str, list[TokenOutput | LegEnd]] = {}
        heard_s: dict[str, float] = {}
        num_chosen, num_left = 0, len(self._waiting) - len(self._waiting) // SHARE
        while self._waiting and (num_chosen < SLICE_NUM_TOKENS or len(self._waiting) > num_left):
            leg = next(iter(self._waiting))
            items = self._waiting.pop(leg)
            leg_heard_s = self._heard_s[leg]
            if len(items) > MOST_OF_LEG:
                self._waiting[leg] = items[MOST_OF_LEG:]  # the leg now comes after the other legs
            else:
                del self._heard_s[leg]
            heard_s[leg[0]] = min(heard_s.get(leg[0], leg_heard_s), leg_heard_s)
            chosen.setdefault(leg[0], []).extend(items[:MOST_OF_LEG])
            num_chosen += len(items)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        for conn, items in chosen.items():
            tokens = [item for item in items if isinstance(item, TokenOutput)]
            ended = [item for item in items if isinstance(item, LegEnd)]
            self._handle(conn, wire.Outputs(tokens, ended), heard_s[conn])
