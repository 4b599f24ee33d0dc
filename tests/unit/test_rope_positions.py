"""Rotary positions that differ from the tokens' indices: in steps' arrays, tensors and messages, and in limits."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.follower import _input_of
from pd_cluster.engine.ranks.rank_channel import encode
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs import forward_batch as module
from pd_cluster.model.inputs.forward_batch import batch_of
from pd_cluster.model.inputs.step_input import StepInput, step_input
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.types import NO_SAMPLING, Pooling, Request, RequestSpec, RopePositions, Sampling

BLOCK_SIZE = 4
LAYOUT = KVLayout(1, 1, keys_and_values(8), BLOCK_SIZE, "float32")


def request(own: RopePositions | None, num_prompt: int = 6, num_computed: int = 0, output: int = 0) -> Request:
    made = Request("r", RequestSpec([1] * num_prompt, Sampling(max_tokens=8), rope_positions=own))
    made.tables[0], made.num_computed_tokens = [0, 1, 2, 3], num_computed
    made.output_token_ids = [2] * output
    return made


def message_of(step: StepInput) -> to.Step:
    rope_positions = b"" if step.rope_positions is None else step.rope_positions.tobytes()
    parts = (step.rows.tobytes(), step.input_ids.tobytes(), step.blocks.tobytes())
    sent = to.Step(*parts, is_ahead=False, by_layers=False, rope_positions=rope_positions)
    return msgspec.msgpack.decode(encode(sent), type=to.Step)


def test_positions_go_on_after_the_prompt() -> None:
    own = RopePositions(((0, 1, 5, 5, 5, 9), (0, 1, 5, 6, 7, 9)), delta=4)
    assert own.between(4, 8) == [[5, 9, 10, 11], [7, 9, 10, 11]]
    assert own.between(7, 8) == [[11], [11]]
    assert own.between(0, 2) == [[0, 1], [0, 1]]


def test_positions_that_are_indices_cost_no_array_and_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    plain = module.on_device
    monkeypatch.setattr(module, "on_device", lambda arrays, device: given.append(arrays) or plain(arrays, device))
    own = RopePositions((tuple(range(3, 9)),), 3)
    pool = KVPool(LAYOUT, 4)
    for chunk in (
        (request(None), 5),
        (request(None, 6, 6, 1), 1),
        (request(None, 6, 7, 1), 1),
    ):  # the last is ahead
        step = step_input([chunk], BLOCK_SIZE)
        assert step.rope_positions is None
        assert b"rope_positions" not in encode(message_of(step))
        batch_of(step, pool)
        batch_of(step_input([(request(own), 5)], BLOCK_SIZE), pool)
    assert len({frozenset(arrays) for arrays in given}) == 1  # the same arrays in every case
    assert given[0]["rope_positions"].nbytes == 8 * 5
    assert [arrays["rope_positions"].tolist() for arrays in given[:4]] == [
        [[0, 1, 2, 3, 4]],
        [[3, 4, 5, 6, 7]],
        [[6]],
        [[3, 4, 5, 6, 7]],
    ]


def test_requests_with_one_row_three_rows_and_none_share_a_step() -> None:
    flat, spread = RopePositions((tuple(range(10, 16)),), 10), RopePositions(((0,) * 6, (1,) * 6, (2,) * 6), -3)
    chunks = [(request(None), 2), (request(flat, 6, 4), 2), (request(spread, 6, 5, 2), 3)]
    step = step_input(chunks, BLOCK_SIZE)
    assert step.rope_positions is not None
    shared = [0, 1, 14, 15]
    assert step.rope_positions.tolist() == [[*shared, 0, 3, 4], [*shared, 1, 3, 4], [*shared, 2, 3, 4]]
    batch = batch_of(step, KVPool(LAYOUT, 4))
    assert batch.rope_positions[:, 0].tolist() == step.rope_positions.tolist()
    assert batch.slot_mapping.tolist() == [0, 1, 4, 5, 5, 6, 7]  # slots follow tokens' indices, not their positions
    received = _input_of(message_of(step))
    assert received.rope_positions is not None
    assert np.array_equal(received.rope_positions, step.rope_positions)
    assert _input_of(message_of(step_input([(request(None), 2)], BLOCK_SIZE))).rope_positions is None
    ahead = step_input([(request(None, 6, 7, 1), 1), (request(spread, 6, 7, 1), 1)], BLOCK_SIZE)
    assert ahead.rope_positions is not None
    assert ahead.rope_positions.tolist() == [[7, 4]] * 3
    assert ahead.input_ids.tolist() == [0, 0]  # unknown to the host
    assert ahead.rows[:, 3].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (RopePositions((tuple(range(6)),)), None),
        (RopePositions((tuple(range(4, 10)),), 4), None),
        (RopePositions((tuple(range(6)),) * 3), "3 rows; this model takes 1"),
        (RopePositions(()), "0 rows; this model takes 1"),
        (RopePositions(((0, 1),)), "a row has 2 positions for 6 prompt tokens; give one each"),
        (RopePositions((tuple(range(6)),), 7), "positions from 0 to 20, with delta 7; this model supports"),
        (RopePositions(((0, 1, 2, 3, 4, 20),)), "positions from 0 to 20, with delta 0; this model supports"),
        (RopePositions((tuple(range(6)),), -7), "positions from -1 to 6, with delta -7; this model supports"),
    ],
)
def test_an_engine_refuses_positions_that_its_model_lacks(own: RopePositions, said: str | None) -> None:
    problem = EngineLimits(10, 20, RopeLimit(1, 20)).problem(request(own))
    assert (problem is None) == (said is None)
    assert problem is None or problem.startswith(f"rope_positions: {said}")


def test_no_position_is_needed_behind_a_prompt_that_is_pooled_and_a_model_says_why_it_takes_none() -> None:
    """A pooled prompt may fill the context, and its delta is ignored."""
    order = RequestSpec([1] * 20, NO_SAMPLING, rope_positions=RopePositions((tuple(range(20)),), 5), pooling=Pooling())
    assert EngineLimits(10, 20, RopeLimit(1, 20)).problem(Request("r", order, leg="hybrid")) is None
    limit = RopeLimit(3, 20, "its positions are fixed")
    assert limit.problem(request(None).order) is None
    own = RopePositions((tuple(range(6)),))
    assert limit.problem(request(own).order) == "rope_positions: its positions are fixed; remove the field"
    problem = RopeLimit(3, 20).problem(request(RopePositions(own.rows * 2)).order)
    assert problem == "rope_positions: 2 rows; this model takes 1 or 3"
