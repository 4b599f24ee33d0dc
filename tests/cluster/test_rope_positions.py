"""Across real processes: rotary positions reach both legs of a request, and a second request's cached prefix."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.cluster.routing.stream import RequestStream
from pd_cluster.errors import GenerationError
from pd_cluster.offline.session import Offline, OfflineConfig
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, RopePositions, Sampling
from tests.support.checkpoints import reference_model
from tests.support.engines import random_prompt
from tests.support.positions import KINDS, assert_same

SAMPLING = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


async def tokens_of(offline: Offline, orders: list[Order]) -> list[list[int]]:
    """Serves all at once, by the router of this process; each by two instances."""

    def routed(stream: RequestStream) -> None:
        assert stream.prefill.name != stream.decode.name

    async def one(order: Order) -> list[int]:
        return [output.token_id async for output in offline.service.router.serve(order, routed)]

    return await asyncio.gather(*map(one, orders))


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_positions_are_the_same_on_both_legs(checkpoint: Callable[..., Path], tp_size: int) -> None:
    """In chunks, and then from a prefix cache."""
    folder, rng = checkpoint("llama"), random.Random(8)
    model = reference_model(folder)
    engine = EngineConfig(
        model=str(folder),
        tensor_parallel_size=tp_size,
        block_size=4,
        num_blocks=64,
        max_model_len=120,
        max_num_batched_tokens=24,
    )
    orders = [
        Order(random_prompt(rng, length), SAMPLING, rope_positions=kind(rng, length) if kind else None)
        for length in (9, 30, 50)
        for kind in (*KINDS.values(), None)
    ]
    with Offline(OfflineConfig(engine=engine, prefill=1, decode=1)) as offline:
        for _ in range(2):
            for order, tokens in zip(orders, offline.run(tokens_of(offline, orders)), strict=True):
                assert len(tokens) == SAMPLING.max_tokens
                assert_same(model, order.prompt_token_ids, order.rope_positions, tokens)
        three = Order([1, 2], SAMPLING, rope_positions=RopePositions(((0, 1),) * 3))
        with pytest.raises(GenerationError, match="rope_positions: 3 rows; this model takes 1"):
            offline.run(tokens_of(offline, [three]))
