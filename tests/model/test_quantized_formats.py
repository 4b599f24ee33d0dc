"""Quantizers' folders are dequantized exactly, and give transformers' tokens; errors name the faulty tensor.

Int8 weights with int8 activations have exact sums; test_quantized_ranks.py tests them on several ranks. The library
compressed-tensors is a second reader: it gets the same numbers from our folders and from hand-written ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.quantization_config import Quantization
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ModelError
from pd_cluster.extras.quantize.quantize_job import QuantizeJob
from pd_cluster.extras.quantize.quantize_schemes import SCHEMES
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.linear_weight import UnpackedLinear
from pd_cluster.model.loading.model_loader import load_model, probe_logits
from pd_cluster.model.loading.transformers_modules import load_plain
from pd_cluster.model.weights.int8_linear import Int8Linear
from pd_cluster.model.weights.quantized_formats import decoded
from pd_cluster.model.weights.quantized_weight import INT8_STATIC
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.quantized import (
    FILE,
    FORMATS,
    INT8_FORMATS,
    W8A8,
    Format,
    Tensors,
    ascend_static,
    awq_words,
    change_config,
    experts_in_mxfp4,
    int8,
    rewritten,
    words_of,
)
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=10, temperature=0.0)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]
DOWN = "model.layers.1.mlp.down_proj"
ATTENTION = "model.layers.0.self_attn"


def written(folder: Path, form: Format, architecture: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """Writes a tiny model in the format, and one with the dequantized numbers."""
    return rewritten(make_checkpoint(folder / "model", architecture, **changes), folder, form)


def assert_numbers(quantized: Path, plain: Path, num_ranks: int = 1) -> None:
    with ranks(quantized, num_ranks, max_num_batched_tokens=32, num_blocks=64, max_model_len=256) as core:
        assert_all_same(plain, PROMPTS, generate(core, PROMPTS, GREEDY), GREEDY.max_tokens)


def change(folder: Path, do: Callable[[Tensors], object]) -> None:
    weights = load_file(folder / FILE)
    do(weights)
    save(weights, folder)


def save(weights: Tensors, folder: Path) -> None:
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / FILE, {"format": "pt"})


def test_the_words_are_those_of_the_formats() -> None:
    """Compares with words by hand: codes 0 to 7, in AWQ's order, too, and a dense stream of three bits."""
    eight = [list(range(8))]
    assert awq_words(eight).tolist() == [[0x75316420]]
    assert words_of(eight, 4).tolist() == [[0x76543210]]
    assert words_of([[1, 2, 3, 4]], 8).tolist() == [[0x04030201]]
    expected = [0x88FAC688, 0xC688FAC6, 0xFAC688FA]
    assert (words_of([list(range(8)) * 4], 3)[0].long() & 0xFFFFFFFF).tolist() == expected


# down_proj's 96 inputs are six groups of 16 (three per rank), or three groups of 32, one of which is split.
CUT = ["awq", "gptq desc_act", "packed asymmetric", "fp8 blocks", "mxfp4"]
# These have experts, layers joined in the files, rows that rope reorders, or projections of latents.
OTHERS = ["mixtral", "qwen3_moe", "phi3", "glm4", "gemma2", "glm4_moe", "deepseek_v3"]
# Hybrids whose files have other layer names than transformers; experts with and without gates.
HYBRIDS = ("kimi_linear", "nemotron_h")
LATENTS: dict[str, Any] = {"kv_lora_rank": 64, "v_head_dim": 24}
CHANGES = {name: {**LATENTS, "q_lora_rank": 32} for name in ("deepseek_v3", "deepseek_v32")}
CHANGES |= {"kimi_linear": LATENTS, "nemotron_h": {"moe_latent_size": 32}}
CASES: list[Any] = [("qwen2", name, 1) for name in FORMATS] + [("qwen2", name, 2) for name in CUT]
CASES += [pytest.param("qwen2", name, 4, marks=pytest.mark.slow) for name in CUT]
CASES += [pytest.param("deepseek_v32", "fp8 blocks", size, marks=pytest.mark.slow) for size in (1, 2)]
CASES += [(name, "fp8 blocks", 1) for name in HYBRIDS]
CASES += [pytest.param(name, "packed 4", size, marks=pytest.mark.slow) for name in HYBRIDS for size in (1, 2)]


