"""Quantized models on the NPU path, with torch-npu's own operator schemas. Run by tests/model/test_npu.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pd_cluster.model.kernels.npu.quantized_linear import NpuInt8Linear, NpuQuantizedLinear, linear_of
from pd_cluster.model.weights.quantized_weight import CodedWeight, Int8Weight
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate
from tests.support.npu_cases import GREEDY, SIZES, calls, core_of
from tests.support.quantized import FORMATS, INT8_FORMATS, rewritten
from tests.support.spread import spread
from tests.support.usual import slow_but

__all__ = ["calls"]  # a fixture

PROMPTS = [[5, 9, 2, 77], [3] * 150, [8, 1, 60, 33, 2, 9]]
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
slow = pytest.mark.slow


def make_quantized(
    tmp_path: Path,
    form: str,
    architecture: str = "llama",
    least_group: int = 64,
    change: Callable[[Path], Path] = lambda plain: plain,
) -> tuple[Path, Path]:
    """`change`: modifies the plain weights before they are quantized."""
    plain = change(make_checkpoint(tmp_path / "given", architecture, **SIZES, **WIDE))
    written = (INT8_FORMATS | FORMATS)[form]
    if written.group == 16:  # the operators need multiples of 32
        written = replace(written, group=least_group)
    return rewritten(plain, tmp_path, written)


@pytest.mark.parametrize(
    "form",
    slow_but(["msmodelslim W4A16, pairs"], ["msmodelslim W8A16", "msmodelslim W4A16, pairs", "awq"]),
)
def test_coded_weights_alone_are_exact(form: str, tmp_path: Path, calls: dict[str, int]) -> None:
    """With quantized weights only, the tokens are those of transformers with the dequantized weights."""
    quantized, plain = make_quantized(tmp_path, form)
    core, runner = core_of(quantized, enforce_eager=True)
    assert "NPU kernels" in runner.model.kernels
    assert_all_same(plain, PROMPTS, generate(core, PROMPTS, GREEDY), GREEDY.max_tokens)
    assert calls["npu_weight_quant_batchmatmul"] > 0


@pytest.mark.parametrize("form", slow_but(["msmodelslim"], ["msmodelslim", "msmodelslim static"]))
def test_int8_activations_give_the_tokens_of_a_cpu(form: str, tmp_path: Path, calls: dict[str, int]) -> None:
    quantized, _ = make_quantized(tmp_path, form)
    core, _ = core_of(quantized)  # decode steps run as graphs
    found = generate(core, PROMPTS, GREEDY)
    assert calls["npu_quant_matmul"] > 0
    assert ("npu_quantize" if "static" in form else "npu_dynamic_quant") in calls
    eager, _ = core_of(quantized, device="cpu", block_size=16)
    expected = generate(eager, PROMPTS, GREEDY)
    assert found == expected


@slow
@pytest.mark.parametrize(
    ("form", "operator"), [("msmodelslim", "npu_dynamic_quant"), ("msmodelslim W8A16", "npu_grouped_matmul")]
)
def test_coded_experts(form: str, operator: str, tmp_path: Path, calls: dict[str, int]) -> None:
    quantized, _ = make_quantized(tmp_path, form, "mixtral")
    core, _ = core_of(quantized, enforce_eager=True)
    found = generate(core, PROMPTS, GREEDY)
    assert calls[operator] > 0
    cpu, _ = core_of(quantized, device="cpu", block_size=16)
    expected = generate(cpu, PROMPTS, GREEDY)
    assert found == expected


# ---- layers of real widths


def coded(num_outputs: int, num_inputs: int, bits: int, group: int, has_zeros: bool, dtype: torch.dtype) -> CodedWeight:
    torch.manual_seed(num_outputs + bits)
    num_groups = num_inputs // group if group > 0 else 1
    low = 0 if has_zeros else -(1 << bits - 1)
    codes = torch.randint(low, low + (1 << bits), (num_outputs, num_inputs), dtype=torch.int16)
    scales = torch.rand(num_outputs, num_groups).mul_(0.02).add_(0.001)
    zeros = torch.randint(0, 1 << bits, (num_outputs, num_groups)).float() if has_zeros else torch.zeros_like(scales)
    given = codes.to(torch.int8 if bits == 4 or not has_zeros else torch.uint8)
    return CodedWeight(given, scales, zeros, torch.randn(num_outputs).to(dtype), dtype)


@pytest.mark.parametrize(
    ("dtype", "bits", "group", "has_zeros"),
    spread([torch.float16, torch.bfloat16], [(8, -1, False), (8, -1, True), (4, 128, False), (4, 32, True)]),
)
def test_a_wide_layer_of_codes(dtype: torch.dtype, bits: int, group: int, has_zeros: bool) -> None:
    weight = coded(1024, 2048, bits, group, has_zeros, dtype)
    layer = linear_of(weight)
    assert isinstance(layer, NpuQuantizedLinear)
    x = torch.randn(3, 2048).to(dtype)
    codes = weight.codes.double().view(1024, weight.scales.shape[1], -1) - weight.zeros.double().unsqueeze(-1)
    numbers = (codes * weight.scales.double().unsqueeze(-1)).view(1024, -1)
    exact = x.double() @ numbers.T + weight.bias.double()
    error = (layer(x).double() - exact).abs().max() / exact.abs().max()
    assert error < (0.004 if dtype == torch.float16 else 0.02)
    assert torch.equal(layer(x[:1]), layer(x)[:1])


@pytest.mark.parametrize(("dtype", "is_static"), [(torch.float16, False), (torch.bfloat16, True)])
def test_a_wide_layer_of_int8(dtype: torch.dtype, is_static: bool) -> None:
    torch.manual_seed(4)
    codes = torch.randint(-127, 128, (1024, 4096), dtype=torch.int8)
    inputs = torch.tensor([0.03, -5.0]) if is_static else None
    weight = Int8Weight(codes, torch.rand(1024) * 0.01, torch.randn(1024).to(dtype), dtype, inputs)
    layer = linear_of(weight)
    assert isinstance(layer, NpuInt8Linear)
    x = torch.randn(3, 4096).to(dtype)
    expected = weight.reference()(x).double()
    assert (layer(x).double() - expected).abs().max() / expected.abs().max() < 0.01
    assert torch.equal(layer(x[:1]), layer(x)[:1])


def test_weights_beyond_the_operators_bounds_become_numbers() -> None:
    assert linear_of(coded(64, 96, 4, 16, True, torch.bfloat16)) is None, "groups of 16 are too small"
    assert linear_of(coded(70_000, 32, 8, -1, False, torch.bfloat16)) is None, "too many outputs"
    floats = coded(64, 64, 8, -1, False, torch.bfloat16)
    as_fp8 = CodedWeight(floats.codes.to(torch.float8_e4m3fn), floats.scales, floats.zeros, None, torch.bfloat16)
    assert linear_of(as_fp8) is None
