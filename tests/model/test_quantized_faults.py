"""Quantized folders that are mixed, special or broken: right, or refused by the layer's name."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.quantized import Quantization
from pd_cluster.errors import ModelError
from pd_cluster.model.quantized.decode import decoded
from pd_cluster.model.quantized.weight import INT8_STATIC
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.quantized import (
    FILE,
    FORMATS,
    W8A8,
    Tensors,
    ascend_static,
    change_config,
    int8,
    mxfp4,
    rewritten,
)

GREEDY = Sampling(max_tokens=10, temperature=0.0)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]
DOWN = "model.layers.1.mlp.down_proj"
ATTENTION = "model.layers.0.self_attn"


def assert_numbers(quantized: Path, plain: Path) -> None:
    outputs = generate(make_core(quantized, max_num_batched_tokens=32, num_blocks=64), PROMPTS, GREEDY)
    assert_all_same(plain, PROMPTS, outputs, GREEDY.max_tokens)


def change(folder: Path, do: Callable[[Tensors], object]) -> None:
    weights = load_file(folder / FILE)
    do(weights)
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / FILE, {"format": "pt"})


# ---- mixed and special


def test_layers_left_alone_are_joined_as_numbers(tmp_path: Path) -> None:
    """One of q, k and v is plain, and a whole MLP."""
    quantized, plain = rewritten(make_checkpoint(tmp_path / "model", "qwen2"), tmp_path, FORMATS["awq"])
    numbers = load_file(plain / FILE)

    def leave(weights: Tensors) -> None:
        for path in ("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            place = f"model.layers.1.{path}"
            for part in ("qweight", "qzeros", "scales"):
                del weights[f"{place}.{part}"]
            weights[f"{place}.weight"] = numbers[f"{place}.weight"]

    change(quantized, leave)
    assert_numbers(quantized, plain)


def test_groups_of_several_sizes_are_joined(tmp_path: Path) -> None:
    quantized, plain = rewritten(make_checkpoint(tmp_path / "model", "llama"), tmp_path, FORMATS["packed 4"])
    numbers = load_file(plain / FILE)
    place = "model.layers.0.self_attn.k_proj"
    parts, numbers[f"{place}.weight"] = FORMATS["packed 8"].write(numbers[f"{place}.weight"], 32)
    change(quantized, lambda weights: weights.update({f"{place}.{name}": each for name, each in parts.items()}))
    save_file({name: each.contiguous() for name, each in numbers.items()}, plain / FILE, {"format": "pt"})
    assert_numbers(quantized, plain)


def test_an_output_layer_that_is_quantized(tmp_path: Path) -> None:
    quantized, plain = rewritten(make_checkpoint(tmp_path / "model", "llama"), tmp_path, FORMATS["gptq 4"])
    numbers = load_file(plain / FILE)
    parts, numbers["lm_head.weight"] = FORMATS["gptq 4"].write(numbers["lm_head.weight"], 16)

    def replace(weights: Tensors) -> None:
        del weights["lm_head.weight"]
        weights.update({f"lm_head.{name}": each.contiguous() for name, each in parts.items()})

    change(quantized, replace)
    save_file({name: each.contiguous() for name, each in numbers.items()}, plain / FILE, {"format": "pt"})
    assert_numbers(quantized, plain)


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Blocks are [experts, outputs, groups, 16]; transformers' own weight is transposed."""
    folder = make_checkpoint(tmp_path / "model", "gpt_oss")
    stored = load_file(folder / FILE)
    codes, numbers = dict(stored), dict(stored)
    names = [name for name in stored if re.search(r"experts\.(gate_up|down)_proj$", name)]
    assert names
    for name in names:
        written = [mxfp4(expert.T.contiguous()) for expert in codes.pop(name)]
        blocks = torch.stack([parts["weight_packed"] for parts, _ in written])
        codes[f"{name}_blocks"] = blocks.reshape(*blocks.shape[:2], -1, 16)
        codes[f"{name}_scales"] = torch.stack([parts["weight_scale"] for parts, _ in written])
        numbers[name] = torch.stack([each.T for _, each in written]).contiguous()
    save_file(numbers, folder / FILE, {"format": "pt"})
    quantized = make_checkpoint(tmp_path / "quantized", "gpt_oss")
    save_file(codes, quantized / FILE, {"format": "pt"})
    change_config(quantized, quantization_config={"quant_method": "mxfp4"})
    assert_numbers(quantized, folder)


