"""Decode steps through the buffers of graphs give what they give without; captured as calls that are made again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.model import graphs as module
from pd_cluster.model import loader
from pd_cluster.model.batch import ForwardBatch, step_input
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.model.graphs import DecodeGraphs, bucket_of, sizes_of
from pd_cluster.types import Order, Request, RopePositions, Sampling
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.graph_world import BLOCK_SIZE, MAX_LEN, MOST, NUM_BLOCKS, World

FULL = (
    "decode steps of further sizes run eagerly: no memory is left after 1 graphs; a lower --gpu-memory-utilization or "
    "fewer --graph-sizes leave some"
)


@pytest.fixture(params=["llama", "gemma2"])
def model(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> CausalLM:
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    return loader.load_model(Checkpoint.open(str(checkpoint(request.param))), "float32", CPU)


def test_replayed_steps_are_the_steps(model: CausalLM) -> None:
    with torch.inference_mode():
        for seed in range(4):
            world = World(model, seed)
            world.start(3 * seed + 1)
            for _ in range(6):
                world.decode()
            torch.testing.assert_close(
                world.pool.data[:NUM_BLOCKS], world.eager.data[:NUM_BLOCKS], rtol=1e-4, atol=1e-4
            )
            assert 6 <= sum(world.runs) <= 7  # the prompts are a step, too, where each is one token
            assert world.graphs.num_captured < sum(world.runs)


def test_padding_touches_no_block_but_its_own(model: CausalLM) -> None:
    with torch.inference_mode():
        world = World(model, 5)
        world.start(3)
        before = world.pool.data.clone()
        assert world.graphs.compute(step_input([(r, 1) for r in _grown(world.requests)], BLOCK_SIZE)) is not None
        changed = (world.pool.data != before).flatten(1).any(1).nonzero().flatten().tolist()
        own = {r.block_table[r.num_computed_tokens // BLOCK_SIZE] for r in world.requests}
        assert set(changed) == own | {NUM_BLOCKS}


def test_device_tokens_take_the_place_of_the_step_s(model: CausalLM) -> None:
    with torch.inference_mode():
        world = World(model, 6)
        world.start(3)
        step = step_input([(r, 1) for r in _grown(world.requests)], BLOCK_SIZE)
        given = world.graphs.compute(step)
        assert given is not None
        expected = given.clone()
        ids = torch.from_numpy(step.input_ids).clone()
        step.input_ids[:] = 0
        actual = world.graphs.compute(step, ids)
        assert actual is not None
        torch.testing.assert_close(actual, expected)


def _grown(requests: list[Request]) -> list[Request]:
    for request in requests:
        if not request.num_behind:
            request.output_token_ids.append(5)
    return requests


def test_sizes_and_buckets() -> None:
    assert sizes_of((), 20) == [1, 2, 4, 8, 16, 20]
    assert sizes_of((), 3) == [1, 2, 3]
    assert sizes_of((24,), 256) == [1, 2, 4, 8, 16, 24]
    assert sizes_of((512,), 16) == [1, 2, 4, 8, 16]
    assert sizes_of((64, 2, 7), 32) == [2, 7, 32]
    assert [bucket_of(n) for n in (1, 512, 513, 2048, 2049)] == [512, 512, 2048, 2048, 8192]


def test_steps_of_another_kind_are_left_to_others(model: CausalLM) -> None:
    world = World(model, 7)
    requests = [Request(str(i), Order([1, 2], Sampling()), block_table=[i]) for i in range(MOST + 1)]
    assert world.graphs.compute(step_input([(requests[0], 2)], BLOCK_SIZE)) is None
    assert world.graphs.compute(step_input([(requests[0], 1)], BLOCK_SIZE)) is None  # a prompt's part: not sampled
    for request in requests:
        request.num_computed_tokens = 1
    assert world.graphs.compute(step_input([(request, 1) for request in requests], BLOCK_SIZE)) is None


def test_buffers_hold_one_rotary_position_per_sequence(model: CausalLM) -> None:
    """Three rows of a prompt's last token may differ; behind the prompt they are equal."""
    with torch.inference_mode():
        world = World(model, 8)
        for rows, is_graph in (((3, 4, 5), False), ((4, 4, 4), True), ((4,), True)):
            own = RopePositions(tuple((row,) for row in rows), 7)
            request = Request("r", Order([9], Sampling(), rope_positions=own), block_table=[0])
            assert (world.graphs.compute(step_input([(request, 1)], BLOCK_SIZE)) is not None) == is_graph
            request.num_computed_tokens = 1
            request.output_token_ids.append(5)
            step = step_input([(request, 1)], BLOCK_SIZE)
            assert world.graphs.compute(step) is not None
            assert next(iter(world.graphs.captured.values())).batch.rope_positions.tolist() == [[8]]


