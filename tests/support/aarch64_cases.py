"""Batch invariance of torch's plain linear layers on aarch64; run by scripts/aarch64_check.sh."""

from __future__ import annotations

import platform

import pytest
import torch

from pd_cluster.model.layers.packed_linear import PackedLinear, PlainLinear, make_linear

WIDTHS = (1024, 2048, 4096, 8192)
OUTPUTS = (1, 3, 64, 200, 1024)
NUM_ROWS = 70
COMPANY = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64)


def test_this_is_aarch64() -> None:
    assert platform.machine() == "aarch64"
    print(torch.__config__.show())


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_the_same_in_any_company(width: int, outputs: int) -> None:
    """A float32 linear layer gives a row the same bits alone, in any batch, and at another place in memory."""
    torch.manual_seed(width + outputs)
    torch.set_num_threads(1)
    weight, rows = torch.randn(outputs, width), torch.randn(NUM_ROWS, width)
    layer = make_linear(weight)
    assert isinstance(layer, PlainLinear)
    assert not isinstance(layer, PackedLinear)
    expected = layer(rows)
    differs = [n for n in COMPANY if not torch.equal(layer(rows[:n].clone()), expected[:n])]
    if not torch.equal(layer(rows[57:58].clone()), expected[57:58]):
        differs.append(-1)  # one row, copied to another place in memory
    exact = rows.double() @ weight.double().T
    assert (expected.double() - exact).abs().max() / exact.abs().max() < 1e-5
    assert differs == [], f"{width} inputs, {outputs} outputs: rows differ in batches of these sizes"
