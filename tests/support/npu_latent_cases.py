"""Latent attention on the NPU path, with absorbed queries and a pool of two planes. Run by tests/model/test_npu.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout, latents
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.model.kernels.attention_backend import AttentionOptions, choose_attention
from pd_cluster.model.kernels.npu import npu_latents
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, random_prompt, run
from tests.support.more_checkpoints import YARN
from tests.support.npu_cases import ATTENTION, EXPERTS, NUM_SIZES, calls, check, core_of
from tests.support.ranks import ranks

__all__ = ["calls"]  # a fixture

NPU = Device("npu")
FUSED = "fused layers, NPU kernels, attention by torch-npu (latents)"
WIDTHS: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 1024}
LONG_YARN = {"rope_parameters": {**YARN, "original_max_position_embeddings": 256}}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
GREEDY = Sampling(max_tokens=12, temperature=0.0)
slow = pytest.mark.slow


def folder_of(place: Path, architecture: str, **changes: Any) -> Path:
    """Makes a model whose head_dim is the rotated width, which is also the width of the rotation tables."""
    return make_checkpoint(place, architecture, **{**WIDTHS, "head_dim": 64, "initializer_range": 0.1, **changes})


@pytest.mark.parametrize(
    ("architecture", "changes", "operators"),
    [
        ("deepseek_v3", LONG_YARN, {ATTENTION, EXPERTS}),
        pytest.param("minicpm3", {}, {ATTENTION}, marks=slow),
        pytest.param("deepseek_v2", {}, {ATTENTION, EXPERTS}, marks=slow),
        pytest.param("glm4_moe_lite", THREE_HEADS, {ATTENTION, EXPERTS}, marks=slow),
        pytest.param("axk1", {}, {ATTENTION, EXPERTS}, marks=slow),
        pytest.param("youtu", {}, {ATTENTION}, marks=slow),
    ],
)
def test_fused_layers_are_exact(
    architecture: str,
    changes: dict[str, Any],
    operators: set[str],
    tmp_path: Path,
    calls: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Covers chunked prompts beside decoded tokens, graphs, and head counts that are no power of two."""
    monkeypatch.setattr("pd_cluster.model.graphs.step_graphs.MAX_START_S", 0.0)  # the limit for other devices
    folder = folder_of(tmp_path, architecture, **changes)
    core, runner = core_of(folder)
    assert runner.model.kernels == FUSED
    assert isinstance(runner.pool.memory, LayerMajor)
    assert runner.pool.layout.block_size == 128
    check(folder, core)
    assert operators == {name for name in (ATTENTION, EXPERTS) if name in calls}
    assert runner.graphs.decode is not None
    assert runner.graphs.decode.num_captured == NUM_SIZES
    assert core.ahead.num_ahead > 0


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("minicpm3", {}), pytest.param("longcat_flash", {**WIDTHS, "head_dim": 64}, marks=slow)],
    ids=["other widths", "layers that are not fused"],
)
def test_other_models_run_as_modules(
    architecture: str, changes: dict[str, Any], tmp_path: Path, calls: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, architecture, **changes)
    core, runner = core_of(folder)
    assert runner.model.kernels == "transformers' modules, attention by SDPA"
    assert "attention runs on SDPA, sequence by sequence, which is slow: latent attention (MLA) of" in caplog.text
    check(folder, core, (5, 40))
    assert ATTENTION not in calls


