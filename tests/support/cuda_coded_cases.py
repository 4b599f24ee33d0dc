"""Products with quantized weights in Triton, interpreted or on a GPU, against the dequantized numbers.

Weights have as many inputs as real ones but few outputs, because the interpreter is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from pd_cluster.model.kernels.cuda.experts.expert_matrices import BlockMatrices, ExpertMatrices
from pd_cluster.model.kernels.cuda.experts.grouped_experts import TritonGroupedExperts
from pd_cluster.model.kernels.cuda.linear import quantized_linear
from pd_cluster.model.kernels.cuda.linear.quantized_linear import (
    E2M1,
    E4M3,
    INT4,
    INT8,
    ROUNDED,
    QuantizedLinear,
    codes_of,
    decoded,
    linear_of,
)
from pd_cluster.model.kernels.cuda.ops import CudaOps
from pd_cluster.model.layers.expert_weights import ExpertLayers, ExpertStack, ExpertWeights
from pd_cluster.model.layers.gated_mlp import ExpertRouter, Experts, Routing
from pd_cluster.model.layers.linear_weight import PLAIN
from pd_cluster.model.layers.ops import TorchOps
from pd_cluster.model.layers.packed_linear import PlainLinear
from pd_cluster.model.layers.whole_rows import WholeRows
from pd_cluster.model.weights.bit_unpacking import E2M1_DOUBLED
from pd_cluster.model.weights.int8_linear import Int8Linear
from pd_cluster.model.weights.quantized_weight import CODED, CodedWeight, Int8Weight
from pd_cluster.model.weights.quantized_weight import INT8 as INT8_FORM
from tests.support.interpreted import choose_device

choose_device()

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
FP8 = torch.float8_e4m3fn


def signed(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8)


def unsigned(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, dtype=torch.int8)


def small_floats(*shape: int) -> torch.Tensor:
    found = torch.tensor(E2M1_DOUBLED, dtype=torch.int8)[torch.randint(0, 8, shape)]
    return found * (2 * torch.randint(0, 2, shape, dtype=torch.int8) - 1)


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def floats(*shape: int) -> torch.Tensor:
    """Returns random FP8 codes, subnormal ones included."""
    found = torch.randint(0, 127, shape, dtype=torch.uint8)
    return (found | torch.randint(0, 2, shape, dtype=torch.uint8) << 7).view(FP8)


def weight_of(codes: torch.Tensor, num_groups: int, has_zeros: bool, dtype: torch.dtype) -> CodedWeight:
    shape = (*codes.shape[:-1], num_groups)
    zeros = torch.randint(0, 16, shape).float() if has_zeros else torch.zeros(shape)
    return CodedWeight(codes, torch.rand(shape) + 0.1, zeros, torch.randn(codes.shape[:-1]).to(dtype), dtype)


@pytest.mark.parametrize(
    ("make", "num_inputs", "num_groups", "has_zeros", "kind", "dtype"),
    [
        (signed, 1024, 8, False, INT4, torch.bfloat16),
        (unsigned, 1024, 16, True, INT4, torch.float16),
        (unsigned, 96, 6, True, INT4, torch.float32),
        (small_floats, 1024, 32, False, E2M1, torch.bfloat16),
        (whole, 1000, 1, False, INT8, torch.float16),
        (whole, 1024, 16, True, INT8, torch.bfloat16),
        (floats, 1024, 8, False, E4M3, torch.bfloat16),
        (floats, 1100, 1, False, E4M3, torch.float32),
    ],
)
def test_codes_become_the_numbers_that_they_stand_for(
    make: Callable[..., torch.Tensor], num_inputs: int, num_groups: int, has_zeros: bool, kind: int, dtype: torch.dtype
) -> None:
    """Codes decode to exact bits; products equal those of the numbers, for one row (inputs split) and several tiles."""
    torch.manual_seed(num_inputs)
    weight = weight_of(make(20, num_inputs), num_groups, has_zeros, dtype)
    codes = codes_of(weight)
    assert codes is not None
    assert codes.kind == kind
    assert torch.equal(decoded(codes, dtype).view(BITS[dtype]), weight.matrix().view(BITS[dtype]))
    layer = QuantizedLinear(codes, weight.bias)
    for num_rows in (1, 19) if num_inputs < 1000 else (3,):
        x = torch.randn(num_rows, num_inputs).to(dtype)
        assert weight.bias is not None
        expected = x.double() @ weight.matrix().double().T + weight.bias.double()
        found = layer(x)
        assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
        assert torch.equal(layer(x), found), "the result depends on which program finishes last"


@pytest.mark.parametrize("rows", [70, 5])
def test_many_rows_are_multiplied_by_numbers_written_out(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "MANY_ROWS", 4 if rows == 5 else 1024)
    weight = weight_of(unsigned(24, 1024), 8, True, torch.bfloat16)
    layer, x = linear_of(weight), torch.randn(1, rows, 1024).bfloat16()
    assert layer is not None
    expected = torch.nn.functional.linear(x, weight.matrix(), weight.bias)
    if rows == 5:
        assert torch.equal(layer(x), expected)
    assert (layer(x).double() - expected.double()).abs().max() <= 8e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("inputs", "dtype"), [(None, torch.float32), ((0.03, 5.0), torch.float16), (None, torch.bfloat16)], ids=str
)
def test_products_of_integers_have_the_bits_of_the_reference(
    inputs: tuple[float, float] | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    given = None if inputs is None else torch.tensor(inputs, device="cpu")
    weight = Int8Weight(whole(72, 1100), torch.rand(72) / 100, torch.randn(72), dtype, given)
    layer = linear_of(weight)
    assert layer is not None
    x = (torch.randn(18, 1100) * torch.logspace(-3, 3, 18)[:, None]).to(dtype)
    x[3] = 0
    assert weight.bias is not None
    expected = Int8Linear(weight.codes.cpu(), weight.scales.cpu(), weight.bias.cpu(), given)
    for rows in (x, x[:1], x[5:7]):
        assert torch.equal(layer(rows).cpu(), expected(rows.cpu()))
    if inputs is None:
        x[1, 7], x[2, 0] = float("nan"), float("inf")
        assert layer(x).isnan().any(1).tolist() == [False, True, True, *[False] * 15]


def test_zero_points_that_are_not_whole_and_small_groups() -> None:
    weight = weight_of(signed(16, 256), 2, True, torch.float32)
    weight.zeros.add_(0.5)
    codes = codes_of(weight)
    assert codes is not None
    assert codes.kind == INT8
    assert torch.equal(decoded(codes, torch.float32), weight.matrix())
    assert codes_of(weight_of(signed(16, 96), 12, False, torch.float32)) is None
    assert codes_of(weight_of(torch.full((8, 128), -128, dtype=torch.int8), 1, False, torch.float32)) is not None


def test_a_row_has_the_same_bits_among_any_rows_when_asked() -> None:
    torch.manual_seed(4)
    layer = linear_of(weight_of(unsigned(24, 1024), 8, True, torch.bfloat16), is_deterministic=True)
    assert layer is not None
    rows = torch.randn(70, 1024).bfloat16()
    together = layer(rows)
    for first, last in ((0, 1), (3, 20), (64, 66)):
        assert torch.equal(layer(rows[first:last]), together[first:last])


class Halves:
    """One of two ranks that run alternately: it gathers the part that the other rank had in its last run."""

    size = 2

    def __init__(self, rank: int, parts: dict[int, torch.Tensor]) -> None:
        self.rank, self._parts = rank, parts

    def gather_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self._parts[self.rank] = x
        return torch.cat([self._parts.get(rank, torch.zeros_like(x)) for rank in range(self.size)], dim=-1)


def test_experts_of_two_ranks_have_the_bits_of_one() -> None:
    """The first rank has far larger features and, as the number of outputs is odd, one output less than the second."""
    torch.manual_seed(6)
    num_experts, hidden_size, features = 3, 33, 128
    gate_up, down = whole(num_experts, 2 * features, hidden_size), whole(num_experts, hidden_size, features)
    gate_up_scales, down_scales = torch.rand(num_experts, 2 * features) / 1000, torch.rand(num_experts, hidden_size)
    gate_up_scales[:, features : features + features // 2] *= 100  # the first rank's share of the up projection
    bias, router = torch.randn(num_experts, hidden_size), torch.randn(num_experts, hidden_size)

    def experts(outputs: slice, inner: slice, rows: WholeRows | None = None) -> TritonGroupedExperts:
        own = torch.arange(features)[inner]
        own = torch.cat((own, features + own))
        first = codes_of(Int8Weight(gate_up[:, own], gate_up_scales[:, own], None, torch.float32))
        second = codes_of(Int8Weight(down[:, outputs], down_scales[:, outputs], None, torch.float32))
        assert first is not None
        assert second is not None
        matrices = ExpertMatrices.of(first), ExpertMatrices.of(second, bias[:, outputs].contiguous())
        return TritonGroupedExperts(ExpertRouter(router, None, Routing(2)), BlockMatrices(*matrices, rows), "silu")

    x, parts = torch.randn(7, hidden_size), dict[int, torch.Tensor]()
    expected = experts(slice(None), slice(None))(x)
    ranks = []
    for rank, outputs in ((0, (0, 16)), (1, (16, 33))):
        rows: Any = WholeRows(Halves(rank, parts), outputs, hidden_size)
        ranks.append(experts(slice(*outputs), rows.part(features // 2), rows))
    ranks[0](x)  # only so that rank 1 can gather its part
    assert torch.equal(ranks[1](x) + ranks[0](x), expected)


@pytest.mark.parametrize(("kind", "num_rows"), [(INT4, 20), (E4M3, 1), (ROUNDED, 20)])
def test_experts_of_codes(kind: int, num_rows: int) -> None:
    """Compares with transformers' routing and with each expert's layers computed separately."""
    torch.manual_seed(5)
    config = MixtralConfig(hidden_size=128, intermediate_size=96, num_local_experts=5, num_experts_per_tok=2)
    block = MixtralSparseMoeBlock(config)
    block.gate.weight.data.normal_()
    router = ExpertRouter.of(block)

    def stack(num_outputs: int, num_inputs: int) -> ExpertStack:
        if kind == ROUNDED:
            parts = {"int8_codes": whole(5, num_outputs, num_inputs), "int8_scales": torch.rand(5, num_outputs) / 1000}
            return ExpertStack(INT8_FORM, parts, torch.float32)
        make, num_groups = (unsigned, num_inputs // 32) if kind == INT4 else (floats, 1)
        codes = make(5, num_outputs, num_inputs)
        scales = (torch.rand(5, num_outputs, num_groups) + 0.1) / 1000
        zeros = torch.randint(0, 16, scales.shape).float() if kind == INT4 else torch.zeros(scales.shape)
        return ExpertStack(CODED, {"codes": codes, "code_scales": scales, "code_zeros": zeros}, torch.float32)

    weights = ExpertWeights(stack(192, 128), stack(128, 96))
    x = torch.randn(num_rows, 128)
    found = CudaOps(lambda *_: torch.empty(0)).experts(router, weights, "silu")(x)
    if kind == ROUNDED:
        expected = Experts(router, ExpertLayers(weights), TorchOps(), "silu")
        expected.layers.gate_ups, expected.layers.downs = (
            [each.expert(i).reference() for i in range(5)] for each in (weights.gate_up, weights.down)
        )
    else:
        numbers = (
            ExpertStack(PLAIN, {"weight": s.whole().matrix()}, torch.float32) for s in (weights.gate_up, weights.down)
        )
        expected = Experts(router, ExpertLayers(ExpertWeights(*numbers)), TorchOps(), "silu")
        expected.router = PlainLinear(router.weight, None)
    tolerance = 2e-2 if kind == ROUNDED else 2e-5  # an activation may round to the neighbouring code
    assert (found - expected(x)).abs().max() <= tolerance * found.abs().max()
