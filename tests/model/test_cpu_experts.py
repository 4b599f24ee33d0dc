"""A block's experts in one call of the C kernels, against float64, separate experts, and any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pd_cluster.model.kernels.cpu.decoder_layers import ACTIVATIONS
from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.model.layers import expert_weights
from pd_cluster.model.layers.expert_weights import EachExpert, apply_experts
from pd_cluster.model.layers.gated_mlp import Activation
from pd_cluster.model.layers.ops import TorchOps
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.native import build
from pd_cluster.native.expert_products import ExpertProducts, experts_at_once
from pd_cluster.native.packed_products import bf16_linear, bf16_way, float32_linear, int8_linear, quantize_rows
from tests.model.test_company import SAMPLING, numbers, prompts_of
from tests.support.engines import assert_all_same

ANY_X86 = tuple(flag for flag in build.FLAGS if flag != "-march=native")
OTHERS = [pytest.param((*ANY_X86, f"-march={name}"), marks=pytest.mark.slow, id=name) for name in ("haswell", "x86-64")]
pytestmark = pytest.mark.usefixtures("kept_threads")
FORMS = ("float32", "bfloat16", "int8")
NUM_EXPERTS, TOP_K = 5, 3
# Inputs of the two products; not all are multiples of panels (16 outputs) or spans.
WIDTHS = [(1024, 40), (2048, 33), (4096, 24), (8192, 16), (40, 1024), (24, 8192)]
ROWS = (1, 2, 5, 6, 7, 32, 140)


class Block(NamedTuple):
    gate_ups: list[Linear]
    downs: list[Linear]
    weights: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # gate and up, their bias, down
    at_once: ExpertProducts

    def one_by_one(self, ops: CpuOps, activation: Activation, *given: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_ups.__getitem__, self.downs.__getitem__
        experts = EachExpert(gate_up, down, len(self.downs), lambda x: ops.gate(x, activation))
        return apply_experts(experts, *given)


def layer(form: str, weight: torch.Tensor, bias: torch.Tensor | None, flags: tuple[str, ...]) -> Linear | None:
    if form == "float32":
        return float32_linear(weight, bias, flags=flags)
    if form == "bfloat16":
        return bf16_linear(weight.bfloat16(), bias, flags=flags)
    return int8_linear(*quantize_rows(weight), bias, flags=flags)


def block_of(
    form: str,
    widths: tuple[int, int],
    activation: Activation = "silu",
    num_experts: int = NUM_EXPERTS,
    flags: tuple[str, ...] = build.FLAGS,
) -> Block:
    hidden_size, features = widths
    torch.manual_seed(hidden_size)
    weights = [
        (
            torch.randn(2 * features, hidden_size) / hidden_size**0.5,
            torch.randn(2 * features),
            torch.randn(hidden_size, features) / features**0.5,
        )
        for _ in range(num_experts)
    ]
    gate_ups = [layer(form, gate_up, bias, flags) for gate_up, bias, _ in weights]
    downs = [layer(form, down, None, flags) for *_, down in weights]
    if None in gate_ups:
        pytest.skip("the kernels cannot be compiled here")
    at_once = experts_at_once(gate_ups, downs, ACTIVATIONS[activation])
    assert at_once is not None
    return Block(gate_ups, downs, weights, at_once)


def rows_of(hidden_size: int, num_rows: int, num_experts: int = NUM_EXPERTS) -> tuple[torch.Tensor, ...]:
    chosen = torch.rand(num_rows, num_experts).topk(TOP_K, dim=-1).indices
    return torch.randn(num_rows, hidden_size), chosen, torch.rand(num_rows, TOP_K)


@pytest.mark.parametrize("flags", [pytest.param(build.FLAGS, id="this machine"), *OTHERS])
@pytest.mark.parametrize("form", FORMS)
def test_rows_have_the_same_bits_in_any_company(form: str, flags: tuple[str, ...]) -> None:
    """Rows have the same bits in any batch, with experts computed separately, and on one or two threads."""
    if bf16_way(flags) is None:
        pytest.skip("the kernels cannot be compiled here")
    ops = CpuOps(flags)
    for widths in WIDTHS if form == "float32" else WIDTHS[::3]:
        block = block_of(form, widths, flags=flags)
        for num_rows in ROWS:
            torch.set_num_threads(1)
            x, chosen, weights = rows_of(widths[0], num_rows)
            found = block.at_once(x, chosen, weights)
            assert torch.equal(found, block.one_by_one(ops, "silu", x, chosen, weights)), f"{widths}, {num_rows} rows"
            for row in {0, num_rows // 2, num_rows - 1}:
                alone = slice(row, row + 1)
                assert torch.equal(block.at_once(x[alone], chosen[alone], weights[alone]), found[alone])
            torch.set_num_threads(2)
            assert torch.equal(block.at_once(x, chosen, weights), found), f"{widths}, {num_rows} rows, two threads"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai"])
def test_against_float64(activation: Activation) -> None:
    for widths in WIDTHS:
        block = block_of("float32", widths, activation)
        x, chosen, weights = rows_of(widths[0], 20)
        expected = torch.zeros(x.shape, dtype=torch.float64)
        for row, experts in enumerate(chosen.tolist()):
            for expert, weight in zip(experts, weights[row].double(), strict=True):
                gate_up, bias, down = (each.double() for each in block.weights[expert])
                between = TorchOps().gate((gate_up @ x[row].double() + bias)[None], activation)[0]
                expected[row] += weight * (down @ between)
        difference = (block.at_once(x, chosen, weights) - expected).abs().max()
        assert difference <= 2e-6 * expected.abs().max()


def test_many_rows_and_many_experts(ops: CpuOps) -> None:
    """Covers more rows per expert, experts and memory than one pass computes, and out-of-range expert numbers."""
    for num_experts, num_rows, widths in ((4, 700, (64, 48)), (150, 90, (64, 48)), (6, 260, (2048, 700))):
        block = block_of("float32", widths, num_experts=num_experts)
        x, chosen, weights = rows_of(widths[0], num_rows, num_experts + 2)
        found = block.at_once(x, chosen, weights)
        assert torch.equal(found, block.one_by_one(ops, "silu", x, chosen, weights))
        only_beyond = torch.full_like(chosen, num_experts)
        assert not block.at_once(x, only_beyond, weights).any()
    assert block.at_once(x[:0], chosen[:0], weights[:0]).shape == (0, 2048)


@pytest.mark.usefixtures("one_thread")
def test_a_model_computes_them_so(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens equal generate()'s, also in chunks; logprobs have the same bits alone and in a batch."""
    if bf16_way() is None:
        pytest.skip("the kernels cannot be compiled here")
    folder, prompts = checkpoint("granitemoe"), prompts_of(1)
    monkeypatch.setattr(expert_weights, "apply_experts", lambda *_: pytest.fail("experts are computed one by one"))
    together = numbers(folder, prompts)
    assert numbers(folder, prompts, alone=True) == together
    chunked = numbers(folder, prompts, max_num_batched_tokens=24)
    for found in (together, chunked):
        tokens = [[token_id for token_id, _ in found[str(at)]] for at in range(len(prompts))]
        assert_all_same(folder, prompts, tokens, SAMPLING.max_tokens)
