"""Models that would answer wrongly are refused when they are loaded, by name and with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.errors import ModelError
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.proof import prove_every_layer_writes
from tests.support import checkpoints
from tests.support.engines import make_core

Checkpoints = Callable[..., Path]

# Architectures that are not on the list, and why each of them must not be.
OUTSIDE: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("BloomConfig", {}, "bloom: layer 0 does not call the attention that it is given"),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3}, "mpt cannot run with paged attention"),
    "doge": ("DogeConfig", {}, "DogeAttention attends with attention_mask, which the paged attention does not know"),
    "jamba": ("JambaConfig", {}, r"layer_types \['linear_attention'\]: only full and sliding are supported"),
    "llama4_text": (
        "Llama4TextConfig",
        {"intermediate_size_mlp": 96, "num_local_experts": 2},
        r"layer_types \['chunked_attention'\]: only full and sliding are supported",
    ),
}


@pytest.mark.parametrize("architecture", OUTSIDE)
def test_an_architecture_outside_the_list(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config_class, own, reason = OUTSIDE[architecture]
    monkeypatch.setitem(checkpoints.CONFIGS, architecture, (config_class, own))
    folder = checkpoints.make_checkpoint(tmp_path, architecture)
    with pytest.raises(ModelError, match=f"model_type '{architecture}' is not supported"):
        make_core(folder)
    monkeypatch.setattr("pd_cluster.checkpoints.checkpoint.SUPPORTED_MODEL_TYPES", (architecture,))
    with pytest.raises(ModelError, match=reason):
        make_core(folder, num_blocks=512)


@pytest.mark.parametrize(
    ("architecture", "ignored"),
    [
        ("qwen2_moe", "sliding_window"),
        ("phi3", "sliding_window"),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "sinks"),
        ("cohere2", "sliding_window"),
    ],
)
def test_what_the_attention_ignores_is_noticed(
    checkpoint: Checkpoints, architecture: str, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = sdpa.write_and_attend

    def careless(*arguments: Any) -> torch.Tensor:
        return attend(*arguments[:-1], dataclasses.replace(arguments[-1], **{ignored: None}))

    monkeypatch.setattr(sdpa, "write_and_attend", careless)
    monkeypatch.setattr("pd_cluster.model.loader.can_fuse", lambda *_: False)  # fused layers are compared otherwise
    with pytest.raises(ModelError, match=f"{architecture}: with paged attention the logits differ"):
        make_core(checkpoint(architecture))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_pass(checkpoint: Checkpoints, dtype: str) -> None:
    for architecture in ("gpt_oss", "gemma3_text", "opt"):
        make_core(checkpoint(architecture), dtype=dtype)


def test_windows_and_attention_are_as_before(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.model.loader.can_fuse", lambda *_: False)
    model = make_core(checkpoint("exaone4")).runner.model.model  # type: ignore[attr-defined]
    assert model.config.sliding_window == 24
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [24, 24, 24]
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
        sdpa.NAME
    }


# ---- what a module may ask of the attention


def call(module: Any = None, mask: torch.Tensor | None = None, **keywords: Any) -> ForwardBatch:
    batch = SimpleNamespace()
    x = torch.zeros(1, 2, 1, 16)
    module = module or SimpleNamespace(layer_idx=0)
    sdpa.forward(module, x, x, x, mask, scaling=1.0, forward_batch=batch, **keywords)  # type: ignore[arg-type]
    raise AssertionError("not refused")


@pytest.mark.parametrize("name", ["head_mask", "alibi", "position_bias", "block_mask", "is_causal"])
def test_an_unknown_keyword(name: str) -> None:
    with pytest.raises(ModelError, match=f"attends with {name}, which"):
        call(**{name: torch.ones(1)})


def test_a_mask_dropout_or_sight_of_the_future() -> None:
    with pytest.raises(ModelError, match="attends with attention_mask, which"):
        call(mask=torch.zeros(1, 1, 1, 1))
    with pytest.raises(ModelError, match="attends with dropout, which"):
        call(dropout=0.1)
    with pytest.raises(ModelError, match="is not causal"):
        call(SimpleNamespace(layer_idx=0, is_causal=False))


# ---- every layer, once, in order


class Writes:
    """A model of which nothing is known but who writes."""

    config = SimpleNamespace(model_type="strange")
    kernels = "none"

    def __init__(self, *layers: int) -> None:
        self._layers = layers

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        for layer in self._layers:
            batch.layer_written(layer, None)
        return torch.zeros(1, 8)


@pytest.mark.parametrize("layers", [(), (0, 1), (0, 1, 1), (0, 0, 2), (1, 0, 2), (0, 1, 2, 3), (0, 1, 2, 0)])
def test_layers_that_do_not_write_once_and_in_order(layers: tuple[int, ...]) -> None:
    pool = KVPool(KVLayout(3, 1, keys_and_values(16), 4, "float32"), num_blocks=1)
    prove_every_layer_writes(Writes(0, 1, 2), pool)
    with pytest.raises(ModelError, match=r"strange: layers .* wrote the KV pool instead of each of 3 once, in order"):
        prove_every_layer_writes(Writes(*layers), pool)


@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, architecture: str, value: float) -> None:
    """They may be in fused layers or in transformers' own."""
    folder = checkpoints.make_checkpoint(tmp_path, architecture)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="logits in float32 are not all numbers: its weights have NaN or infinities"):
        make_core(folder, num_blocks=64)
