"""Linear layers: packed or plain, the same products, for every number of rows."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pd_cluster.model.layers import packed_linear
from pd_cluster.model.layers.packed_linear import PackedLinear, PlainLinear, make_linear, packs, padded
from pd_cluster.native import build, float_products
from pd_cluster.native.packed_products import PackedProduct

SIZES = range(1, 4097)
packable = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def test_rows_are_padded_a_little_and_to_few_sizes() -> None:
    sizes = [padded(num_rows, 1 << 20) for num_rows in SIZES]
    assert all(num_rows <= size <= num_rows * 9 / 8 for num_rows, size in zip(SIZES, sizes, strict=True))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 90
    assert [padded(size, 1 << 20) for size in sizes] == sizes
    for most in (0, 1, 2, 3, 16):  # large weights are padded less
        assert all(0 <= padded(num_rows, most) - num_rows < max(1, most) for num_rows in SIZES)


@packable
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_is_the_plain_product(has_bias: bool) -> None:
    """Covers no rows, and batches of rows."""
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 32), torch.randn(48) if has_bias else None
    packed, plain = PackedLinear(weight, bias), PlainLinear(weight, bias)
    shapes = [(num_rows,) for num_rows in (1, 2, 7, 8, 9, 15, 17, 33, 129, 257)]
    for shape in [*shapes, (17, 5), (1, 19), (0,), (3, 0)]:
        x = torch.randn(*shape, 32)
        found = packed(x)
        assert found.is_contiguous()
        torch.testing.assert_close(found, plain(x), rtol=1e-5, atol=1e-5)


@packable
def test_a_product_that_costs_more_than_another_kernel_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "MOST_PADDED", 64 * 64)
    layer = PackedLinear(torch.randn(64, 64), None)
    monkeypatch.setattr(packed_linear, "pad", None)
    assert layer(torch.randn(1001, 64)).shape == (1001, 64)


@packable
@pytest.mark.parametrize("shape", [(192, 576), (48, 32), (1000, 33)])
def test_a_row_is_the_same_in_any_company(shape: tuple[int, int]) -> None:
    """Rows are equal bit for bit, so that an answer does not depend on the batch."""
    torch.manual_seed(3)
    layer, rows = PackedLinear(torch.randn(shape), None), torch.randn(300, shape[1])
    expected = layer(rows)
    for num_rows in (1, 2, 7, 8, 9, 15, 16, 17, 63, 100, 256):
        assert torch.equal(layer(rows[:num_rows].clone()), expected[:num_rows]), f"{num_rows} rows"


WIDE = """
import sys, torch
from pd_cluster.model.layers.packed_linear import PackedLinear
torch.manual_seed(3)
torch.set_num_threads(1)
for width in map(int, sys.argv[1:]):
    for outputs in (1, 3, 64, 200):
        layer, rows = PackedLinear(torch.randn(outputs, width), None), torch.randn(130, width)
        expected = layer(rows)
        for num_rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 100):
            assert torch.equal(layer(rows[:num_rows].clone()), expected[:num_rows]), (width, outputs, num_rows)
        assert torch.equal(layer(rows[77:78]), expected[77:78]), (width, outputs, "in another place")
"""


@packable
@pytest.mark.parametrize("isa", ["", pytest.param("AVX2", marks=pytest.mark.slow)])
def test_a_row_of_any_width_is_the_same_in_any_company(isa: str) -> None:
    """Covers single rows, and older instruction sets."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa} if isa else None
    widths = map(str, (512, 1000, 1024, 1025, 2048, 5120, 8192, 16384))
    done = subprocess.run([sys.executable, "-c", WIDE, *widths], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def has_avx512() -> bool:
    return "avx512f" in Path("/proc/cpuinfo").read_text("utf-8") and build.identity() != ""


@packable
@pytest.mark.skipif(not has_avx512(), reason="kernels for AVX-512")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 48), (64, 1000), (200, 1025), (65, 8192)])
def test_a_few_rows_have_the_bits_of_onednn(outputs: int, inputs: int, has_bias: bool) -> None:
    torch.manual_seed(inputs)
    layer = PackedLinear(torch.randn(outputs, inputs), torch.randn(outputs) if has_bias else None)
    assert layer.few is not None
    for num_rows in (*range(1, 20), 47, 95, 96):
        x = torch.randn(num_rows, inputs)
        assert torch.equal(layer.few(x), layer.by_onednn(x)), num_rows
    for wrong in (torch.randn(4, inputs, dtype=torch.float64), torch.randn(4, inputs - 1)):
        with pytest.raises(RuntimeError):
            layer(wrong)
    batches = torch.randn(3, 5, inputs)
    assert torch.equal(layer(batches), layer.by_onednn(batches))


@packable
@pytest.mark.skipif(not has_avx512(), reason="kernels for AVX-512")
def test_a_weight_whose_trial_fails_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_products, "NARROW_SPAN", 256)  # another order of additions than this oneDNN's
    layer, x = PackedLinear(torch.randn(64, 768), None), torch.randn(4, 768)
    assert layer.few is None
    assert torch.equal(layer(x), layer.by_onednn(x))


@packable
def test_another_order_of_sums_is_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Simulates another torch's oneDNN, which sums a single row's products in another order."""
    monkeypatch.setattr(packed_linear, "_tried_inputs", set())
    PackedLinear(torch.randn(8, 4100), None)
    assert not caplog.records
    monkeypatch.setattr(packed_linear, "_tried_inputs", set())
    monkeypatch.setattr(float_products, "few_rows", lambda *given: None)
    by_onednn = PackedLinear.by_onednn
    other = lambda self, x: by_onednn(self, x) * (1 + 1e-6 * (len(x) == 1))  # noqa: E731
    monkeypatch.setattr(PackedLinear, "by_onednn", other)
    PackedLinear(torch.randn(8, 4100), None)
    assert "computes other bits for 1 rows of 4100 inputs" in caplog.text


@packable
@pytest.mark.skipif(platform.machine() != "x86_64", reason="packed on x86-64 only")
def test_what_is_packed() -> None:
    assert packs(torch.empty(8, 8))
    own = PackedLinear if float_products.can_run() or not build.are_wanted() else PackedProduct  # with AVX2 alone
    assert isinstance(make_linear(torch.zeros(8, 8)), own)
    for other in (torch.empty(8, 8, dtype=torch.bfloat16), torch.empty(0, 8), torch.empty(8, 8, device="meta")):
        assert not packs(other)
