"""FlashInfer's use without a GPU: a fake executes the received plans and calls, compared with SDPA."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pd_cluster.devices.device import CPU
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.errors import ModelError, told
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules
from pd_cluster.model.inputs.forward_batch import batch_of, build_batch
from pd_cluster.model.inputs.step_input import step_input
from pd_cluster.model.kernels.attention_backend import Attention
from pd_cluster.model.language_model.causal_lm import PlainCausalLM
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.model.loading import model_loader
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, Sampling
from tests.support import fake_flashinfer as fake
from tests.support.engines import assert_all_same, generate, random_prompt
from tests.support.flashinfer_steps import Layers, chunks_of

GREEDY = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
BLOCK_SIZE, NUM_BLOCKS = 4, 60
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
PLAIN = Scoring(0.3)
SCORINGS = [PLAIN, Scoring(0.3, sliding_window=5), Scoring(0.3, sliding_window=1), Scoring(0.4, None, softcap=2.0)]
STEPS = {
    "decode": [(1, 9), (1, 1), (1, 8)],
    "prompts": [(7, 7), (1, 1), (12, 12)],
    "chunks": [(3, 11), (5, 8), (4, 4)],
    "mixed": [(1, 13), (6, 9), (1, 4)],
}


@pytest.fixture(name="module")
def with_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yields pd_cluster.model.kernels.cuda.attention.flashinfer, using the fake."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake.as_module())
    module = importlib.import_module("pd_cluster.model.kernels.cuda.attention.flashinfer")
    monkeypatch.setattr(module, "LEAST_WORKSPACE_NBYTES", 0)
    yield module
    sys.modules.pop("pd_cluster.model.kernels.cuda.attention.flashinfer")


def a_pool(generator: torch.Generator, num_layers: int = 2) -> KVPool:
    pool = KVPool(KVLayout(num_layers, KV_HEADS, keys_and_values(HEAD_DIM), BLOCK_SIZE, "float32"), NUM_BLOCKS)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    return pool


def a_copy(pool: KVPool) -> KVPool:
    copy = KVPool(pool.layout, pool.num_blocks)
    copy.data.copy_(pool.data)
    return copy


def chunks(sequences: list[tuple[int, int]], seed: int) -> list[tuple[Request, int]]:
    return chunks_of(sequences, NUM_BLOCKS, BLOCK_SIZE, seed)


def random_qkv(num_tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(HEADS, num_tokens, HEAD_DIM, generator=generator)
    keys, values = torch.randn(2, num_tokens, KV_HEADS, HEAD_DIM, generator=generator)
    return query, keys, values


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "window", "window of itself", "softcap"])
@pytest.mark.parametrize("name", STEPS)
def test_attends_as_sdpa_does(module: ModuleType, name: str, scoring: Scoring) -> None:
    generator = torch.Generator().manual_seed(7)
    pool, step = a_pool(generator), chunks(STEPS[name], 7)
    mine, theirs = build_batch(step, pool), build_batch(step, a_copy(pool))
    qkv = random_qkv(mine.num_tokens, generator)
    actual = module.FlashInfer(CPU).write_and_attend(1, *qkv, mine, scoring)
    expected = sdpa.write_and_attend(1, *qkv, theirs, scoring)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(mine.pool.data, theirs.pool.data)
    assert (mine.layers_written, mine.windows) == ([1], {scoring.sliding_window})
    kind = "Decode" if name == "decode" else "Prefill"
    assert [type(made).__name__ for made in fake.calls.made] == [f"Batch{kind}WithPagedKVCacheWrapper"]


def test_a_step_is_planned_once_for_the_layers_that_score_alike(module: ModuleType) -> None:
    """Layers alternate between two scorings, as in Gemma 2; wrappers are kept for the next step."""
    kernels = module.FlashInfer(CPU)
    generator = torch.Generator().manual_seed(1)
    pool = a_pool(generator, num_layers=4)
    for i in range(1, 4):
        batch = build_batch(chunks(STEPS["mixed"], i), pool)
        for layer_idx in range(4):
            qkv = random_qkv(batch.num_tokens, generator)
            kernels.write_and_attend(layer_idx, *qkv, batch, SCORINGS[layer_idx % 2])
        assert len(fake.calls.planned) == 2 * i
    assert len(fake.calls.made) == 2


def test_a_batch_that_comes_again_after_another_is_planned_again(module: ModuleType) -> None:
    kernels = module.FlashInfer(CPU)
    generator = torch.Generator().manual_seed(2)
    pool = a_pool(generator)
    first, second = (build_batch(chunks(STEPS["decode"], seed), pool) for seed in (1, 2))
    qkv = random_qkv(3, generator)
    expected = kernels.write_and_attend(0, *qkv, first, PLAIN)
    kernels.write_and_attend(0, *random_qkv(3, generator), second, PLAIN)
    again = kernels.write_and_attend(0, *qkv, first, PLAIN)
    assert len(fake.calls.planned) == 3
    torch.testing.assert_close(again, expected)


def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Imitates streams.capture: one plain call, then only launches."""
    run()

    def replay() -> torch.Tensor:
        fake.calls.forbidden = True
        try:
            return run()
        finally:
            fake.calls.forbidden = False

    replay()
    return replay


