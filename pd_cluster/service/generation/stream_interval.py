"""Joins a stream's pieces, so that each has several tokens. Knows nothing of requests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from pd_cluster.service.generation.text_sequence import Piece, joined


def spaced(pieces: AsyncGenerator[Piece, None], interval: int) -> AsyncGenerator[Piece, None]:
    """Joins a choice's pieces until they have `interval` tokens. The first piece and the last text do not wait.

    Closing this closes `pieces`.
    """
    return pieces if interval == 1 else _spaced(pieces, interval)


async def _spaced(pieces: AsyncGenerator[Piece, None], interval: int) -> AsyncGenerator[Piece, None]:
    held: dict[int, list[Piece]] = {}  # choice -> its waiting pieces; no entry before its first piece
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            is_first = piece.index not in held
            waiting = held.setdefault(piece.index, [])
            waiting.append(piece)
            is_full = sum(len(each.token_ids) for each in waiting) >= interval
            if is_first or is_full or piece.finish_reason is not None:
                held[piece.index] = []
                yield joined(waiting)
