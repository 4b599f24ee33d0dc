"""Graphs of steps with prompts: which steps use one, what its buffers hold, and which errors end capturing.

tests/support/cuda_model_cases.py shows that they compute the same as eager steps.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs.decode_graphs import GraphRules, Run
from pd_cluster.model.graphs.prompt_graphs import GraphSize, PromptGraphs, sizes_up_to
from pd_cluster.model.graphs.step_graphs import check_prompt_graphs
from pd_cluster.model.inputs.forward_batch import ForwardBatch, batch_of
from pd_cluster.model.inputs.step_input import StepInput, step_input
from pd_cluster.model.kernels.cuda.attention.attention_plan import Ids
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.types import Request, RequestSpec, RopePositions, Sampling

BLOCK_SIZE, NUM_BLOCKS, LONGEST, VOCAB_SIZE = 4, 200, 300, 11
LAYOUT = KVLayout(2, 1, keys_and_values(8), BLOCK_SIZE, "float32")
FULL = "other steps with prompts run eagerly (graphs captured: 1): CUDA out of memory"


class OneTile:
    """Plans the same single tile for every step."""

    def num_tiles(self, size: GraphSize) -> int:
        return 1

    def items(self, query_lens: Any, context_lens: Any, size: GraphSize) -> tuple[Ids, Ids]:
        return np.full(size.num_seqs, 7, dtype=np.int32), np.array([[8, 9]], dtype=np.int32)

    def install(self, batch: ForwardBatch, size: GraphSize, longest: int, decode_seqs: Any, tiles: Any) -> None:
        batch.kernel_state = size, decode_seqs, tiles


class Model:
    """Returns the ids of sampled rows as logits."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        return batch.input_ids[0, batch.sample_rows][:, None].expand(-1, VOCAB_SIZE).float()


@pytest.fixture
def model() -> Model:
    return Model()


def graphs_of(model: Model, max_num_seqs: int = 16, capture: Any = lambda run: run, **given: Any) -> PromptGraphs:
    pool = KVPool(LAYOUT, NUM_BLOCKS)
    return PromptGraphs(cast(CausalLM, model), pool, capture, GraphRules(max_num_seqs, LONGEST, **given), OneTile())


def chunk(num_computed: int, num_tokens: int, is_last: bool = True, first_block: int = 0) -> tuple[Request, int]:
    length = num_computed + num_tokens + (not is_last)
    table = list(range(first_block, first_block + -(-length // BLOCK_SIZE)))
    request = Request(
        "r", RequestSpec(list(range(length)), Sampling()), num_computed_tokens=num_computed, tables=[table]
    )
    return request, num_tokens


def test_sizes_hold_no_more_sequences_than_a_step_may_have() -> None:
    assert [size.num_seqs for size in sizes_up_to(10)] == [4, 10] * 4


def test_buffers_hold_the_step_and_padding(model: Model) -> None:
    graphs = graphs_of(model)
    step = step_input([chunk(6, 5), chunk(0, 9, is_last=False, first_block=10), chunk(20, 1, first_block=20)], 4)
    logits = graphs.compute(step)
    assert logits is not None
    own, found = batch_of(step, KVPool(LAYOUT, NUM_BLOCKS)), model.batches[-1]
    assert logits.tolist() == own.input_ids[0, own.sample_rows][:, None].expand(-1, VOCAB_SIZE).tolist()
    assert cast(Any, found.kernel_state)[0] == (64, 4)
    fillers = {
        "input_ids": [0] * 49,
        "rope_positions": [0] * 49,
        "slot_mapping": [NUM_BLOCKS * BLOCK_SIZE] * 49,
        "query_starts": [15, 15],
        "context_lens": [0, 0],
        "table_starts": [own.table_starts[-1]] * 2,
    }
    for name, filler in fillers.items():
        expected = getattr(own, name).reshape(-1).tolist() + filler
        assert getattr(found, name).reshape(-1).tolist() == expected, name
    assert found.sample_rows.tolist() == [*own.sample_rows.tolist(), 0, 0]
    assert found.block_table[: len(own.block_table)].tolist() == own.block_table.tolist()
    _, decode_seqs, tiles = cast(Any, found.kernel_state)
    assert (decode_seqs.tolist(), tiles.tolist()) == ([7] * 4, [[8, 9]])


def test_device_tokens_take_the_place_of_the_step_s(model: Model) -> None:
    graphs, ids = graphs_of(model), torch.tensor([3, 1, 4, 1, 5])
    logits = graphs.compute(step_input([chunk(0, 3), chunk(0, 2, first_block=5)], BLOCK_SIZE), ids)
    assert logits is not None
    assert logits[:, 0].tolist() == [4, 5]


def test_steps_of_another_kind_are_left_to_others(model: Model) -> None:
    graphs = graphs_of(model)
    together = [chunk(0, 2, first_block=i) for i in range(17)]
    turned = Request("m", RequestSpec([1, 2], Sampling(), rope_positions=RopePositions(((1, 2), (1, 3), (1, 2)), 2)))
    turned.tables[0] = [0]
    images: Any = (SimpleNamespace(),)
    others: list[StepInput] = [
        step_input([chunk(5, 1), chunk(6, 1, first_block=9)], BLOCK_SIZE),  # decode steps
        step_input([chunk(0, 256), chunk(0, 256, first_block=70)], BLOCK_SIZE),
        step_input(together, BLOCK_SIZE),
        step_input([chunk(LONGEST - 3, 4)], BLOCK_SIZE),
        step_input([(turned, 2)], BLOCK_SIZE),
    ]
    few = step_input([chunk(0, 3)], BLOCK_SIZE)
    others.append(StepInput(few.rows, few.input_ids, few.blocks, images=images))
    for column, value in ((3, 2), (5, 1)):  # logits of several rows, and hidden states
        rows = few.rows.copy()
        rows[0, column] = value
        others.append(StepInput(rows, few.input_ids, few.blocks))
    for step in others:
        assert graphs.compute(step) is None
    assert not model.batches
    assert graphs.compute(few) is not None
    assert graphs.compute(step_input(together[:16], BLOCK_SIZE)) is not None


def test_without_memory_other_sizes_run_eagerly(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    def capture(run: Run) -> Run:
        if model.batches:
            raise torch.OutOfMemoryError("CUDA out of memory\nand where")
        run()
        return run

    graphs = graphs_of(model, capture=capture)
    few, more = (step_input([chunk(0, num_tokens)], BLOCK_SIZE) for num_tokens in (3, 100))
    assert graphs.compute(few) is not None
    for _ in range(2):
        assert graphs.compute(more) is None
    assert caplog.text.count(FULL) == 1
    assert graphs.compute(few) is not None
    ranks = graphs_of(model, capture=capture, is_alone=False)
    with pytest.raises(torch.OutOfMemoryError):
        ranks.compute(few)


def test_models_that_cannot_have_them_are_refused() -> None:
    fused = FusedCausalLM.__new__(FusedCausalLM)
    fused.attention, fused.caches = "FlashInfer 1 (sm_90)", ()
    for model, why in ((Model(), "this model's layers are not fused"), (fused, "its attention runs on FlashInfer 1")):
        check_prompt_graphs(cast(CausalLM, model), ("pdl",))
        with pytest.raises(ConfigError, match=rf"^--cuda-speedups prompt-graphs: {why}"):
            check_prompt_graphs(cast(CausalLM, model), ("prompt-graphs",))
    fused.attention = "Triton"
    check_prompt_graphs(fused, ("prompt-graphs",))
