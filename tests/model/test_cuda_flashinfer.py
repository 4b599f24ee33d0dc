"""The real FlashInfer against SDPA on a GPU; its signatures, wherever installed, against the fake's."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_streams import capture
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import TORCH_DTYPES, KVPool
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules
from pd_cluster.model.inputs.forward_batch import batch_of, build_batch
from pd_cluster.model.inputs.step_input import step_input
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Sampling
from tests.support import fake_flashinfer as fake
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import generate
from tests.support.flashinfer_steps import Layers, chunks_of

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
CUDA = Device("cuda")
NUM_BLOCKS, NUM_LAYERS = 120, 2
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}  # relative to the largest number
STEPS = {
    "decode": [(1, 700), (1, 1), (1, 33), (1, 256)],
    "prompts": [(130, 130), (1, 1), (17, 17)],
    "mixed": [(1, 300), (40, 500), (16, 16), (1, 15)],
}
SCORINGS = {"plain": Scoring(0.1), "window": Scoring(0.1, sliding_window=40), "softcap": Scoring(0.1, softcap=5.0)}


def a_pool(num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> KVPool:
    pool = KVPool(KVLayout(NUM_LAYERS, num_kv_heads, keys_and_values(head_dim), block_size, dtype), NUM_BLOCKS, CUDA)
    torch.manual_seed(2)
    pool.data.normal_()
    return pool


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


@needs_flashinfer
def test_the_fake_has_its_signatures() -> None:
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    for name, method in itertools.product(
        ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"), ("__init__", "plan", "run")
    ):
        real, ours = (inspect.signature(getattr(getattr(of, name), method)).parameters for of in (flashinfer, fake))
        by_place = [each.name for each in ours.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert list(real)[: len(by_place)] == by_place, f"{name}.{method}"
        if method == "plan" and "kwargs" not in real:
            assert {*ours, *fake.OPTIONS} - {"options"} <= set(real), name


@needs_gpu
@needs_flashinfer
@pytest.mark.timeout(600)  # compiles kernels on first use
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 8, 64), (32, 8, 128), (7, 1, 128), (16, 2, 256)])
def test_attends_as_sdpa_does(heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    from pd_cluster.model.kernels.cuda.attention.flashinfer import FlashInfer

    kernels = FlashInfer(CUDA)
    for block_size, (step, sequences), (name, scoring) in itertools.product((16, 24), STEPS.items(), SCORINGS.items()):
        pool = a_pool(kv_heads, head_dim, block_size, dtype)
        batch = build_batch(chunks_of(sequences, NUM_BLOCKS, block_size), pool)
        query = torch.randn(heads, batch.num_tokens, head_dim, dtype=TORCH_DTYPES[dtype], device="cuda")
        keys, values = torch.randn(2, batch.num_tokens, kv_heads, head_dim, device="cuda").to(query.dtype)
        actual = kernels.write_and_attend(1, query, keys, values, batch, scoring)
        expected = sdpa.write_and_attend(1, query, keys, values, batch, scoring)
        error = difference(actual, expected)
        assert error < TOLERANCE[dtype], f"{step}, {name}, blocks of {block_size}: {error:.1e}"


@needs_gpu
@needs_flashinfer
@pytest.mark.timeout(600)
def test_replayed_steps_are_the_steps() -> None:
    """Replays one graph with successive plans, for contexts of one to many blocks."""
    from pd_cluster.model.kernels.cuda.attention.flashinfer import FlashInfer

    pool, other = (a_pool(2, 128, 16, "bfloat16") for _ in range(2))
    mine, reference = (
        Layers(attend, (8, 2, 2), 128, (SCORINGS["plain"], SCORINGS["window"]), dtype=torch.bfloat16)
        for attend in (FlashInfer(CUDA).write_and_attend, sdpa.write_and_attend)
    )
    graphs = DecodeGraphs(mine, pool, capture(CUDA), GraphRules(8, 512))
    requests = [request for request, _ in chunks_of([(1, 320)] * 6, NUM_BLOCKS, 16)]
    with torch.inference_mode():
        for num_seqs, start in ((1, 0), (3, 15), (6, 16), (5, 200), (3, 310), (1, 5)):
            for i, request in enumerate(requests[:num_seqs]):
                request.num_computed_tokens = start + i
                request.prompt_token_ids = [7 * i + start] * (start + i + 1)
            step = step_input([(request, 1) for request in requests[:num_seqs]], 16)
            actual = graphs.compute(step)
            assert actual is not None
            error = difference(actual, reference(batch_of(step, other)))
            assert error < TOLERANCE["bfloat16"], f"{num_seqs} sequences from {start}: {error:.1e}"


@needs_gpu
@needs_flashinfer
@pytest.mark.timeout(600)
def test_a_model_is_served_by_it_on_the_gpu(tmp_path: Path) -> None:
    """With fused layers, graphs and steps ahead, tokens equal those of Triton's attention except for near ties."""
    folder = make_checkpoint(tmp_path, "llama", head_dim=64)
    outputs = {}
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 200, "max_model_len": 256}
    for backend in ("triton", "flashinfer"):
        core, runner = build_core(EngineConfig(model=str(folder), attention_backend=backend, **settings))
        assert runner.model.kernels.lower().endswith(f"attention by {backend}")
        prompts = [[3 + i] * length for i, length in enumerate((1, 7, 40, 130))]
        outputs[backend] = generate(core, prompts, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    same = sum(a[0] == b[0] for a, b in zip(outputs["triton"], outputs["flashinfer"], strict=True))
    assert same >= 3, outputs
