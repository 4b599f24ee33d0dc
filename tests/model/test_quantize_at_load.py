"""--quantization: it must fit the folder; plain weights are quantized when they are read."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.model.loading.model_loader import load_model
from pd_cluster.model.weights import quantized_weight as quantized_weight
from pd_cluster.model.weights.load_time_quantization import encoded
from pd_cluster.model.weights.quantized_lm_head import quantize_head
from pd_cluster.model.weights.quantized_weight import CODED, INT8, W4A8
from pd_cluster.native.packed_products import PackedProduct, int8_linear, quantize_rows
from pd_cluster.numerics import LONG_SPANS, WHOLE_ROWS
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.quantized import FILE, FORMATS, LINEAR, Format, rewritten
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=10, temperature=0.0)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]


HEAD = re.compile(r"lm_head\.weight")
SAME = [("wint8", "int8_wo"), ("wint4", "int4_wo")]


def with_numbers_of(folder: Path, scheme: str, chosen: re.Pattern[str] = LINEAR) -> None:
    """Replaces a folder's plain weights by a scheme's dequantized weights."""
    weights = load_file(folder / FILE)
    for name, tensor in weights.items():
        if chosen.fullmatch(name):
            weights[name] = CODED.weight.of(encoded(tensor, scheme), torch.float32).matrix()
    save_file(weights, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize(
    ("chosen", "scheme", "num_ranks"),
    [
        *(("quantization", "int8_wo", 2), ("quantization", "int4_wo", 1), ("quantization", "fp8", 2)),
        *(("quantize_head", "int8_wo", 1), ("quantize_head", "int4_wo", 2)),
        pytest.param("quantize_head", "fp8", 1, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_quantized_numbers(tmp_path: Path, chosen: str, scheme: str, num_ranks: int) -> None:
    """Scales are computed before weights are divided, so two ranks have the scales of one."""
    original, plain = (make_checkpoint(tmp_path / name, "qwen2") for name in ("original", "plain"))
    with_numbers_of(plain, scheme, LINEAR if chosen == "quantization" else HEAD)
    settings: dict[str, Any] = {chosen: scheme}
    with ranks(original, num_ranks, num_blocks=64, **settings) as core:
        outputs = generate(core, PROMPTS, GREEDY)
    assert_all_same(plain, PROMPTS, outputs, GREEDY.max_tokens)


def test_schemes_are_in_the_numerics(tmp_path: Path) -> None:
    """Each scheme has its own name, also of output layers in coded folders and in bfloat16; synonyms share one."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    coded, _ = rewritten(folder, tmp_path, FORMATS["awq"])
    cases: list[tuple[Path, dict[str, Any], dict[str, Any], tuple[str, str, str] | None]] = [
        (folder, {}, {"quantization": "int8"}, (called("quantization"), "none", f"int8, {WHOLE_ROWS}")),
        (
            folder,
            {"quantization": "int4_wo"},
            {"quantization": "w4a8"},
            (called("quantization"), f"int4_wo, {LONG_SPANS}", f"w4a8, {WHOLE_ROWS}"),
        ),
        *((folder, {"quantization": one}, {"quantization": same}, None) for one, same in SAME),
        (coded, {}, {"quantize_head": "int8"}, (called("quantize_head"), "none", "int8")),
        (folder, {"dtype": "bfloat16"}, {"quantize_head": "int8"}, (called("quantize_head"), "none", "int8")),
    ]
    for model, settings, changes, difference in cases:
        cores = [make_core(model, num_blocks=64, **each) for each in (settings, settings | changes)]
        assert len(generate(cores[1], PROMPTS, GREEDY)[2]) == GREEDY.max_tokens
        one, other = (core.runner.numerics for core in cores)  # type: ignore[attr-defined]
        assert one.difference(other) == difference
        assert (one.digest == other.digest) == (difference is None)


