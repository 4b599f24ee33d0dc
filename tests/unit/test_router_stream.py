"""A stream passes tokens on in order and once, whatever the workers' messages are."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import cast

from pd_cluster.cluster.routing.stream import MAX_IN_A_ROW, Inbox, RequestStream, TokenSequence, ask_of
from pd_cluster.types import FinishReason, Order, TokenOutput
from tests.support.router_world import PROMPT, SAMPLING, ready, token


def stream_of(num_sequences: int, attempt: int) -> RequestStream:
    order, instance = Order(PROMPT, SAMPLING), ready("prefill-0")
    sequences = [TokenSequence(index) for index in range(num_sequences)]
    return RequestStream("r", attempt, {}, order, ask_of(order), instance, instance, sequences, lambda *_: None)


def read_now(stream: RequestStream) -> list[TokenOutput]:
    """Returns the messages that a reader gets without waiting."""

    async def read() -> list[TokenOutput]:
        return [cast(TokenOutput, await stream.inbox.get()) for _ in range(len(stream.inbox))]

    return asyncio.run(read())


def test_tokens_leave_in_order_and_once_whatever_comes() -> None:
    """Messages are shuffled, doubled, or of other attempts: each sequence yields its longest gapless run so far."""
    for seed in range(60):
        rng = random.Random(seed)
        n = rng.randrange(1, 4)
        stream = stream_of(n, attempt=1)
        num_tokens = rng.randrange(1, 9)
        offered = [
            token("r", p, 1000 * i + 100 * a + p, attempt=a, index=i)
            for i in range(-1, n + 1)
            for p in range(num_tokens)
            for a in (0, 1, 1, 2)
        ]
        rng.shuffle(offered)
        come: set[tuple[int, int]] = set()
        left: list[list[TokenOutput]] = [[] for _ in range(n)]
        for item in offered[: rng.randrange(len(offered) + 1)]:
            stream.put(item)
            come |= {(item.index, item.position)} if item.attempt == 1 else set()
            for out in read_now(stream):
                left[out.index].append(out)
            for index in range(n):
                gapless = next(p for p in range(num_tokens + 1) if (index, p) not in come)
                assert [t.position for t in left[index]] == list(range(gapless))
                assert [t.token_id for t in left[index]] == [1000 * index + 100 + p for p in range(gapless)]


def test_tokens_told_together_leave_as_if_told_singly() -> None:
    """Cut anyhow, doubled, overlapping, out of order."""
    for seed in range(60):
        rng = random.Random(seed)
        stream = stream_of(1, attempt=0)
        token_ids = [100 + position for position in range(12)]
        told: list[TokenOutput] = []
        for _ in range(rng.randrange(1, 4)):
            cuts = sorted(rng.sample(range(1, 12), rng.randrange(6)))
            for start, stop in itertools.pairwise([0, *cuts, 12]):
                *earlier, last = token_ids[start:stop]
                finish: FinishReason | None = "length" if stop == 12 else None
                told.append(TokenOutput("r", 0, 0, stop - 1, last, finish, earlier=tuple(earlier)))
        if rng.random() < 0.5:
            rng.shuffle(told)
        for each in told:
            stream.put(each)
        left = [each for out in read_now(stream) for each in out.apart()]
        assert [(each.position, each.token_id) for each in left] == list(enumerate(token_ids))
        assert [each.finish_reason for each in left] == [None] * 11 + ["length"]
        assert list(stream.sequences[0].token_ids) == token_ids


async def test_a_reader_of_many_ready_items_lets_others_have_their_turn() -> None:
    inbox, turns = Inbox(), 0
    for _ in range(4 * MAX_IN_A_ROW):
        inbox.put(None)

    async def count_turns() -> None:
        nonlocal turns
        while len(inbox):
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    while len(inbox):
        await inbox.get()
    await other
    assert 3 <= turns <= 6, "once in MAX_IN_A_ROW items, and not for each"
