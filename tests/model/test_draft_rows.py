"""Rows of drafts have the logits and KV of single-token steps, bit for bit, in any batch.

Covers block boundaries (16), window boundaries (24) and sparse attention's choice of keys. For all architectures at
real widths, and all dtypes: `pytest -m slow tests/model/test_draft_rows.py`, five minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import RequestSpec, Sampling
from tests.model.test_company import wide
from tests.support.adapters import digest_of, loaded, make_adapter
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.draft_steps import EACH_COUNT, Steps, cases_of, random_orders
from tests.support.more_checkpoints import MORE
from tests.support.pictures import make_vision, shared_folder
from tests.support.positions import spread

STARTS = ((1, 14), (8, 23), (30, 16))
QUICK = (
    *("llama", "gemma2", "gpt_oss", "qwen2_moe", "deepseek_v3", "deepseek_v32"),  # fused layers
    *("gpt2", "cohere2"),  # transformers' modules
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted({*CONFIGS, *MORE} - {*QUICK})]
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int4 pool": {"dtype": "bfloat16", "kv_cache_dtype": "int4"},
    "int8": {"quantization": "int8"},
    "w4a8, int8 pool": {"quantization": "w4a8", "kv_cache_dtype": "int8"},
    "fp8_e4m3 pool": {"kv_cache_dtype": "fp8_e4m3"},
}
MORE_KINDS: dict[str, dict[str, Any]] = {
    **KINDS,
    "w4a8": {"quantization": "w4a8"},
    "w4a8 of bfloat16": {"dtype": "bfloat16", "quantization": "w4a8"},
    "int8 of bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int8_wo": {"quantization": "int8_wo"},
    "int4_wo": {"quantization": "int4_wo"},
    "int8 pool": {"kv_cache_dtype": "int8"},
    "int4 pool": {"kv_cache_dtype": "int4"},
    "bfloat16 pool": {"kv_cache_dtype": "bfloat16"},
}
WHOLE_NUMBERS = ("int4 pool", "bfloat16, int4 pool")  # latents keep 8 bits or more
# Three threads divide 11,008 activations into parts that are not whole vectors.
BIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 11008,
    "vocab_size": 32001,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.03,
    "max_position_embeddings": 2048,
}
LARGER = {**BIG, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "initializer_range": 0.02}

pytestmark = pytest.mark.usefixtures("one_thread", "freed")


@pytest.fixture
def three_threads(one_thread: None) -> None:
    """Uses three threads until `one_thread` ends."""
    torch.set_num_threads(3)


def runner_of(folder: Path, **settings: Any) -> ModelRunner:
    usual = {"num_blocks": 64, "max_model_len": 128}
    return load_runner(EngineConfig(model=str(folder), device="cpu", **{**usual, **settings}))


def compare(runner: ModelRunner, *starts: tuple[int, int]) -> None:
    for at, each in enumerate(starts):
        steps = Steps(runner, random_orders(each), each, at)
        steps.compare(*EACH_COUNT, *cases_of(1, 2, 5, 12))


@pytest.mark.parametrize("architecture", [*QUICK, *SLOW])
def test_rows_are_steps(checkpoint: Callable[..., Path], architecture: str) -> None:
    compare(runner_of(checkpoint(architecture)), *STARTS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_other_numbers(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    compare(runner_of(wide(tmp_path_factory.mktemp("wide"), "llama"), **KINDS[kind]), STARTS[-1])


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("architecture", "activation"),
    [
        ("starcoder2", "gelu_pytorch_tanh"),
        pytest.param("starcoder2", "silu", marks=pytest.mark.slow),
        pytest.param("llama", "silu", marks=pytest.mark.slow),
    ],
)
def test_rows_of_a_wide_model_on_three_threads(tmp_path: Path, architecture: str, activation: str) -> None:
    """Checks bits that, with torch's own activations, would depend on how threads divide the rows."""
    changes = {**BIG, "vocab_size": 2003, "hidden_act": activation}
    runner = runner_of(make_checkpoint(tmp_path, architecture, **changes))
    Steps(runner, random_orders(STARTS[-1]), STARTS[-1]).compare(*cases_of(2, 7, 12))


def test_rows_with_adapters(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Covers sequences with and without an adapter, and with different adapters."""
    folder = checkpoint("llama")
    adapters = [make_adapter(tmp_path / f"a{at}", folder, at, rank=3 + at) for at in range(2)]
    runner = runner_of(folder, adapters=loaded(*adapters))
    first, second = map(digest_of, adapters)
    for variants in ((first, ""), (second, first)):
        orders = [RequestSpec([1], Sampling(), variant=variant) for variant in variants]
        Steps(runner, orders, (30, 16)).compare(*cases_of(1, 2, 5, 12))


def test_rows_behind_positions_of_their_own() -> None:
    """Covers M-RoPE beside sequences whose positions equal their indices."""
    runner, rng = runner_of(shared_folder(make_vision, "qwen2_vl")), random.Random(2)
    prompt = [rng.randrange(1, 250) for _ in range(20)]
    orders = [RequestSpec(prompt, Sampling(), rope_positions=spread(rng, 20)), RequestSpec([1], Sampling())]
    Steps(runner, orders, (30, 16)).compare(*cases_of(1, 2, 5, 12))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted({*CONFIGS, *MORE}))
def test_rows_of_wide_layers(tmp_path: Path, architecture: str) -> None:
    compare(runner_of(wide(tmp_path, architecture)), *STARTS[1:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE_KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe", "gemma2", "gpt_oss", "deepseek_v3", "cohere2"])
def test_more_rows_of_other_numbers(tmp_path: Path, architecture: str, kind: str) -> None:
    if (architecture == "deepseek_v3" and kind in WHOLE_NUMBERS) or (architecture == "cohere2" and "bf" in kind):
        pytest.skip("refused by name, or without drafts")
    compare(runner_of(wide(tmp_path, architecture), **MORE_KINDS[kind]), *STARTS[1:])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("kind", [{}, KINDS["bfloat16"], KINDS["w4a8, int8 pool"]], ids=str)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", LARGER),
        ("mistral", {**LARGER, "sliding_window": 500}),
        ("qwen2_moe", {**BIG, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 8960}),
    ],
)
def test_rows_behind_long_contexts(
    tmp_path: Path, architecture: str, changes: dict[str, Any], kind: dict[str, Any]
) -> None:
    """Covers sequences of 95 and 700 tokens, in layers as wide as a 7B model's."""
    if architecture == "qwen2_moe":
        changes = {**changes, "layer_types": ["full_attention"], "mlp_only_layers": []}
    runner = runner_of(make_checkpoint(tmp_path, architecture, **changes), num_blocks=128, max_model_len=1024, **kind)
    Steps(runner, random_orders((95, 700)), (95, 700)).compare(*cases_of(2, 5, 8, 12))