def test_rows_of_w4a8_are_apart(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    settings: dict[str, Any] = {"quantization": "w4a8", "quantize_head": "w4a8", "num_blocks": 64}
    together = generate(make_core(folder, max_num_batched_tokens=8, **settings), PROMPTS, GREEDY)
    core = make_core(folder, **settings)
    assert [generate(core, [prompt], GREEDY)[0] for prompt in PROMPTS] == together
    with ranks(folder, 2, **settings) as two:
        assert generate(two, PROMPTS, GREEDY) == together


@pytest.mark.parametrize("inputs", [1024, 8192, 96])
def test_products_of_w4a8_are_exact(inputs: int) -> None:
    """Kernels' and reference's sums equal 64-bit integer sums for each group."""
    torch.manual_seed(inputs)
    parts = encoded(torch.randn(130, inputs), "w4a8")
    weight = W4A8.weight.of({**parts, "bias": torch.randn(130)}, torch.float32)
    x = torch.randn(70, inputs)
    codes, steps = quantize_rows(x)
    group = inputs // parts["w4a8_scales"].shape[1]
    sums = torch.einsum(
        "rgk,ngk->rng", codes.view(70, -1, group).double(), parts["w4a8_codes"].view(130, -1, group).double()
    )
    expected = (sums * parts["w4a8_scales"].double()).sum(-1) * steps.double() + weight.bias
    for layer in (weight.linear(), weight.reference()):
        found = layer(x)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert all(torch.equal(layer(x[row : row + 1]), found[row : row + 1]) for row in (0, 69))


def test_w4a8_is_refused_where_there_are_no_kernels(tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path / "model", "llama"))
    for name in ("quantization", "quantize_head"):
        said = f"--{name.replace('_', '-')} w4a8: only CPUs multiply 4-bit weights"
        settings: dict[str, Any] = {name: "w4a8"}
        with pytest.raises(ConfigError, match=said):
            load_model(Checkpoint.of(EngineConfig(model=folder, **settings)), "float32", Device("cuda", 0))


@pytest.mark.parametrize("architecture", ["gemma", "gpt2"])
def test_an_output_layer_that_is_the_embedding(tmp_path: Path, architecture: str) -> None:
    """Only the output layer is quantized, so tokens equal those of an untied model. gpt2 is not fused."""
    tied, apart = (make_checkpoint(tmp_path / name, architecture) for name in ("tied", "apart"))
    weights = load_file(apart / FILE)
    (embedding,) = (name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight")))
    save_file({**weights, "lm_head.weight": weights[embedding].clone()}, apart / FILE, {"format": "pt"})
    with_numbers_of(apart, "int4_wo", HEAD)
    config = json.loads((apart / "config.json").read_text("utf-8"))
    (apart / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), "utf-8")
    outputs = generate(make_core(tied, quantize_head="wint4", num_blocks=64), PROMPTS, GREEDY)
    assert_all_same(apart, PROMPTS, outputs, GREEDY.max_tokens)


def test_a_model_without_a_plain_output_layer() -> None:
    class Headless(torch.nn.Module):
        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(
        ModelError, match="--quantize-head int8: Headless has no plain output layer; remove the setting"
    ):
        quantize_head(Headless(), "int8")


@pytest.mark.parametrize(("scheme", "worst"), [("int8_wo", 0.005), ("int4_wo", 0.08), ("fp8", 0.04)])
def test_errors_are_those_of_the_number_of_bits(scheme: str, worst: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 1024)
    weight[3] = 0
    found = CODED.weight.of(encoded(weight, scheme), torch.float32).matrix()
    error = (found - weight).abs().amax(-1) / weight.abs().amax(-1).clamp(min=1e-9)
    assert 0 < float(error.max()) < worst
    assert not found[3].any()


