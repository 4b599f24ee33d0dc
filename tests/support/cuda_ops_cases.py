"""Compares kernels that work row by row, under Triton's interpreter, with TorchOps and transformers' modules.

On a GPU, if there is one: `python -m pytest tests/support/cuda_*_cases.py`.
"""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pd_cluster.model.kernels.cuda.attention.paged_attention import PagedKV
from pd_cluster.model.kernels.cuda.ops import CudaOps, prepare
from pd_cluster.model.kernels.cuda.sampling.argmax import argmax_rows
from pd_cluster.model.layers.gated_mlp import Activation
from pd_cluster.model.layers.ops import Heads, Norm, Rope, TorchOps
from pd_cluster.model.layers.packed_linear import PlainLinear
from pd_cluster.model.sampling.row_passes import peaks
from tests.support.interpreted import DTYPES, assert_like, choose_device, strided, whole_numbers
from tests.support.spread import spread

choose_device()

EPS = 1e-6
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GATED: tuple[Activation, ...] = ("silu", "gelu_tanh")  # activations for which torch has a function


OPS = CudaOps(lambda *_: torch.empty(0))  # its attention is not used


def check_norm(norm: Norm, module: torch.nn.Module, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Checks that the result is exact for rows whose sum of squares is exact. Returns these rows."""
    num_features = len(norm.weight)
    whole, x = whole_numbers(num_rows, num_features).to(dtype), torch.randn(num_rows, num_features).to(dtype)
    if dtype != torch.float32:
        assert torch.equal(OPS.norm(whole, norm), module(whole))
    for rows in (whole, x):
        assert_like(OPS.norm(rows, norm), module(rows))
    return whole


@pytest.mark.parametrize(("dtype", "num_features"), spread(DTYPES, [1, 64, 896, 5120, 96]))
def test_norm_rounds_as_llama_does(dtype: torch.dtype, num_features: int) -> None:
    torch.manual_seed(num_features)
    module = LlamaRMSNorm(num_features, EPS).to(dtype)
    module.weight.data = (torch.rand(num_features) + 0.5).to(dtype)
    check_norm(Norm(module.weight.data, EPS), module, 3, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_a_wide_weight_rounds_as_gemma_does(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module = Gemma2RMSNorm(2304, EPS).to(dtype)
    module.weight.data = torch.randn(2304).to(dtype) * 0.3
    norm = Norm(1.0 + module.weight.data.float(), EPS)
    whole = check_norm(norm, module, 2, dtype)
    if dtype != torch.float32:
        assert not torch.equal(OPS.norm(whole, Norm(norm.weight.to(dtype), EPS)), module(whole))


@pytest.mark.parametrize(("dtype", "num_rows", "num_features"), spread(DTYPES, [(1, 896), (5, 96), (2, 8500)]))
def test_add_norm_adds_in_place_in_the_own_dtype(dtype: torch.dtype, num_rows: int, num_features: int) -> None:
    torch.manual_seed(2)
    x, delta = (strided(torch.randn(num_rows, num_features).to(dtype)) for _ in range(2))
    module = LlamaRMSNorm(num_features, EPS).to(dtype)
    expected_sum, before = x + delta, delta.clone()
    normed = OPS.add_norm(x, delta, Norm(module.weight.data, EPS))
    assert torch.equal(x, expected_sum)
    assert torch.equal(delta, before)
    assert_like(normed, module(expected_sum))
    around = x._base
    assert around is not None
    assert around.isnan().sum() == 32 * num_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_limited_gate_is_that_of_gpt_oss(dtype: torch.dtype) -> None:
    """Covers values on both sides of each limit. transformers also rounds before its first product."""
    torch.manual_seed(4)
    config = GptOssConfig(hidden_size=8, intermediate_size=200, num_local_experts=1, num_experts_per_tok=1)
    gate, up = ((torch.randn(4, 200) * 8).to(dtype) for _ in range(2))
    exact = GptOssExperts(config)._apply_gate(torch.stack((gate, up), dim=-1).flatten(1).double())
    actual = OPS.gate(torch.cat((gate, up), dim=-1), "swigluoai")
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    assert (actual.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotations_by_wide_tables_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    angles = torch.rand(3, 8) * 6
    angles = torch.cat((angles, angles), dim=-1)
    rope, qkv = Rope(angles.cos(), angles.sin()), torch.randn(3, 4 * 16).to(dtype)
    keys, values = (torch.zeros(1, 4, 1, 16, dtype=dtype) for _ in range(2))
    query = prepare(Heads(0, 2, 1, 16, 1.0), qkv, rope, PagedKV(keys, values), torch.arange(3))
    heads = qkv.double().view(3, 4, 16)[:, :3]
    left, right = heads.chunk(2, dim=-1)
    turned = heads * rope.cos[:, None] + torch.cat((-right, left), dim=-1) * rope.sin[:, None]
    expected = turned.to(dtype)
    assert ((query != expected[:, :2]).sum() + (keys[0, :3] != expected[:, 2:]).sum()) <= 2, "float32's own rounding"


@pytest.mark.parametrize(
    ("activation", "dtype", "num_rows", "num_features"),
    spread([(each, dtype) for each in GATED for dtype in DTYPES], [(1, 1), (1, 4864), (4, 200), (1, 4864)]),
)
def test_gate_rounds_before_the_product(
    activation: Activation, dtype: torch.dtype, num_rows: int, num_features: int
) -> None:
    """torch's GELU loses all digits where 1 + tanh is nearly 0; there the kernel is compared only with float64."""
    torch.manual_seed(3)
    x = strided((torch.randn(num_rows, 2 * num_features) * 3).to(dtype))
    function = ACT2FN["silu" if activation == "silu" else "gelu_pytorch_tanh"]
    gate, up = x.chunk(2, dim=-1)
    actual = OPS.gate(x, activation)
    exponent = gate.double()
    if activation == "gelu_tanh":
        exponent = (exponent + 0.044715 * exponent**3) * (8 / math.pi) ** 0.5
    assert_like(actual, (gate.double() * exponent.sigmoid()).to(dtype) * up)
    plain = (gate > -1) | torch.tensor(activation == "silu")
    assert_like(torch.where(plain, actual, 0), torch.where(plain, function(gate) * up, 0))


def test_gate_of_the_far_ends() -> None:
    x = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for activation in ACTIVATIONS:
        actual, expected = OPS.gate(x, activation), TorchOps().gate(x, activation)
        assert torch.allclose(actual, expected, equal_nan=True, atol=1e-37)


@pytest.mark.parametrize(
    ("dtype", "activation", "num_rows", "num_inputs", "num_features"),
    spread(
        [torch.float16, torch.bfloat16],
        [("silu", 1, 1024, 70), ("silu", 17, 96, 64), ("gelu_tanh", 64, 200, 130), ("swigluoai", 40, 64, 3)],
    ),
)
def test_few_rows_through_both_halves_of_a_gate(
    activation: Activation, dtype: torch.dtype, num_rows: int, num_inputs: int, num_features: int
) -> None:
    """Products of whole numbers are exact, so only the gate rounds, as it does when computed separately."""
    torch.manual_seed(6)
    ops = CudaOps(lambda *_: torch.empty(0), speedups=["skinny-gate"])
    x = torch.randint(-2, 3, (num_rows, num_inputs)).to(dtype)
    weight, bias = torch.randint(-1, 2, (2 * num_features, num_inputs)).to(dtype), torch.arange(2.0 * num_features)
    for has_bias in (False, True):
        layer = PlainLinear(weight, (bias % 7).to(dtype) if has_bias else None)
        few = ops.few_rows_gate(layer, activation)
        assert few is not None
        sums = x.float() @ weight.float().T
        gate_up = (sums + layer.bias.float() if layer.bias is not None else sums).to(dtype)
        assert_like(few(x), ops.gate(gate_up, activation))  # compiled kernels may fuse different multiply-adds
    random = torch.randn(num_rows, num_inputs).to(dtype)
    real = PlainLinear((torch.randn(2 * num_features, num_inputs) / num_inputs**0.5).to(dtype), None)
    few = ops.few_rows_gate(real, activation)
    assert few is not None
    exact = ops.gate((random.double() @ real.weight.double().T).float(), activation)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (few(random).float() - exact).abs().max() <= tolerance * exact.abs().max()


def test_gates_that_are_computed_as_before() -> None:
    """The unfused path serves without the speed-up, in float32, and after layers that are not plain products."""
    ops, layer = CudaOps(lambda *_: torch.empty(0), speedups=["skinny-gate"]), PlainLinear(torch.ones(4, 8), None)
    assert ops.few_rows_gate(layer, "silu") is None
    assert ops.few_rows_gate(lambda x: x, "silu") is None
    assert OPS.few_rows_gate(PlainLinear(torch.ones(4, 8, dtype=torch.float16), None), "silu") is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    norm = Norm(torch.ones(8, dtype=dtype), EPS)
    assert OPS.norm(torch.empty(0, 8, dtype=dtype), norm).shape == (0, 8)
    assert OPS.gate(torch.empty(0, 8, dtype=dtype), "silu").shape == (0, 4)


@pytest.mark.parametrize(
    ("dtype", "num_rows", "vocab_size"), spread(DTYPES, [(1, 7), (2, 5000), (9, 9001), (17, 1024)])
)
def test_argmax_finds_the_lowest_of_equals(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    """Draws from few values, so that most rows have several equal maxima in different parts of the vocabulary."""
    torch.manual_seed(num_rows)
    logits = strided(torch.randint(-90, -85, (num_rows, vocab_size)).to(dtype))
    logits[0] = torch.randn(vocab_size).to(dtype)
    token_ids, best, irregular = argmax_rows(logits)
    assert token_ids.tolist() == logits.float().cpu().numpy().argmax(-1).tolist()
    assert torch.equal(best, logits.float().amax(-1))
    assert (token_ids.dtype, best.dtype, irregular.tolist()) == (torch.int64, torch.float32, [False] * num_rows)


def test_argmax_takes_what_is_not_finite_as_the_sampler_does() -> None:
    nan, inf = float("nan"), float("inf")
    torch.manual_seed(6)
    logits = torch.randn(10, 3000)
    logits[0, 2999] = nan
    logits[1] = nan
    logits[2] = -inf
    logits[3, [4, 2047]] = inf
    logits[4, 5], logits[4, 6] = nan, inf
    logits[5, :2999] = -inf
    logits[6, 1000:] = nan
    logits[7, 10], logits[7, 5] = torch.finfo(torch.float32).max, inf
    logits[8, ::2], logits[8, 1::2] = nan, -inf
    actual = argmax_rows(logits)
    mended = logits.clone()
    token_ids, best = peaks(mended)
    assert actual.token_ids.tolist() == token_ids.tolist()
    assert np.array_equal(actual.logits.cpu().numpy(), best)
    assert actual.irregular.tolist() == [True, True, True, True, True, False, True, True, True, False]
