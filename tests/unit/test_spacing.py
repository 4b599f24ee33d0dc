"""`--stream-interval`: several tokens in each piece of a stream, for every choice by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from pd_cluster.service.sequence import Piece, joined
from pd_cluster.service.spacing import spaced


def pieces_of(num_tokens: int, index: int) -> list[Piece]:
    pieces = [Piece(index, f"{at} ", [at], []) for at in range(num_tokens)]
    pieces[-1] = Piece(index, pieces[-1].text, pieces[-1].token_ids, [], "length")
    return pieces


def through(given: list[Piece], interval: int) -> list[Piece]:
    async def source() -> AsyncGenerator[Piece, None]:
        for piece in given:
            yield piece

    async def collect() -> list[Piece]:
        return [piece async for piece in spaced(source(), interval)]

    return asyncio.run(collect())


def test_the_first_token_does_not_wait_nor_does_the_end() -> None:
    found = through(pieces_of(8, 0), 3)
    assert [piece.token_ids for piece in found] == [[0], [1, 2, 3], [4, 5, 6], [7]]
    assert [piece.finish_reason for piece in found] == [None, None, None, "length"]


@pytest.mark.parametrize("interval", [1, 2, 5, 100])
def test_each_choice_keeps_its_text(interval: int) -> None:
    rng = random.Random(interval)
    waiting = [pieces_of(rng.randint(1, 20), index) for index in range(4)]
    expected = [joined(each) for each in waiting]
    given = []
    while any(waiting):
        given.append(rng.choice([each for each in waiting if each]).pop(0))
    found = through(given, interval)
    assert [joined([piece for piece in found if piece.index == index]) for index in range(4)] == expected
    for index in range(4):
        mine = [piece for piece in found if piece.index == index]
        assert all(len(piece.token_ids) == interval for piece in mine[1:-1])


def test_closing_it_closes_the_source() -> None:
    closed = []

    async def source() -> AsyncGenerator[Piece, None]:
        try:
            for piece in pieces_of(9, 0):
                yield piece
        finally:
            closed.append(True)

    async def close_early() -> None:
        stream = spaced(source(), 4)
        await anext(stream)
        await stream.aclose()

    asyncio.run(close_early())
    assert closed
