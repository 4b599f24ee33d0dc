"""Linear layers: packed or plain, the same products, for every number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_cluster.model import linear
from pd_cluster.model.cpu import processor
from pd_cluster.model.linear import PackedLinear, PlainLinear, make_linear, packs, padded

SIZES = range(1, 4097)
packable = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def test_rows_are_padded_a_little_and_to_few_sizes() -> None:
    sizes = [padded(num_rows, 1 << 20) for num_rows in SIZES]
    assert all(num_rows <= size <= num_rows * 9 / 8 for num_rows, size in zip(SIZES, sizes, strict=True))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 90
    assert [padded(size, 1 << 20) for size in sizes] == sizes


@pytest.mark.parametrize("most", [0, 1, 2, 3, 16])
def test_large_weights_are_padded_less(most: int) -> None:
    assert all(0 <= padded(num_rows, most) - num_rows < max(1, most) for num_rows in SIZES)


@packable
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 15, 17, 31, 33, 100, 129, 257])
def test_packed_is_the_plain_product(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    weight, bias = torch.randn(48, 32), torch.randn(48) if has_bias else None
    x = torch.randn(num_rows, 32)
    found = PackedLinear(weight, bias)(x)
    assert found.is_contiguous()
    torch.testing.assert_close(found, PlainLinear(weight, bias)(x), rtol=1e-5, atol=1e-5)


@packable
def test_a_product_that_costs_more_than_another_kernel_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MOST_PADDED", 64 * 64)
    layer = PackedLinear(torch.randn(64, 64), None)
    monkeypatch.setattr(linear, "pad", None)
    assert layer(torch.randn(1001, 64)).shape == (1001, 64)


@packable
@pytest.mark.parametrize(("vendor", "packs_small"), [("GenuineIntel", False), ("AuthenticAMD", True)])
def test_small_weights_stay_plain_on_intel(
    vendor: str, packs_small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: x\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    processor.is_intel.cache_clear()
    try:
        assert packs(torch.empty(512, 512)) == packs_small
        assert packs(torch.empty(1024, 512))
        assert not packs(torch.empty(1024, 512, dtype=torch.bfloat16))
        assert isinstance(make_linear(torch.zeros(8, 8)), PackedLinear if packs_small else PlainLinear)
    finally:
        processor.is_intel.cache_clear()


def test_a_system_that_does_not_say_is_not_intel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "absent")
    processor.is_intel.cache_clear()
    try:
        assert not processor.is_intel()
    finally:
        processor.is_intel.cache_clear()