def test_a_block_that_the_pool_does_not_have_is_refused(model: CausalLM) -> None:
    world = World(model, 8)
    request = Request("0", Order([1], Sampling()), block_table=[NUM_BLOCKS + 1])
    with pytest.raises(ValueError, match="block tables hold"):
        world.graphs.compute(step_input([(request, 1)], BLOCK_SIZE))


def test_kernels_are_told_on_the_host_before_each_replay(model: CausalLM) -> None:
    """They learn the contexts of the step, with 0 for padding, at capture and before each replay."""
    world = World(model, 9)
    told: list[list[int]] = []

    class Telling:
        config, kernels = model.config, ""

        def __call__(self, batch: ForwardBatch) -> torch.Tensor:
            assert batch.replay_lens is not None
            if batch.before_replay is None:
                told.append(batch.replay_lens.tolist())  # while it is captured
                batch.before_replay = lambda: told.append(list(map(int, batch.replay_lens)))  # type: ignore[arg-type]
            return model(batch)

    def capture(run: module.Run) -> module.Run:
        run()
        return run

    graphs = DecodeGraphs(Telling(), world.pool, MOST, MAX_LEN, capture)
    requests = [
        Request(str(i), Order([1] * 9, Sampling()), block_table=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(3)
    ]
    with torch.inference_mode():
        for done in (3, 4):
            for i, request in enumerate(requests):
                request.num_computed_tokens = done + i
                del request.prompt_token_ids[done + i + 1 :]
            assert graphs.compute(step_input([(request, 1) for request in requests], BLOCK_SIZE)) is not None
            for request in requests:
                request.prompt_token_ids.append(1)
    assert told == [[4, 5, 6, 0], [4, 5, 6, 0], [5, 6, 7, 0]]


def test_longer_contexts_than_asked_for_run_eagerly(model: CausalLM) -> None:
    """`--max-seq-len-to-capture`: a step with one such context is left to the runner, whatever else is in it."""
    world = World(model, 10)
    graphs = DecodeGraphs(model, world.pool, MOST, 8, world.capture)
    requests = [
        Request(str(i), Order([1] * 9, Sampling()), block_table=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(3)
    ]
    done = []
    with torch.inference_mode():
        for num_computed, chosen in ((7, [0, 1]), (8, [2]), (8, [0, 2]), (7, [1])):
            for at in chosen:
                requests[at].num_computed_tokens = num_computed
                requests[at].prompt_token_ids = [1] * (num_computed + 1)
            done.append(graphs.compute(step_input([(requests[at], 1) for at in chosen], BLOCK_SIZE)) is not None)
    assert done == [True, False, False, True]


def one_token(num_seqs: int) -> list[Request]:
    return [Request(str(i), Order([1], Sampling()), block_table=[i]) for i in range(num_seqs)]


def test_all_graphs_keep_their_logits_in_one_buffer(model: CausalLM) -> None:
    world = World(model, 11)
    found = []
    with torch.inference_mode():
        for num_seqs in (3, 1, 12, 2):
            logits = world.graphs.compute(step_input([(r, 1) for r in one_token(num_seqs)], BLOCK_SIZE))
            assert logits is not None
            assert logits.shape == (num_seqs, VOCAB_SIZE)
            found.append(logits.untyped_storage())
    assert world.graphs.num_captured == 4
    assert len({storage.data_ptr() for storage in found}) == 1
    assert found[0].nbytes() == MOST * VOCAB_SIZE * 4


def test_only_the_given_sizes_are_captured(model: CausalLM) -> None:
    """`--graph-sizes 3 6`: two sequences are padded to three, and seven run eagerly."""
    world = World(model, 12)
    graphs = DecodeGraphs(model, world.pool, MOST, MAX_LEN, world.capture, sizes=(6, 3))
    with torch.inference_mode():
        done = [
            graphs.compute(step_input([(r, 1) for r in one_token(num)], BLOCK_SIZE)) is not None for num in (2, 6, 7)
        ]
    assert done == [True, True, False]
    assert {size for size, _ in graphs.captured} == {3, 6}


def test_sizes_are_captured_at_the_start_while_there_is_time(model: CausalLM) -> None:
    """Short contexts first, and of each the large sizes first; the others follow when they are wanted."""
    world = World(model, 13)
    graphs = DecodeGraphs(model, world.pool, 8, 1500, world.capture)
    time_left = iter([True] * 6 + [False])
    with torch.inference_mode():
        graphs.prepare(lambda: next(time_left))
        assert list(graphs.captured) == [(8, 512), (4, 512), (2, 512), (1, 512), (8, 2048), (4, 2048)]
        world.eager.data.copy_(world.pool.data)
        num_captured = len(world.runs)
        world.graphs = graphs
        world.start(8)
        for _ in range(4):
            world.decode()
        assert len(world.runs) == num_captured, "every size that is wanted was there"
        graphs.prepare(lambda: True)
    assert graphs.num_captured == 8


def hidden(error: Exception) -> Exception:
    """Returns the error of a capture that could not end, as torch raises it."""
    other = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    other.__context__ = error
    return other


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), RuntimeError("CUDA error: out of memory"), hidden(torch.OutOfMemoryError("no"))],
    ids=str,
)
def test_without_memory_for_a_graph_steps_run_eagerly(
    model: CausalLM, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs that are there go on; ranks that share a model cannot decide that alone."""
    world = World(model, 15)
    num_asked = 0

    def capture(run: module.Run) -> module.Run:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            raise error
        return world.capture(run)

    graphs = DecodeGraphs(model, world.pool, MOST, MAX_LEN, capture)
    with torch.inference_mode():
        steps = [step_input([(r, 1) for r in one_token(num_seqs)], BLOCK_SIZE) for num_seqs in (1, 2, 4, 1)]
        assert [graphs.compute(step) is not None for step in steps] == [True, False, False, True]
        assert [record.getMessage() for record in caplog.records].count(FULL) == 1
        shared = DecodeGraphs(model, world.pool, MOST, MAX_LEN, capture, is_alone=False)
        with pytest.raises(type(error)):
            shared.compute(step_input([(r, 1) for r in one_token(1)], BLOCK_SIZE))


def test_other_errors_of_a_capture_end_the_step(model: CausalLM) -> None:
    def capture(run: module.Run) -> module.Run:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    graphs = DecodeGraphs(model, World(model, 16).pool, MOST, MAX_LEN, capture)
    with pytest.raises(RuntimeError, match="illegal"), torch.inference_mode():
        graphs.compute(step_input([(r, 1) for r in one_token(1)], BLOCK_SIZE))


def test_graphs_of_the_start_alone_serve_every_step(model: CausalLM) -> None:
    """No step captures: sizes without a graph take the next larger one."""
    world = World(model, 21)
    world.graphs = DecodeGraphs(
        model, world.pool, 8, MAX_LEN, world.capture, is_for_any_context=True, only_at_start=True
    )
    left = iter([True, True, False])
    with torch.inference_mode():
        world.graphs.prepare(lambda: next(left))
        assert [size for size, _ in world.graphs.captured] == [8, 2]
        world.eager.data.copy_(world.pool.data)
        world.start(7)
        for _ in range(12):
            world.decode()
    assert len(world.runs) == 2
    assert all(world.runs)


def test_what_the_start_had_no_time_for_is_never_captured(model: CausalLM) -> None:
    world = World(model, 22)
    world.graphs = DecodeGraphs(model, world.pool, 4, 1500, world.capture, only_at_start=True)
    left = iter([True, False])
    request = Request("long", Order([1] * 600, Sampling()), block_table=list(range(NUM_BLOCKS)))
    with torch.inference_mode():
        world.graphs.prepare(lambda: next(left))
        assert list(world.graphs.captured) == [(4, 512)]
        world.eager.data.copy_(world.pool.data)
        world.start(3)
        for _ in range(6):
            world.decode()
        far = step_input([(request, 1)], BLOCK_SIZE)
        far.rows[:, 1] = 599  # a context of 600 tokens
        assert world.graphs.compute(far) is None
        many = [Request(str(i), Order([1], Sampling()), block_table=[i]) for i in range(5)]
        assert world.graphs.compute(step_input([(each, 1) for each in many], BLOCK_SIZE)) is None
    assert len(world.runs) == 1


@pytest.mark.parametrize("num_sizes", [1, 2, 3, 7, 35])
def test_graphs_are_spread_over_the_sizes_wherever_captures_end(num_sizes: int) -> None:
    """Of the first n sizes, no two neighbours are farther apart than twice the even distance."""
    order = module.spread_out(range(num_sizes))
    assert sorted(order) == list(range(num_sizes))
    for count in range(1, num_sizes + 1):
        chosen = [-1, *sorted(order[:count])]
        assert chosen[-1] == num_sizes - 1
        assert max(b - a for a, b in itertools.pairwise(chosen)) <= max(1, math.ceil(2 * num_sizes / count))


@pytest.mark.parametrize("who", ["this rank", "another rank"])
def test_after_a_refusal_no_rank_captures_more_and_one_graph_is_given_back(
    model: CausalLM, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(model, 23)
    num_asked = 0

    def capture(run: module.Run) -> module.Run:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 4 and who == "this rank":
            raise RuntimeError("stream resource insufficient\nmore")
        return world.capture(run)

    told: list[bool] = []

    def agree(is_done: bool) -> bool:
        told.append(is_done)
        return is_done and len(told) < 4

    graphs = DecodeGraphs(
        model, world.pool, 16, MAX_LEN, capture, is_for_any_context=True, is_alone=False, only_at_start=True
    )
    with torch.inference_mode():
        graphs.prepare(lambda: True, agree)
        assert num_asked == 4
        assert told == [True, True, True, who == "another rank"]
        assert [size for size, _ in graphs.captured] == [16, 2]
        why = "stream resource insufficient" if who == "this rank" else "another rank holds no more"
        assert f"2 decode graphs, and no more: {why}; steps" in caplog.text
        assert graphs.compute(step_input([(r, 1) for r in one_token(3)], BLOCK_SIZE)) is not None


def test_a_device_that_refuses_the_first_graph_decodes_eagerly(model: CausalLM) -> None:
    def capture(run: module.Run) -> module.Run:
        raise RuntimeError("not supported")

    graphs = DecodeGraphs(model, World(model, 24).pool, 4, MAX_LEN, capture, only_at_start=True)
    with torch.inference_mode():
        graphs.prepare(lambda: True)
        assert graphs.compute(step_input([(r, 1) for r in one_token(1)], BLOCK_SIZE)) is None
