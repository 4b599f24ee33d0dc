"""Decode steps through graph buffers give the same results as eager steps; replays repeat the recorded calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules, Run, bucket_of, sizes_of, spread_out
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.inputs.step_input import step_input
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.loading import model_loader
from pd_cluster.types import Request, RequestSpec, RopePositions, Sampling
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.graph_world import BLOCK_SIZE, MAX_LEN, MOST, NUM_BLOCKS, World, one_token_each

Checkpoints = Callable[[str], Path]


def loaded(folder: Path) -> CausalLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
        return model_loader.load_model(Checkpoint.open(str(folder)), "float32", CPU)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> CausalLM:
    return loaded(checkpoint("llama"))


@pytest.fixture
def world(model: CausalLM) -> World:
    return World(model, 5)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_replayed_steps_are_the_steps(architecture: str, checkpoint: Checkpoints) -> None:
    model = loaded(checkpoint(architecture))
    for seed in range(3):
        world = World(model, seed)
        world.start(3 * seed + 1)
        for _ in range(6):
            world.decode()
        torch.testing.assert_close(world.pool.data[:NUM_BLOCKS], world.eager.data[:NUM_BLOCKS], rtol=1e-4, atol=1e-4)
        assert 6 <= sum(world.runs) <= 7  # a step of one-token prompts also counts
        assert world.graphs.num_captured < sum(world.runs)


def test_padding_touches_no_block_but_its_own(world: World) -> None:
    world.start(3)
    before = world.pool.data.clone()
    assert world.graphs.compute(world.next_step()) is not None
    changed = (world.pool.data != before).flatten(1).any(1).nonzero().flatten().tolist()
    own = {r.tables[0][r.num_computed_tokens // BLOCK_SIZE] for r in world.requests}
    assert set(changed) == own | {NUM_BLOCKS}


def test_device_tokens_take_the_place_of_the_step_s(world: World) -> None:
    world.start(3)
    step = world.next_step()
    given = world.graphs.compute(step)
    assert given is not None
    expected, ids = given.clone(), torch.from_numpy(step.input_ids).clone()
    step.input_ids[:] = 0
    actual = world.graphs.compute(step, ids)
    assert actual is not None
    torch.testing.assert_close(actual, expected)


def test_sizes_and_buckets() -> None:
    assert sizes_of((), 20) == [1, 2, 4, 8, 16, 20]
    assert sizes_of((), 3) == [1, 2, 3]
    assert sizes_of((24,), 256) == [1, 2, 4, 8, 16, 24]
    assert sizes_of((512,), 16) == [1, 2, 4, 8, 16]
    assert sizes_of((64, 2, 7), 32) == [2, 7, 32]
    assert [bucket_of(n) for n in (1, 512, 513, 2048, 2049)] == [512, 512, 2048, 2048, 8192]


def test_steps_of_another_kind_are_left_to_others(world: World) -> None:
    request = Request("0", RequestSpec([1, 2], Sampling()), tables=[[0]])
    assert world.graphs.compute(step_input([(request, 2)], BLOCK_SIZE)) is None
    assert world.graphs.compute(step_input([(request, 1)], BLOCK_SIZE)) is None  # a prompt's chunk is not sampled
    assert world.graphs.compute(one_token_each(MOST + 1)) is None
    outside = one_token_each(1, first=NUM_BLOCKS + 1)
    with pytest.raises(ValueError, match="block tables hold"):
        world.graphs.compute(outside)


def test_buffers_hold_one_rotary_position_per_sequence(world: World) -> None:
    """A prompt's last token may have three different positions; after the prompt they are equal."""
    for rows, is_graph in (((3, 4, 5), False), ((4, 4, 4), True), ((4,), True)):
        own = RopePositions(tuple((row,) for row in rows), 7)
        request = Request("r", RequestSpec([9], Sampling(), rope_positions=own), tables=[[0]])
        assert (world.graphs.compute(step_input([(request, 1)], BLOCK_SIZE)) is not None) == is_graph
        request.num_computed_tokens = 1
        request.output_token_ids.append(5)
        assert world.graphs.compute(step_input([(request, 1)], BLOCK_SIZE)) is not None
        assert next(iter(world.graphs.captured.values())).batch.rope_positions.tolist() == [[8]]


def test_kernels_are_told_on_the_host_before_each_replay(model: CausalLM) -> None:
    """Kernels get the step's context lengths (0 for padding) at capture and before each replay."""
    told: list[list[int]] = []

    class Telling:
        config, kernels = model.config, ""

        def __call__(self, batch: ForwardBatch) -> torch.Tensor:
            assert batch.replay_lens is not None
            if batch.before_replay is None:
                told.append(batch.replay_lens.tolist())  # during the capture
                batch.before_replay = lambda: told.append(list(map(int, batch.replay_lens)))  # type: ignore[arg-type]
            return model(batch)

    def capture(run: Run) -> Run:
        run()
        return run

    graphs = DecodeGraphs(Telling(), World(model).pool, capture, GraphRules(MOST, MAX_LEN))
    for context_len in (4, 5):
        assert graphs.compute(one_token_each(3, context_len)) is not None
    assert told == [[4, 4, 4, 0], [4, 4, 4, 0], [5, 5, 5, 0]]


def test_longer_contexts_than_asked_for_run_eagerly(world: World) -> None:
    """With `--max-seq-len-to-capture`, a step with one longer context runs eagerly."""
    graphs = world.use(longest=8)
    requests = [Request(str(i), RequestSpec([1] * n, Sampling()), tables=[[3 * i, 3 * i + 1, 3 * i + 2]])
                for i, n in enumerate((8, 9))]  # fmt: skip
    for request in requests:
        request.num_computed_tokens = request.num_tokens - 1
    done = [
        graphs.compute(step_input([(request, 1) for request in chosen], BLOCK_SIZE)) is not None
        for chosen in (requests[:1], requests[1:], requests)
    ]
    assert done == [True, False, False]


