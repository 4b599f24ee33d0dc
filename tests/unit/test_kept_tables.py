"""Block tables that are updated between steps equal tables that are copied in full."""

from __future__ import annotations

import random

import pytest

from pd_cluster.model.inputs import step_input
from pd_cluster.model.inputs.step_input import RowCollector
from pd_cluster.types import Request, RequestSpec, Sampling

BLOCK_SIZE, NUM_BLOCKS = 4, 400
PADDING = NUM_BLOCKS  # the id of the pool's padding block


def collected(request: Request, num_tokens: int) -> list[list[int]]:
    """Returns both groups' blocks for a step over the request's next tokens, and for a step with three drafts."""
    rows = RowCollector(BLOCK_SIZE, [BLOCK_SIZE])
    start = request.num_computed_tokens
    rows.add(request, start, [0] * num_tokens)
    for at in range(3):
        rows.add(request, start + 1 + at, [0])
    return [rows.arrays()[2].tolist(), rows.further()[0].blocks.tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_tables_are_equal_to_whole_copies(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Covers growing tables, a block replaced by its copy, blocks that a window has passed, and preemption."""
    rng = random.Random(seed)
    request = Request("r", RequestSpec([1], Sampling()), tables=[[], []])
    whole, sliding = [], []
    for _ in range(300):
        if not whole or len(whole) > NUM_BLOCKS - 40 or rng.random() < 0.02:
            request.num_computed_tokens = rng.randrange(40)
            num_passed = rng.choice([0, 1, request.num_computed_tokens // BLOCK_SIZE])
            blocks = rng.sample(range(NUM_BLOCKS), 12)
            whole, sliding = blocks[:], [PADDING] * num_passed + blocks[num_passed:]
            request.tables = [whole, sliding]
        start, num_tokens = request.num_computed_tokens, rng.choice([1, 4, 30])
        for table in (whole, sliding):
            table += rng.sample(range(NUM_BLOCKS), 10)
        if rng.random() < 0.3:
            for table in (whole, sliding):
                table[start // BLOCK_SIZE] = rng.randrange(NUM_BLOCKS)
        monkeypatch.setattr(step_input, "LEAST_BLOCKS", 2)
        found = collected(request, num_tokens)
        monkeypatch.setattr(step_input, "LEAST_BLOCKS", 1 << 30)
        assert found == collected(request, num_tokens)
        request.num_computed_tokens += num_tokens
        num_passed = max(0, request.num_computed_tokens - rng.randrange(16, 40)) // BLOCK_SIZE
        sliding[:num_passed] = [PADDING] * num_passed
