"""`--stream-interval`: several tokens per piece of a stream, separately for each choice."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator

import pytest

from pd_cluster.service.generation.stream_interval import spaced
from pd_cluster.service.generation.text_sequence import Piece, joined


def pieces_of(num_tokens: int, index: int) -> list[Piece]:
    pieces = [Piece(index, f"{at} ", [at], []) for at in range(num_tokens)]
    pieces[-1] = Piece(index, pieces[-1].text, pieces[-1].token_ids, [], "length")
    return pieces


async def source(given: list[Piece], closed: list[bool] | None = None) -> AsyncGenerator[Piece, None]:
    try:
        for piece in given:
            yield piece
    finally:
        if closed is not None:
            closed.append(True)


async def through(given: list[Piece], interval: int) -> list[Piece]:
    return [piece async for piece in spaced(source(given), interval)]


async def test_the_first_token_does_not_wait_nor_does_the_end() -> None:
    found = await through(pieces_of(8, 0), 3)
    assert [piece.token_ids for piece in found] == [[0], [1, 2, 3], [4, 5, 6], [7]]
    assert [piece.finish_reason for piece in found] == [None, None, None, "length"]


@pytest.mark.parametrize("interval", [1, 2, 5, 100])
async def test_each_choice_keeps_its_text(interval: int) -> None:
    rng = random.Random(interval)
    waiting = [pieces_of(rng.randint(1, 20), index) for index in range(4)]
    expected = [joined(each) for each in waiting]
    given = []
    while any(waiting):
        given.append(rng.choice([each for each in waiting if each]).pop(0))
    found = await through(given, interval)
    for index in range(4):
        mine = [piece for piece in found if piece.index == index]
        assert joined(mine) == expected[index]
        assert all(len(piece.token_ids) == interval for piece in mine[1:-1])


async def test_closing_it_closes_the_source() -> None:
    closed = list[bool]()
    stream = spaced(source(pieces_of(9, 0), closed), 4)
    await anext(stream)
    await stream.aclose()
    assert closed