def test_all_graphs_keep_their_logits_in_one_buffer(world: World) -> None:
    found = []
    for num_seqs in (3, 1, 12, 2):
        logits = world.graphs.compute(one_token_each(num_seqs))
        assert logits is not None
        assert logits.shape == (num_seqs, VOCAB_SIZE)
        found.append(logits.untyped_storage())
    assert world.graphs.num_captured == 4
    assert len({storage.data_ptr() for storage in found}) == 1
    assert found[0].nbytes() == MOST * VOCAB_SIZE * 4


def test_only_the_given_sizes_are_captured(world: World) -> None:
    """With `--graph-sizes 3 6`, two sequences are padded to three, and seven run eagerly."""
    graphs = world.use(sizes=(6, 3))
    assert [graphs.compute(one_token_each(num)) is not None for num in (2, 6, 7)] == [True, True, False]
    assert {size for size, _ in graphs.captured} == {3, 6}


# ---- graphs captured at the start


def test_sizes_are_captured_at_the_start_while_there_is_time(world: World) -> None:
    """Short contexts come first, with large sizes first; the others are captured when needed."""
    graphs = world.use(most=8, longest=1500)
    time_left = iter([True] * 6 + [False])
    graphs.prepare(lambda: next(time_left))
    assert list(graphs.captured) == [(8, 512), (4, 512), (2, 512), (1, 512), (8, 2048), (4, 2048)]
    world.start(8)
    for _ in range(4):
        world.decode()
    assert len(world.runs) == 6, "every needed size must have been captured"
    graphs.prepare(lambda: True)
    assert graphs.num_captured == 8


def test_graphs_of_the_start_alone_serve_every_step(world: World) -> None:
    """No step captures: sizes without a graph use the next larger one."""
    graphs = world.use(most=8, is_for_any_context=True, only_at_start=True)
    left = iter([True, True, False])
    graphs.prepare(lambda: next(left))
    assert [size for size, _ in graphs.captured] == [8, 2]
    world.start(7)
    for _ in range(12):
        world.decode()
    assert len(world.runs) == 2
    assert all(world.runs)


def test_what_the_start_had_no_time_for_is_never_captured(world: World) -> None:
    graphs = world.use(most=4, longest=1500, only_at_start=True)
    left = iter([True, False])
    graphs.prepare(lambda: next(left))
    assert list(graphs.captured) == [(4, 512)]
    assert graphs.compute(one_token_each(3)) is not None
    far = one_token_each(1)
    far.rows[:, 1] = 599  # a context of 600 tokens
    assert graphs.compute(far) is None
    assert graphs.compute(one_token_each(5)) is None
    assert len(world.runs) == 1


@pytest.mark.parametrize("num_sizes", [1, 2, 7, 35])
def test_graphs_are_spread_over_the_sizes_wherever_captures_end(num_sizes: int) -> None:
    """Adjacent sizes among the first n are at most twice the even distance apart."""
    order = spread_out(range(num_sizes))
    assert sorted(order) == list(range(num_sizes))
    for count in range(1, num_sizes + 1):
        chosen = [-1, *sorted(order[:count])]
        assert chosen[-1] == num_sizes - 1
        assert max(b - a for a, b in itertools.pairwise(chosen)) <= max(1, math.ceil(2 * num_sizes / count))


# ---- captures that fail


def hidden(error: Exception) -> Exception:
    """Returns the error that torch raises if a capture could not end, with `error` as its context."""
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
    """Existing graphs stay in use. Ranks that share a model cannot decide this separately, so they raise the error."""
    world = World(model, refuse=lambda n: error if n else None)
    steps = [one_token_each(num_seqs) for num_seqs in (1, 2, 4, 1)]
    assert [world.graphs.compute(step) is not None for step in steps] == [True, False, False, True]
    assert caplog.text.count("no memory is left after 1 graphs; lower --gpu-memory-utilization") == 1
    with pytest.raises(type(error)):
        world.use(is_alone=False).compute(one_token_each(1))


def test_other_errors_of_a_capture_end_the_step(model: CausalLM) -> None:
    world = World(model, refuse=lambda n: RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        world.graphs.compute(one_token_each(1))


@pytest.mark.parametrize("who", ["this rank", "another rank"])
def test_after_a_refusal_no_rank_captures_more_and_one_graph_is_given_back(
    model: CausalLM, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("stream resource insufficient\nmore")
    world = World(model, refuse=lambda n: error if n == 3 and who == "this rank" else None)
    told: list[bool] = []

    def agree(is_done: bool) -> bool:
        told.append(is_done)
        return is_done and len(told) < 4

    graphs = world.use(most=16, is_for_any_context=True, is_alone=False, only_at_start=True)
    graphs.prepare(lambda: True, agree)
    assert world.num_asked == 4
    assert told == [True, True, True, who == "another rank"]
    assert [size for size, _ in graphs.captured] == [16, 2]
    why = "stream resource insufficient" if who == "this rank" else "another rank has no room for more"
    assert f"captured 2 decode graphs, then stopped: {why}; steps" in caplog.text
    assert graphs.compute(one_token_each(3)) is not None


def test_a_device_that_refuses_the_first_graph_decodes_eagerly(model: CausalLM) -> None:
    world = World(model, refuse=lambda n: RuntimeError("not supported"))
    graphs = world.use(most=4, only_at_start=True)
    graphs.prepare(lambda: True)
    assert graphs.compute(one_token_each(1)) is None