@pytest.mark.parametrize(("architecture", "name", "num_ranks"), [*CASES, *((each, "packed 4", 1) for each in OTHERS)])
def test_tokens_are_those_of_the_numbers(tmp_path: Path, architecture: str, name: str, num_ranks: int) -> None:
    folders = written(tmp_path, FORMATS[name], architecture, **CHANGES.get(architecture, {}))
    assert_numbers(*folders, num_ranks)


# ---- int8 weights with int8 activations


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 48), (1000, 130), (16384, 16)])
def test_sums_are_exact_and_rows_are_apart(num_inputs: int, num_outputs: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales, x = torch.rand(num_outputs) / 100, torch.randn(200, num_inputs)
    x[3] = 0
    x[5] *= 1e20
    linear = Int8Linear(codes, scales)
    found, most = linear(x), x.abs().amax(-1, keepdim=True)
    taken = torch.where(most > 0, (x * (127 / most)).round(), x).long()
    sums = (taken.double() @ codes.double().T).float()  # exact: below 2 to the power of 53
    assert torch.equal(found, sums * (most / 127) * scales)
    for num_rows in (1, 2, 3, 16, 17, 64):
        assert torch.equal(linear(x[:num_rows]), found[:num_rows])


def test_numbers_that_are_none_stay_in_their_row() -> None:
    linear = Int8Linear(torch.ones(4, 8, dtype=torch.int8), torch.ones(4), torch.ones(4))
    x = torch.ones(3, 8)
    x[1, 2] = float("nan")
    found = linear(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].tolist() == [[9.0] * 4] * 2


def test_one_scale_and_zero_point_of_the_file() -> None:
    """At scale 0.5 and zero point 3, x [1, -1] has the codes [5, 1]."""
    linear = Int8Linear(torch.tensor([[2, 3]], dtype=torch.int8), torch.ones(1), inputs=torch.tensor([0.5, 3.0]))
    assert linear(torch.tensor([[1.0, -1.0]])).tolist() == [[-1.0]]


MOST = {"msmodelslim static": 0.8}  # one scale for all layers, which fits none well


@pytest.mark.parametrize("name", INT8_FORMATS)
def test_logits_are_near_those_of_the_weights_alone(tmp_path: Path, name: str) -> None:
    logits = []
    for each in written(tmp_path, INT8_FORMATS[name]):
        model = load_model(Checkpoint.open(str(each)), "float32", CPU)
        assert isinstance(model, FusedCausalLM)
        logits.append(probe_logits(model, layout_of(model.caches, 16, "float32"), CPU))
    error = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
    assert 0 < error < MOST.get(name, 0.05)  # activations really lose bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_ascend_s_static_products(dtype: torch.dtype) -> None:
    """Products equal the format's formula: rows of integers with zero point, bias in units of the scale, scale."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 32), torch.randn(5, 32)
    parts, _ = ascend_static(weight, 0, dtype)
    step, zero, scales = 0.04, 3.0, 0.04 * int8(weight, 0)[0]["weight_scale"][:, 0]
    whole = parts["quant_bias"] + torch.arange(8).int() * 10
    taken = ((x / step).round() + zero).clamp(-128, 127).long()
    expected = (taken @ parts["weight"].long().T + whole).float() * scales
    found = decoded("layer", {**parts, "quant_bias": whole}, Quantization("msmodelslim", "file"), "W8A8")
    linear = INT8_STATIC.weight.of(found, torch.float32).linear()
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


# ---- a second reader


def config(name: str, strategy: str, **weights: Any) -> dict[str, Any]:
    """Returns a quantization_config with every field that the library requires."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


WRITTEN = {
    "packed asymmetric": config("pack-quantized", "group", group_size=16, symmetric=False),
    "packed 8": config("pack-quantized", "group", group_size=16, num_bits=8),
    "mxfp4": config("mxfp4-pack-quantized", "group", group_size=32, type="float"),
}


@pytest.mark.parametrize("name", [*SCHEMES, *WRITTEN])
def test_compressed_tensors_own_library_reads_the_same(tmp_path: Path, name: str) -> None:
    """compressed-tensors reads folders written by `quantize`, and hand-written ones, with equal weights and logits."""
    pytest.importorskip("compressed_tensors", reason="the extra `test` brings it")
    if name in SCHEMES:
        folder = tmp_path / "out"
        QuantizeJob(make_checkpoint(tmp_path / "model", "qwen2"), folder, SCHEMES[name], "rtn", []).run()
    else:
        folder, _ = written(tmp_path, FORMATS[name], "qwen2")
        change_config(folder, quantization_config=WRITTEN[name])
    reading: dict[str, Any] = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **reading
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_plain(Checkpoint.open(str(folder)), "float32", CPU)
    held = {name: module for name, module in ours.named_modules() if isinstance(module, UnpackedLinear)}
    assert held
    for name, module in held.items():
        assert torch.equal(module.parts.value.matrix(), theirs.get_submodule(name).weight), name
        plain = torch.nn.Linear(module.in_features, module.out_features)
        plain.weight.data, plain.bias = module.parts.value.matrix(), theirs.get_submodule(name).bias
        ours.set_submodule(name, plain)
    ours.config._attn_implementation = theirs.config._attn_implementation
    with torch.inference_mode():
        found, expected = (model.eval()(torch.tensor([PROMPTS[2]])).logits for model in (ours, theirs))
    assert torch.equal(found, expected)


# ---- mixed and special


def leave_plain(quantized: Path, plain: Path, *names: str) -> None:
    """Replaces the codes of these layers by their numbers."""
    numbers = load_file(plain / FILE)

    def leave(weights: Tensors) -> None:
        for name in names:
            for part in [part for part in weights if part.startswith(f"{name}.") and not part.endswith("proj.bias")]:
                del weights[part]
            weights[f"{name}.weight"] = numbers[f"{name}.weight"]

    change(quantized, leave)


def test_layers_left_alone_are_joined_as_numbers(tmp_path: Path) -> None:
    """Covers a plain one of q, k and v, a plain MLP, and a plain down_proj beside int8 products, as in msmodelslim."""
    quantized, plain = written(tmp_path / "awq", FORMATS["awq"], "qwen2")
    layers = ("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    leave_plain(quantized, plain, *(f"model.layers.1.{path}" for path in layers))
    assert_numbers(quantized, plain)
    quantized, plain = written(tmp_path / "int8", W8A8)
    leave_plain(quantized, plain, *(f"model.layers.{index}.mlp.down_proj" for index in range(3)))
    outputs = generate(make_core(quantized, num_blocks=64), PROMPTS, GREEDY)
    assert all(len(output) == GREEDY.max_tokens for output in outputs)


@pytest.mark.parametrize(
    ("form", "place", "other", "group"),
    [
        ("packed 4", f"{ATTENTION}.k_proj", "packed 8", 32),  # groups of several sizes are joined
        ("gptq 4", "lm_head", "gptq 4", 16),  # an output layer that is quantized
    ],
)
def test_a_layer_in_a_form_of_its_own(tmp_path: Path, form: str, place: str, other: str, group: int) -> None:
    quantized, plain = written(tmp_path, FORMATS[form])
    numbers = load_file(plain / FILE)
    parts, numbers[f"{place}.weight"] = FORMATS[other].write(numbers[f"{place}.weight"], group)
    save(numbers, plain)

    def replace(weights: Tensors) -> None:
        weights.pop(f"{place}.weight", None)
        weights.update({f"{place}.{name}": each for name, each in parts.items()})

    change(quantized, replace)
    assert_numbers(quantized, plain)


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    plain, quantized = (make_checkpoint(tmp_path / name, "gpt_oss") for name in ("plain", "quantized"))
    experts_in_mxfp4(plain, quantized)
    assert_numbers(quantized, plain)


@pytest.mark.parametrize("form", ["fp8 whole", "packed 4", None])
def test_scales_of_the_kv_cache_change_nothing(tmp_path: Path, form: str | None) -> None:
    """The cache keeps the model's precision. Covers scales beside a plain layer, and folders with scales only."""
    if form is None:
        quantized, plain = (make_checkpoint(tmp_path / name) for name in ("model", "plain"))
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
        change_config(quantized, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    else:
        quantized, plain = written(tmp_path, FORMATS[form])
        leave_plain(quantized, plain, f"{ATTENTION}.k_proj")
    # as compressed-tensors, ModelOpt and msmodelslim name them
    names = ("q_scale", "k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.kv_cache_offset")
    change(quantized, lambda weights: weights.update({f"{ATTENTION}.{name}": torch.tensor(0.1) for name in names}))
    assert_numbers(quantized, plain)


# ---- broken


BROKEN: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("awq", lambda w: w.pop(f"{DOWN}.scales"), r"down_proj: scales is missing, although the file has qzeros"),
    ("awq", lambda w: w.update({f"{DOWN}.scales": w[f"{DOWN}.scales"][:2]}), "down_proj: qzeros for .* groups, scales"),
    ("awq", lambda w: w.update({f"{DOWN}.qweight": w[f"{DOWN}.qweight"].long()}), r"down_proj: words of torch\.int64"),
    ("awq", lambda w: w.update({"model.layers.0.mlp.x_proj.weight": torch.ones(4, 4)}), "has no such weight"),
    ("awq", lambda w: w.update({f"{DOWN}.qweight": w[f"{DOWN}.qweight"][:48]}), "down_proj: 64 output and 48 input"),
    ("gptq 4", lambda w: w.update({f"{DOWN}.g_idx": w[f"{DOWN}.g_idx"] + 9}), "down_proj: .* groups of scales"),
    ("gptq 4", lambda w: w.update({f"{DOWN}.g_idx": w[f"{DOWN}.g_idx"][:-1]}), "down_proj: .* input features, but"),
    ("gptq 4", lambda w: w.update({f"{DOWN}.bias": torch.zeros(63)}), r"down_proj: 63 and 64 output .* \[64, 96\]"),
    ("packed 4", lambda w: w.update({f"{DOWN}.weight_scale": torch.ones(64, 5)}), "cannot have 5 groups of scales"),
    ("packed 4", lambda w: w.pop(f"{DOWN}.weight_shape"), "down_proj: weight_shape is missing"),
    ("fp8 blocks", lambda w: w.update({f"{DOWN}.weight_scale_inv": torch.ones(9, 9)}), r"weight_scale_inv of \[9, 9\]"),
    ("fp8 blocks", lambda w: w.pop(f"{DOWN}.weight_scale_inv"), "down_proj: weight_scale is missing"),
    ("fp8 whole", lambda w: w.update({f"{DOWN}.weight_offset": torch.ones(1)}), "weight_offset is unknown"),
]


@pytest.mark.parametrize(("form", "do", "said"), BROKEN, ids=[f"{form}: {said}" for form, _, said in BROKEN])
def test_what_does_not_fit_is_named(tmp_path: Path, form: str, do: Callable[[Tensors], object], said: str) -> None:
    quantized, _ = written(tmp_path, FORMATS[form])
    change(quantized, do)
    with pytest.raises(ModelError, match=said) as caught:
        make_core(quantized, num_blocks=32)
    assert "\n" not in str(caught.value)


def test_experts_that_no_proof_asks_are_checked(tmp_path: Path) -> None:
    """The check at load reaches few experts, so others with infinities must be found separately."""
    quantized, _ = written(tmp_path, FORMATS["packed 4"], "mixtral")
    before = {name: each.clone() for name, each in load_file(quantized / FILE).items()}  # it may be mapped
    name = "model.layers.2.block_sparse_moe.experts.3.w1"
    change(quantized, lambda weights: weights[f"{name}.weight_scale"].fill_(float("inf")))
    with pytest.raises(ModelError, match=rf"model.safetensors: {name}: weight_scale has inf in 384 of 384 values"):
        make_core(quantized, num_blocks=32)
    save(before, quantized)
    change_config(quantized, intermediate_size=128)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj: 192 output .* config\.json requires \[4, 256, 64\]"):
        make_core(quantized, num_blocks=32)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, FORMATS["awq"])
    weights = load_file(quantized / FILE)
    (quantized / FILE).unlink()
    save_file(weights, quantized / "model-1.safetensors")
    save_file({f"{DOWN}.scales": weights[f"{DOWN}.scales"]}, quantized / "model-2.safetensors")
    places = dict.fromkeys(weights, "model-1.safetensors") | {f"{DOWN}.scales": "model-2.safetensors"}
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=r"model-2\.safetensors: .*scales is also in model-1\.safetensors; remove"):
        make_core(quantized, num_blocks=32)


def test_a_layer_without_a_weight_is_missed_by_name(tmp_path: Path) -> None:
    """The error names the missing tensor if the model is quantized at load."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    change(folder, lambda w: (w.pop(f"{DOWN}.weight"), w.update({f"{DOWN}.bias": torch.zeros(64)})))
    with pytest.raises(ModelError, match=rf"lack 1 weights, such as {DOWN}.weight"):
        make_core(folder, num_blocks=32, quantization="int8")