def test_steps_of_more_pieces_than_a_call_takes(
    tmp_path: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real steps have so many pieces beyond 65,536 tokens, at 16 tokens each."""
    folder = folder_of(tmp_path, "minicpm3", num_hidden_layers=2)
    core, _ = core_of(folder, enforce_eager=True, max_num_seqs=4)
    calls.clear()
    check(folder, core, (90, 60, 1, 130))
    whole = calls.pop(ATTENTION)
    monkeypatch.setattr(npu_latents, "MAX_PACKED_SEQS", 4)
    core, _ = core_of(folder, enforce_eager=True, max_num_seqs=4)
    calls.clear()
    check(folder, core, (90, 60, 1, 130))
    assert calls[ATTENTION] > whole


@slow
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_cached_sequences(mode: str, tmp_path: Path) -> None:
    """Runs four sequences in a pool for two, then a prompt with cached blocks and three sequences of one prompt."""
    folder, rng = folder_of(tmp_path, "deepseek_v3"), random.Random(2)
    prompts, sampling = [random_prompt(rng, 30) for _ in range(4)], Sampling(max_tokens=24, temperature=0.0)
    core, _ = core_of(folder, block_size=16, num_blocks=12, preemption_mode=mode, swap_space_gib=0.01, max_model_len=96)
    assert_all_same(folder, prompts, generate(core, prompts, sampling), sampling.max_tokens)
    assert core.scheduler.num_preemptions
    prompt = random_prompt(rng, 50)
    generate(core, [prompt], GREEDY)
    request = Request("again", RequestSpec(prompt, GREEDY))
    run(core, [request])
    assert request.num_cached_tokens == 48
    found = run(
        core, [Request("n", RequestSpec(prompt, Sampling(n=3, max_tokens=GREEDY.max_tokens, temperature=0.0)))]
    )["n"]
    outputs = [[token.token_id for token in found[index]] for index in range(3)]
    assert_all_same(folder, [prompt] * 4, [request.output_token_ids, *outputs], GREEDY.max_tokens)


@slow
@pytest.mark.parametrize(("architecture", "changes"), [("deepseek_v3", LONG_YARN), ("glm4_moe_lite", SIX_HEADS)])
def test_over_ranks(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Each rank has all latents and its own heads: two, or three (no power of two)."""
    folder, rng = folder_of(tmp_path, architecture, **changes), random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 9, 150, 127, 128)]
    settings = {"num_blocks": 24, "max_model_len": 300, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    with ranks(folder, 2, NPU, npu_tp_graphs=True, dtype="float32", **settings) as core:
        assert core.runner.runner.model.kernels == FUSED  # type: ignore[attr-defined]
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 64}, "--block-size 64: latent attention on NPUs supports 16 or 128; .*sdpa is slow"),
        ({"dtype": "int8"}, "--kv-cache-dtype int8: NPU operators read bfloat16 here"),
        ({"heads": 129}, "129 heads: latent attention on NPUs supports at most 128"),
        ({"seqs": 5000}, "--max-num-seqs 5000: .* at most 4096"),
    ],
    ids=str,
)
def test_limits_of_the_operator(changes: dict[str, Any], message: str) -> None:
    values = {"heads": 16, "seqs": 8, "block_size": 128, "dtype": "bfloat16", **changes}
    layout = KVLayout(1, 1, latents(512, 64), values["block_size"], values["dtype"])
    config: Any = type("Config", (), {"num_attention_heads": values["heads"]})
    with pytest.raises(ConfigError, match=message):
        choose_attention("auto", config, layout, NPU, False, AttentionOptions(values["seqs"], dtype="bfloat16"))


def test_in_16_bits_it_stays_near_float32(tmp_path: Path) -> None:
    from pd_cluster.checkpoints.checkpoint import Checkpoint
    from pd_cluster.model.language_model.cache_declaration import layout_of
    from pd_cluster.model.loading import model_loader

    checkpoint = Checkpoint.open(str(folder_of(tmp_path, "minicpm3")))

    def logits(dtype: str, backend: str) -> torch.Tensor:
        model = model_loader.load_model(
            checkpoint, dtype, NPU, choices=model_loader.LoadChoices(attention_backend=backend, block_size=128)
        )
        return model_loader.probe_logits(model, layout_of(model.caches, 128, dtype), NPU)

    exact = logits("float32", "auto")
    by_operator, by_modules = ((logits("bfloat16", each) - exact).norm() / exact.norm() for each in ("auto", "sdpa"))
    assert 0 < by_operator < 1.5 * by_modules + 1e-3, (float(by_operator), float(by_modules))
