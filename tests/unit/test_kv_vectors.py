"""Quantized vectors in a pool: bytes, errors, and non-finite values."""

from __future__ import annotations

import math

import pytest
import torch

from pd_cluster.errors import ConfigError, LinkError
from pd_cluster.kv.kv_layout import CODE_BITS, KVLayout, can_hold, keys_and_values, stored_width
from pd_cluster.kv.kv_pool import KVPool, probe_content
from pd_cluster.kv.kv_vectors import MOST, SMALLEST, convert, decode, encode
from pd_cluster.kv.pool_compatibility import check_pair
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.model.language_model.cache_declaration import LayerCache, layout_of
from pd_cluster.wire import KVPiece

CODED = sorted(CODE_BITS)
LAYOUT = KVLayout(3, 4, keys_and_values(32), 4, "float32")


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("width", [2, 16, 80, 256])
def test_numbers_come_back_within_half_a_step(dtype: str, width: int) -> None:
    x = torch.randn(500, width, generator=torch.Generator().manual_seed(width)) * torch.logspace(-25, 25, 500)[:, None]
    stored = encode(x, dtype)
    assert stored.dtype == torch.uint8
    assert stored.shape == (500, stored_width(dtype, width))
    step = x.abs().amax(-1, keepdim=True) / MOST[dtype]
    if dtype == "fp8_e4m3":  # three mantissa bits, steps of at least 2^-9
        step = torch.maximum(x.abs() / 8, step * 2**-9)
    assert ((decode(stored, dtype) - x).abs() <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", CODED)
def test_a_vector_depends_on_itself_alone(dtype: str) -> None:
    """A vector's codes do not depend on other vectors; zeros stay zero; a vector with NaN or infinity becomes NaN."""
    x = torch.randn(3, 5, 2, 32)
    assert torch.equal(encode(x, dtype)[1, 3, 1], encode(x[1, 3, 1], dtype))
    again = encode(decode(encode(x, dtype), dtype), dtype)
    assert torch.equal(again[..., :-4], encode(x, dtype)[..., :-4])
    x = torch.randn(5, 16)
    x[0], x[1], x[2, 3], x[3, 15] = 0.0, SMALLEST / 2, math.inf, math.nan
    found = decode(encode(x, dtype), dtype)
    assert not found[:2].any()
    assert found[2:4].isnan().all()
    assert found[4].isfinite().all()


def test_bits_are_those_of_lmdeploy_and_of_the_standard() -> None:
    """Four-bit codes hold the vector's first half in the low bits and the second half in the high bits."""
    stored = encode(torch.tensor([1.0, 2.0, 3.0, 7.0]), "int4")
    assert stored[:2].tolist() == [(1 + 8) | (3 + 8) << 4, (2 + 8) | (7 + 8) << 4]
    assert stored[2:].clone().view(torch.float32).item() == 1.0
    x = torch.tensor([448.0, -448.0, 1.0, 0.015625, 0.001953125, 0.0, 17.0, 19.0])
    assert encode(x, "fp8_e4m3")[:-4].tolist() == [0x7E, 0xFE, 0x38, 0x08, 0x01, 0x00, 0x58, 0x5A]
    # For 128 numbers: 132 bytes with 8 bits, 68 bytes with 4.
    sizes = {dtype: KVLayout(1, 1, keys_and_values(128), 16, dtype).token_nbytes for dtype in CODED}
    assert sizes == {"int8": 264, "fp8_e4m3": 264, "int4": 136}


@pytest.mark.parametrize("source", ["float32", "bfloat16", *CODED])
@pytest.mark.parametrize("target", ["float32", "bfloat16", *CODED])
def test_what_travels_is_the_narrower_form(source: str, target: str) -> None:
    bits = {"float32": 32, "bfloat16": 16, **CODE_BITS}
    a, b = (KVLayout(3, 4, keys_and_values(32), 4, dtype) for dtype in (source, target))
    for wants_int8 in (False, True):
        route = PoolRoute(a, b, wants_int8)
        narrowest = min([bits[source], bits[target], *([8] if wants_int8 else [])])
        assert bits[route.wire_dtype] == narrowest
        is_as_computed = source == target == route.wire_dtype
        assert bool(route.precision) != is_as_computed
        assert route.is_verbatim == is_as_computed


def test_odd_widths_have_no_int4() -> None:
    odd = keys_and_values(15)
    assert [can_hold(odd, dtype) for dtype in ("float32", "int8", "fp8_e4m3", "int4")] == [True, True, True, False]
    with pytest.raises(ConfigError, match="--kv-cache-dtype int4: vectors of 15, 15 values, an odd number; use int8"):
        layout_of((LayerCache(2, odd),), 16, "int4")
    pair = KVLayout(1, 2, odd, 16, "int4")
    with pytest.raises(LinkError, match="int4 has two values per byte, but a width is odd"):
        check_pair(pair, pair)


@pytest.mark.parametrize("dtype", CODED)
def test_blocks_hold_what_was_put(dtype: str) -> None:
    layout = KVLayout(2, 3, keys_and_values(32), 4, dtype)
    pool = KVPool(layout, 6)
    content = probe_content(layout, 3)
    pool.put_block(2, content)
    assert torch.equal(pool.block(2), content)
    vectors = [torch.randn(2, 7, 3, 32) for _ in range(2)]
    piece = KVPiece(0, 7, 0, 2, [4, 1])
    pool.memory.put_vectors([encode(x, dtype) for x in vectors], piece, [4, 1], [slice(0, 3)] * 2)
    for plane, x in zip(pool.layer(1), vectors, strict=True):
        there = plane[[4, 1]].flatten(0, 1)[:7]
        assert torch.equal(decode(there, dtype), decode(encode(x[1], dtype), dtype))
    pool.close()


def test_converting_goes_through_numbers() -> None:
    eight = encode(torch.randn(4, 32), "int8")
    assert torch.equal(convert(eight, "int8", "float32"), decode(eight, "int8"))
    assert torch.equal(convert(eight, "int8", "int4"), encode(decode(eight, "int8"), "int4"))
