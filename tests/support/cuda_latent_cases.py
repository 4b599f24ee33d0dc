"""Latent attention through the CUDA path's kernels against TorchOps and transformers, interpreted or on a GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.kv.kv_layout import KVLayout, latents
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.kv_vectors import decode
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.attention_backend import triton_attention
from pd_cluster.model.kernels.cuda.attention import attention_plan
from pd_cluster.model.kernels.cuda.attention.triton_planner import attend_batch
from pd_cluster.model.kernels.cuda.ops import CudaOps
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.ops import Latents, Norm, Rope, TorchOps
from pd_cluster.model.loading import model_loader
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, random_prompt
from tests.support.interpreted import choose_device

choose_device()

MIXED = [(1, 40), (3, 60), (17, 17), (1, 270), (1, 1)]  # (tokens of this step, context)
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
TYPES = ("deepseek_v2", "axk1", "glm4_moe_lite", "minicpm3", "youtu")
STEPS = {"float32": 1e-6, "bfloat16": 8e-3, "int8": 8e-3, "fp8_e4m3": 0.07}  # between adjacent numbers of a pool
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
# heads, widths (query, latent, rope, value), block_size, dtype, dtype of the pool
Shape = tuple[int, tuple[int, int, int, int], int, str, str]
SHAPES: list[Shape] = [
    (6, (24, 48, 16, 32), 8, "float32", "float32"),
    (20, (8, 64, 8, 40), 16, "float32", "int8"),
    (1, (40, 24, 16, 8), 4, "float32", "fp8_e4m3"),
    (3, (128, 512, 64, 128), 64, "bfloat16", "bfloat16"),  # widths of DeepSeek
    (2, (16, 72, 24, 16), 32, "bfloat16", "fp8_e4m3"),
]


def batch_of(shape: Shape, sequences: list[tuple[int, int]]) -> ForwardBatch:
    """Returns a step whose pool holds random vectors, quantized if its dtype is, written by a step over the past."""
    _, widths, block_size, _, pool_dtype = shape
    counts = [-(-context // block_size) for _, context in sequences]
    pool = KVPool(KVLayout(2, 1, latents(widths[1], widths[2]), block_size, pool_dtype), sum(counts) + 1)
    free = iter(torch.randperm(sum(counts), generator=torch.Generator("cpu").manual_seed(1), device="cpu").tolist())
    tables = [[next(free) for _ in range(count)] for count in counts]

    def step(lens: list[tuple[int, int]]) -> ForwardBatch:
        chunks = []
        for i, ((num_tokens, context), table) in enumerate(zip(lens, tables, strict=True)):
            order = RequestSpec([0] * context, Sampling())
            own = Request(f"{i}", order, num_computed_tokens=context - num_tokens, tables=[table], arrival_s=float(i))
            chunks.append((own, num_tokens))
        return build_batch(chunks, pool)

    past = step([(context, context) for _, context in sequences])
    TorchOps().attend_latents(*rows_of(shape, past.num_tokens, 3), past)
    return step(sequences)


def rows_of(shape: Shape, num_tokens: int, seed: int) -> tuple[Latents, torch.Tensor, torch.Tensor, Rope]:
    """Returns layer 1 of this shape, and a step's queries, latents and rotations."""
    num_heads, (query, latent, rope, value), _, dtype, _ = shape
    torch.manual_seed(0)
    weights = torch.randn(num_heads, query, latent) * query**-0.5, torch.randn(num_heads, latent, value) * latent**-0.5
    keys, values = (each.to(TORCH_DTYPES[dtype]) for each in weights)
    norm = Norm((torch.rand(latent) + 0.5).to(TORCH_DTYPES[dtype]), 1e-6)
    torch.manual_seed(seed)
    angles = torch.rand(num_tokens, rope // 2) * 6
    angles = torch.cat((angles, angles), dim=-1)
    queries = torch.randn(num_tokens, num_heads * (query + rope)).to(TORCH_DTYPES[dtype])
    kept = torch.randn(num_tokens, latent + rope).to(TORCH_DTYPES[dtype])
    return Latents(1, norm, keys, values, rope, (query + rope) ** -0.5), queries, kept, Rope(angles.cos(), angles.sin())


def kept_in(batch: ForwardBatch) -> torch.Tensor:
    """Returns the values that the step has written."""
    dtype, planes = batch.pool.layout.dtype, batch.pool.layer(1)
    return torch.cat([decode(plane.flatten(0, 1)[batch.slot_mapping], dtype).float() for plane in planes], dim=-1)


def change(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_writes_and_attends_as_the_reference(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan.plan_attention, "__defaults__", (64,))  # keys of a split; a context has several
    reference, batch = batch_of(shape, MIXED), batch_of(shape, MIXED)
    expected = TorchOps().attend_latents(*rows_of(shape, batch.num_tokens, 4), reference)
    actual = CudaOps(attend_batch).attend_latents(*rows_of(shape, batch.num_tokens, 4), batch)
    assert change(actual, expected) < TOLERANCE[shape[3]]
    assert change(kept_in(batch), kept_in(reference)) < STEPS[shape[4]]


def check_tokens(folder: Path, lengths: tuple[int, ...], **settings: Any) -> None:
    core, runner = build_core(
        EngineConfig(model=str(folder), device="cpu", num_blocks=40, max_model_len=64, block_size=16, **settings)
    )
    assert isinstance(runner.model, FusedCausalLM)
    assert runner.model.kernels == "fused layers, Triton kernels, attention by Triton"
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in lengths]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.fixture
def _as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: triton_attention())


@pytest.mark.slow
@pytest.mark.usefixtures("_as_cuda")
@pytest.mark.parametrize("architecture", TYPES)
@pytest.mark.parametrize("pool", ["auto", "int8"])
def test_more_types_in_chunks_and_beside_others(architecture: str, pool: str, tmp_path: Path) -> None:
    """A quantized pool changes tokens, so its batched steps are compared with computing one prompt at a time."""
    folder = make_checkpoint(tmp_path, architecture)
    if pool == "auto":
        check_tokens(folder, (1, 5, 33), max_num_batched_tokens=16, max_num_seqs=4)
        return
    settings: dict[str, Any] = {"num_blocks": 40, "max_model_len": 64, "block_size": 16, "kv_cache_dtype": pool}
    prompts = [random_prompt(random.Random(seed), 20) for seed in range(3)]
    together, alone = (
        build_core(EngineConfig(model=str(folder), device="cpu", max_num_seqs=num, **settings))[0] for num in (4, 1)
    )
    assert generate(together, prompts, GREEDY) == generate(alone, prompts, GREEDY)