def test_graphs_are_planned_before_each_replay(module: ModuleType) -> None:
    """Sizes alternate, contexts cross block boundaries, padding varies; all plans share one workspace."""
    kernels = module.FlashInfer(CPU)
    generator, rng = torch.Generator().manual_seed(3), random.Random(3)
    pool = a_pool(generator)
    other = a_copy(pool)
    mine, reference = (
        Layers(attend, (HEADS, KV_HEADS, KV_HEADS), HEAD_DIM, SCORINGS[:2])
        for attend in (kernels.write_and_attend, sdpa.write_and_attend)
    )
    graphs = DecodeGraphs(mine, pool, capture, GraphRules(8, 24))
    requests = [request for request, _ in chunks([(1, 24)] * 6, 3)]
    for request in requests:
        request.num_computed_tokens = rng.randrange(0, 9)
    for _ in range(14):
        chosen = rng.sample(requests, rng.randrange(1, 7))
        for request in chosen:
            request.prompt_token_ids[request.num_computed_tokens :] = [rng.randrange(50)]
        step = step_input([(request, 1) for request in chosen], BLOCK_SIZE)
        actual = graphs.compute(step)
        assert actual is not None
        torch.testing.assert_close(actual, reference(batch_of(step, other)), rtol=1e-4, atol=1e-5)
        for request in chosen:
            request.num_computed_tokens += 1
            request.prompt_token_ids.append(0)
    assert graphs.num_captured > 2
    assert len(fake.calls.made) == 2 * graphs.num_captured
    assert all(wrapper.is_graph for wrapper in fake.calls.made)
    assert len({wrapper.int_workspace.data_ptr() for wrapper in fake.calls.made}) == 2
    assert torch.equal(pool.data[:NUM_BLOCKS], other.data[:NUM_BLOCKS])


def test_the_workspace_grows_and_a_graph_keeps_its_own(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "workspace_nbytes", lambda num_seqs, *others: 1024 * num_seqs)
    kernels = module.FlashInfer(CPU)
    generator = torch.Generator().manual_seed(4)
    pool = a_pool(generator)

    def attend(num_seqs: int, is_graph: bool = False) -> None:
        batch = build_batch(chunks([(1, 5)] * num_seqs, 1), pool)
        batch.replay_lens = batch.host_context_lens if is_graph else None
        kernels.write_and_attend(0, *random_qkv(num_seqs, generator), batch, PLAIN)

    for num_seqs, is_graph in ((2, False), (1, False), (2, True), (3, False), (3, True)):
        attend(num_seqs, is_graph)
    assert [len(made.float_workspace) for made in fake.calls.made] == [2048, 2048, 3072, 3072]
    assert len({made.float_workspace.data_ptr() for made in fake.calls.made}) == 2


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "rows"),
    [
        (1, 8, 2 * 132 // 8 * 128),  # prompts are split into concurrent tiles of 128 rows
        (256, 8, 512 * 16),  # a tile and its remainder for each sequence
        (512, 1, 1024 * 64),  # many heads per KV head need larger tiles
    ],
)
def test_a_workspace_holds_the_largest_split(module: ModuleType, num_seqs: int, num_kv_heads: int, rows: int) -> None:
    nbytes = 32 * rows * (128 + 1) * 4
    assert nbytes <= module.workspace_nbytes(num_seqs, 32, num_kv_heads, 128, 132) <= nbytes + 4096


LLAMA = KVLayout(32, 8, keys_and_values(128), 16, "bfloat16")
PROBLEMS = [
    ({"dtype": "float32"}, {}, "dtype float32"),
    ({"planes": keys_and_values(80)}, {}, "head_dim 80"),
    ({"block_size": 4096, "num_layers": 1024}, {}, "--block-size 4096"),
    ({"num_kv_heads": 1}, {"num_heads": 128}, "128 query heads"),
    ({}, {"compute_capability": (7, 5)}, "compute capability 7.5"),
    ({}, {"has_sinks": True}, "attention sinks"),
]


@pytest.mark.parametrize(("layout", "others", "named"), PROBLEMS)
def test_what_it_cannot_serve_is_named(
    module: ModuleType, layout: dict[str, object], others: dict[str, object], named: str
) -> None:
    can: dict[str, object] = {"num_heads": 32, "compute_capability": (9, 0)}
    assert module.problem(LLAMA, **can) == ""
    assert named in told(module.problem(replace(LLAMA, **layout), **(can | others)))  # type: ignore[arg-type]


def test_sinks_that_nobody_told_of_are_refused(module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(5)
    batch = build_batch(chunks(STEPS["decode"], 1), a_pool(generator))
    with pytest.raises(ModelError, match="attention sinks"):
        module.FlashInfer(CPU).write_and_attend(
            0, *random_qkv(3, generator), batch, Scoring(0.3, sinks=torch.zeros(HEADS))
        )


def test_transformers_modules_attend_through_it(
    module: ModuleType, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks at load, chunked prompts and decoding agree with transformers' generate()."""
    kernels = module.FlashInfer(CPU)
    attention = Attention("FlashInfer", kernels.write_and_attend, kernels.attend_batch)
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: attention)
    monkeypatch.setattr(model_loader, "can_fuse", lambda model: False)
    folder = checkpoint("gemma2")
    config = EngineConfig(
        model=str(folder), num_blocks=40, max_model_len=64, max_num_batched_tokens=16, device="cpu", dtype="float32"
    )
    core, runner = build_core(config)
    assert isinstance(runner.model, PlainCausalLM)
    assert runner.model.kernels == "transformers' modules, attention by FlashInfer"
    fake.calls.planned.clear()
    prompts = [random_prompt(random.Random(4), length) for length in (1, 5, 18)]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    kinds = {type(planned).__name__ for planned in fake.calls.planned}
    assert kinds == {"BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"}