def with_kv_scales(folder: Path) -> None:
    """Adds scales as compressed-tensors, ModelOpt and msmodelslim name them."""
    names = ("q_scale", "k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.kv_cache_offset")
    change(folder, lambda weights: weights.update({f"{ATTENTION}.{name}": torch.tensor(0.1) for name in names}))


@pytest.mark.parametrize("form", ["fp8 whole", "packed 4"])
def test_scales_of_the_kv_cache_change_nothing(tmp_path: Path, form: str) -> None:
    """It has the model's own precision. One of the layers beside which they are is plain."""
    quantized, plain = rewritten(make_checkpoint(tmp_path / "model", "llama"), tmp_path, FORMATS[form])
    numbers = load_file(plain / FILE)

    def leave(weights: Tensors) -> None:
        for name in [name for name in weights if name.startswith(f"{ATTENTION}.k_proj.")]:
            del weights[name]
        weights[f"{ATTENTION}.k_proj.weight"] = numbers[f"{ATTENTION}.k_proj.weight"]

    change(quantized, leave)
    with_kv_scales(quantized)
    assert_numbers(quantized, plain)


def test_a_folder_with_scales_of_the_kv_cache_alone(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "model", "llama")
    folder = Path(shutil.copytree(plain, tmp_path / "with scales"))
    with_kv_scales(folder)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    change_config(folder, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    assert_numbers(folder, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_ascend_s_static_products(dtype: torch.dtype) -> None:
    """By its own formula: integers of the row with the zero point, the bias in units of the scale, then that scale."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 32), torch.randn(5, 32)
    parts, _ = ascend_static(weight, 0, dtype)
    step, zero, scales = 0.04, 3.0, 0.04 * int8(weight, 0)[0]["weight_scale"][:, 0]
    bias = torch.arange(8) * 10
    whole = parts["quant_bias"] + bias.int()
    taken = ((x / step).round() + zero).clamp(-128, 127).long()
    expected = (taken @ parts["weight"].long().T + whole).float() * scales
    found = decoded("layer", {**parts, "quant_bias": whole}, Quantization("msmodelslim", "file"), "W8A8")
    linear = INT8_STATIC.weight.of(found, torch.float32).linear()
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


# ---- broken


BROKEN: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("awq", lambda w: w.pop(f"{DOWN}.scales"), r"down_proj: scales is missing beside qzeros"),
    ("awq", lambda w: w.pop(f"{DOWN}.qweight"), r"down_proj: .* is missing"),
    ("awq", lambda w: w.update({f"{DOWN}.scales": w[f"{DOWN}.scales"][:2]}), "down_proj: qzeros for .* groups, scales"),
    ("awq", lambda w: w.update({f"{DOWN}.qweight": w[f"{DOWN}.qweight"].long()}), r"down_proj: words of torch\.int64"),
    ("gptq 4", lambda w: w.update({f"{DOWN}.g_idx": w[f"{DOWN}.g_idx"] + 9}), "down_proj: .* groups of scales"),
    ("gptq 4", lambda w: w.update({f"{DOWN}.g_idx": w[f"{DOWN}.g_idx"][:-1]}), "down_proj: .* input features, and"),
    ("packed 4", lambda w: w.update({f"{DOWN}.weight_scale": torch.ones(64, 5)}), "cannot have 5 groups of scales"),
    ("packed 4", lambda w: w.pop(f"{DOWN}.weight_shape"), "down_proj: weight_shape is missing"),
    ("fp8 blocks", lambda w: w.update({f"{DOWN}.weight_scale_inv": torch.ones(9, 9)}), r"weight_scale_inv of \[9, 9\]"),
    ("fp8 blocks", lambda w: w.pop(f"{DOWN}.weight_scale_inv"), "down_proj: weight_scale is missing"),
    ("fp8 whole", lambda w: w.update({f"{DOWN}.weight_offset": torch.ones(1)}), "weight_offset has no meaning here"),
    ("awq", lambda w: w.update({"model.layers.0.mlp.x_proj.weight": torch.ones(4, 4)}), "has no such weight"),
    ("awq", lambda w: w.update({f"{DOWN}.qweight": w[f"{DOWN}.qweight"][:48]}), "down_proj: 64 output and 48 input"),
    ("packed 4", lambda w: w.update({f"{DOWN}.weight_shape": torch.tensor([64, 48])}), "down_proj: 64 output and 48"),
    (
        "fp8 whole",
        lambda w: w.update({f"{DOWN}.weight": w[f"{DOWN}.weight"].t().contiguous()}),
        "96 output and 64 input",
    ),
    ("gptq 4", lambda w: w.update({f"{DOWN}.bias": torch.zeros(63)}), r"down_proj: 63 and 64 output .* \[64, 96\]"),
]


@pytest.mark.parametrize(("form", "do", "said"), BROKEN, ids=[f"{form}: {said}" for form, _, said in BROKEN])
def test_what_does_not_fit_is_named(tmp_path: Path, form: str, do: Callable[[Tensors], object], said: str) -> None:
    quantized, _ = rewritten(make_checkpoint(tmp_path / "model", "llama"), tmp_path, FORMATS[form])
    change(quantized, do)
    with pytest.raises(ModelError, match=said) as caught:
        make_core(quantized, num_blocks=32)
    assert "\n" not in str(caught.value)


def test_experts_that_no_proof_asks_are_checked(tmp_path: Path) -> None:
    """Few tokens choose few experts; one with infinities would spoil the answers of those that choose it later."""
    quantized, _ = rewritten(make_checkpoint(tmp_path / "model", "mixtral"), tmp_path, FORMATS["packed 4"])
    name = "model.layers.2.block_sparse_moe.experts.3.w1"
    change(quantized, lambda weights: weights[f"{name}.weight_scale"].fill_(float("inf")))
    with pytest.raises(ModelError, match=rf"model.safetensors: {name}: weight_scale has inf in 384 of 384 places"):
        make_core(quantized, num_blocks=32)


def test_experts_of_another_size_than_the_config_says(tmp_path: Path) -> None:
    quantized, _ = rewritten(make_checkpoint(tmp_path / "model", "mixtral"), tmp_path, FORMATS["packed 4"])
    change_config(quantized, intermediate_size=128)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj: 192 output .* config\.json says \[4, 256, 64\]"):
        make_core(quantized, num_blocks=32)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    quantized, _ = rewritten(make_checkpoint(tmp_path / "model", "llama"), tmp_path, FORMATS["awq"])
    weights = load_file(quantized / FILE)
    (quantized / FILE).unlink()
    save_file(weights, quantized / "model-1.safetensors")
    save_file({f"{DOWN}.scales": weights[f"{DOWN}.scales"]}, quantized / "model-2.safetensors")
    places = dict.fromkeys(weights, "model-1.safetensors") | {f"{DOWN}.scales": "model-2.safetensors"}
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=r"model-2\.safetensors: .*scales is in model-1\.safetensors, too; remove"):
        make_core(quantized, num_blocks=32)


def test_a_layer_without_a_weight_is_missed_by_name(tmp_path: Path) -> None:
    """Quantized at load."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    change(folder, lambda w: (w.pop(f"{DOWN}.weight"), w.update({f"{DOWN}.bias": torch.zeros(64)})))
    with pytest.raises(ModelError, match=rf"lack 1 weights, such as {DOWN}.weight"):
        make_core(folder, num_blocks=32, quantization="int8")


def test_int8_products_beside_plain_layers_are_joined_as_numbers(tmp_path: Path) -> None:
    """As msmodelslim's folders have it: a down_proj that is plain, beside others that are not."""
    quantized, plain = rewritten(make_checkpoint(tmp_path / "model", "llama"), tmp_path, W8A8)
    numbers = load_file(plain / FILE)

    def leave(weights: Tensors) -> None:
        for name in [name for name in weights if name.endswith("down_proj.weight")]:
            weights[name] = numbers[name]
            del weights[f"{name}_scale"]

    change(quantized, leave)
    outputs = generate(make_core(quantized, num_blocks=64), PROMPTS, GREEDY)
    assert all(len(output) == GREEDY.max_tokens for output in outputs)