@pytest.mark.parametrize("scheme", ["int8", "int8_wo", "int4_wo", "fp8"])
def test_a_model_in_bfloat16_keeps_the_codes(scheme: str) -> None:
    """Products use the exact codes; only activations are rounded, to bfloat16 or to codes."""
    torch.manual_seed(0)
    parts = encoded(torch.randn(48, 1024), scheme)
    weight = (INT8 if scheme == "int8" else CODED).weight.of(parts, torch.bfloat16)
    numbers = (INT8 if scheme == "int8" else CODED).weight.of(parts, torch.float32).matrix()
    x = torch.randn(20, 1024)
    layer = weight.linear()
    assert isinstance(layer, PackedProduct)
    if scheme == "int8":
        codes, scales = quantize_rows(x)
        expected = (codes * scales).double() @ numbers.double().T
    else:
        expected = x.bfloat16().double() @ numbers.double().T
    error = (layer(x) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5
    assert torch.equal(layer(x.bfloat16()), layer(x.bfloat16().float()).bfloat16())


def test_codes_and_zeros_of_extremes() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, 0.0] * 32, [0.0] * 128])
    four = encoded(weight, "int4_wo")["codes"]
    assert int(four.min()) in (-8, -7)  # -7.5 steps round either way
    assert int(four.max()) == 7
    eight = encoded(weight, "int8")
    assert INT8.weight.of(eight, torch.float32).matrix()[0, :2].tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("wanted", "form", "said"),
    [
        ("gptq", "awq", r"--quantization gptq: .*config\.json: quantization_config says awq; leave it out"),
        ("smoothquant", "packed 8", r"--quantization smoothquant: .* says compressed-tensors \(int8\)"),
        ("awq", None, "--quantization awq: .* has plain weights; give a folder that is quantized so, or one of fp8"),
    ],
)
def test_what_does_not_fit_the_folder_is_refused(tmp_path: Path, wanted: str, form: str | None, said: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    if form is not None:
        folder, _ = rewritten(folder, tmp_path, FORMATS[form])
    with pytest.raises(ModelError, match=said):
        make_core(folder, quantization=wanted, num_blocks=32)


@pytest.mark.parametrize(
    ("wanted", "form"),
    [
        ("gptq", "gptq 4"),
        ("fp8", "fp8 whole"),
        ("compressed-tensors", "packed 4"),
        ("fp8", "fp8 of compressed-tensors"),
    ],
)
def test_what_fits_the_folder_changes_nothing(tmp_path: Path, wanted: str, form: str) -> None:
    found: Format = FORMATS[form]
    folder, _ = rewritten(make_checkpoint(tmp_path / "model", "llama"), tmp_path, found)
    with_it, without = make_core(folder, quantization=wanted, num_blocks=64), make_core(folder, num_blocks=64)
    assert generate(with_it, PROMPTS, GREEDY) == generate(without, PROMPTS, GREEDY)


def test_without_a_layer_that_could_be(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--quantization int8: .* has no linear layer that could be quantized"):
        make_core(make_checkpoint(tmp_path / "model", "gpt_neox"), quantization="int8", num_blocks=32)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model whose weights are so large that a change of one code grows from layer to layer."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    changes = {**sizes, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.05}
    return make_checkpoint(tmp_path_factory.mktemp("deep"), "llama", **changes)


def test_codes_that_fall_to_the_other_side_are_no_fault(deep: Path) -> None:
    """Fused layers may round an activation to the adjacent code; the check at load accepts that."""
    (found,) = generate(make_core(deep, quantization="int8", num_blocks=128), [PROMPTS[1]], GREEDY)
    assert len(found) == GREEDY.max_tokens


def test_wrong_products_of_codes_are_a_fault(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load detects products whose outputs are shifted by one row."""

    def shifted(codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return int8_linear(codes.roll(1, 0), scales, bias)

    monkeypatch.setattr(quantized_weight, "int8_linear", shifted)
    with pytest.raises(ModelError, match="fusing the layers changed the logits"):
        make_core(deep, quantization="int8", num_blocks=128)
