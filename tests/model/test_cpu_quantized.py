"""Packed products of 16, 8 and 4 bits against exact references, for each instruction set that this machine has."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.native import build
from pd_cluster.native import packed_products as quantized
from pd_cluster.native.packed_products import (
    CodeGrid,
    bf16_linear,
    bf16_way,
    fp8_weight_only_linear,
    int4_linear,
    int8_linear,
    int8_weight_only_linear,
    quantize_rows,
)
from tests.support.spread import spread

pytestmark = pytest.mark.usefixtures("kept_threads")
NO_TILES = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
ANY_X86 = tuple(flag for flag in build.FLAGS if flag != "-march=native")
VARIANTS = {
    "this machine": build.FLAGS,
    "no tiles": (*build.FLAGS, *NO_TILES),
    "AVX2": (*ANY_X86, "-march=haswell"),
}
OTHER_VARIANTS = {
    "tiles are refused": (*build.FLAGS, "-DTILE_STATE=63"),
    "AVX-512": (*ANY_X86, "-march=x86-64-v4"),
    "AVX-VNNI": (*ANY_X86, "-march=haswell", "-mavxvnni"),
    "x86-64": (*ANY_X86, "-march=x86-64"),
}
# Required features in /proc/cpuinfo for each variant.
NEEDED = {"AVX2": ("avx2", "fma", "f16c"), "AVX-512": ("avx512bw", "avx512vl", "avx512dq"), "AVX-VNNI": ("avx_vnni",)}
# (outputs, inputs, inputs per scale): not all are multiples of panels or tiles; the last group may be short.
SHAPES = [(64, 64, 64), (40, 96, 32), (33, 771, 771), (17, 7, 7), (48, 320, 16), (50, 300, 128), (16, 16_384, 128)]
WIDE = [(24, 8192, 8192), (130, 1024, 1024)]
ROWS = (1, 2, 3, 5, 16, 17, 64)
MOST_ROWS = 200

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")


def _has(variant: str) -> bool:
    cpu = Path("/proc/cpuinfo").read_text("utf-8").split()
    return platform.machine() == "x86_64" and all(name in cpu for name in NEEDED.get(variant, ()))


@pytest.fixture(
    scope="module",
    params=[*VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_VARIANTS)],
)
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if request.param != "this machine" and not _has(request.param):
        pytest.skip(f"this machine cannot run {request.param}")
    chosen = (VARIANTS | OTHER_VARIANTS)[request.param]
    if bf16_way(chosen) is None:
        pytest.skip("the kernels cannot be compiled here")
    return chosen


def assert_rows_alone(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """Returns all rows' results, after asserting the same bits for fewer rows, on one and two threads."""
    torch.set_num_threads(2)
    whole = layer(x)
    for threads, num_rows in (*((1, each) for each in ROWS), *((2, each) for each in ROWS[::3])):
        torch.set_num_threads(threads)
        part = layer(x[7 : 7 + num_rows])
        assert torch.equal(part, whole[7 : 7 + num_rows]), f"{num_rows} rows, {threads} threads"
    return whole


def expanded(scales: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    return scales.double().repeat_interleave(group, dim=1)[:, :inputs]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"differs by {error:.1e} of the largest"


@pytest.mark.parametrize("shape", SHAPES + WIDE, ids=str)
def test_int8(flags: tuple[str, ...], shape: tuple[int, int, int]) -> None:
    """Sums of codes equal int64 sums exactly, also for the largest codes."""
    outputs, inputs, group = shape
    torch.manual_seed(inputs)
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    codes[0], codes[1] = 127, -128
    scales = torch.rand(outputs, -(-inputs // group)) + 0.01
    bias = torch.randn(outputs)
    x = torch.randn(MOST_ROWS, inputs)
    x[0] = 3.0
    x_codes, x_scales = quantize_rows(x)
    expected = torch.zeros(MOST_ROWS, outputs)
    for index in range(scales.shape[1]):
        part = slice(index * group, (index + 1) * group)
        sums = x_codes[:, part].long() @ codes[:, part].long().T
        expected = expected + sums.float() * scales[:, index]
    layer, biased = (int8_linear(codes, scales, each, group=group, flags=flags) for each in (None, bias))
    assert layer is not None
    assert biased is not None
    result = assert_rows_alone(layer, x)
    assert_close(result, (expected * x_scales).double())
    assert_close(biased(x), expected.double() * x_scales + bias)
    if group >= inputs:  # the same bits on every machine
        assert torch.equal(result, expected * x_scales)
        assert torch.equal(biased(x), expected * x_scales + bias)


@pytest.mark.parametrize("shape", SHAPES[1:5] + WIDE, ids=str)
def test_bf16(flags: tuple[str, ...], shape: tuple[int, int, int]) -> None:
    outputs, inputs, _ = shape
    torch.manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
    layer = bf16_linear(weight, bias, flags=flags)
    assert layer is not None
    x = torch.randn(MOST_ROWS, inputs)
    assert_close(assert_rows_alone(layer, x), x.bfloat16().double() @ weight.double().T + bias)


@pytest.mark.parametrize(
    ("activations", "has_zeros", "shape"),
    spread(
        [(each, zeros) for each in ("float32", "bfloat16", "int8") for zeros in (False, True)],
        [(shape,) for shape in SHAPES],
    ),
    ids=str,
)
def test_codes_of_4_and_8_bits(
    flags: tuple[str, ...], shape: tuple[int, int, int], has_zeros: bool, activations: quantized.Activations
) -> None:
    outputs, inputs, group = shape
    torch.manual_seed(inputs)
    num_groups = -(-inputs // group)
    scales, bias = torch.rand(outputs, num_groups) + 0.01, torch.randn(outputs)
    zeros = torch.rand(outputs, num_groups) * 15 if has_zeros else None
    x = torch.randn(MOST_ROWS, inputs)
    rounded = x.double()
    if activations == "bfloat16":
        rounded = x.bfloat16().double()
    elif activations == "int8":
        x_codes, x_scales = quantize_rows(x)
        rounded = x_codes.double() * x_scales.double()
    makers: list[tuple[Callable[..., Linear | None], int, int]] = [
        (int4_linear, *((0, 16) if has_zeros else (-8, 8))),
        (int8_weight_only_linear, -128, 128),
    ]
    for make, least, most in makers:
        codes = torch.randint(least, most, (outputs, inputs), dtype=torch.int8)
        layer = make(codes, CodeGrid(scales, zeros, group), bias, activations=activations, flags=flags)
        assert layer is not None
        weight = codes.double() - (0 if zeros is None else expanded(zeros, group, inputs))
        expected = rounded @ (weight * expanded(scales, group, inputs)).T + bias
        assert_close(assert_rows_alone(layer, x), expected)


@pytest.mark.parametrize(
    ("activations", "shape"), spread(["float32", "bfloat16"], [(shape,) for shape in SHAPES]), ids=str
)
def test_fp8(flags: tuple[str, ...], shape: tuple[int, int, int], activations: Any) -> None:
    """Covers every e4m3 number, including subnormal ones and signed zeros."""
    outputs, inputs, group = shape
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    codes = every.repeat(-(-outputs * inputs // len(every)))[: outputs * inputs].view(outputs, inputs)
    weight = codes.view(torch.float8_e4m3fn)
    scales = torch.rand(outputs, -(-inputs // group)) + 0.01
    layer = fp8_weight_only_linear(weight, scales, None, activations=activations, group=group, flags=flags)
    assert layer is not None
    torch.manual_seed(0)
    x = torch.randn(MOST_ROWS, inputs)
    rounded = x.bfloat16() if activations == "bfloat16" else x
    numbers = weight.float().double() * expanded(scales, group, inputs)
    assert_close(assert_rows_alone(layer, x), rounded.double() @ numbers.T)
    one = torch.zeros(1, inputs)
    one[0, 0] = 1.0
    assert torch.equal(layer(one)[0], weight[:, 0].float() * scales[:, 0])


@on_x86
def test_fp8_where_a_thread_takes_subnormal_numbers_for_zeros(flags: tuple[str, ...]) -> None:
    """Even if a library made the thread flush subnormals to zero, products are exact; the mode is restored."""
    codes = torch.arange(16 * 96).remainder(127).to(torch.uint8).view(16, 96)
    layer = fp8_weight_only_linear(codes.view(torch.float8_e4m3fn), torch.ones(16, 1), None, flags=flags)
    assert layer is not None
    torch.set_num_threads(1)
    x = torch.eye(96)
    expected = codes.view(torch.float8_e4m3fn).float().T
    torch.set_flush_denormal(True)
    try:
        found, tiny = layer(x), torch.full((1,), 1e-40).mul(1.0).view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)
    assert tiny.tolist() == [0]


def layers_of(outputs: int, inputs: int, flags: tuple[str, ...]) -> dict[str, Linear | None]:
    codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    scales, bias = torch.rand(outputs, 2), torch.randn(outputs)
    return {
        "int8": int8_linear(codes, scales, bias, flags=flags),
        "bf16": bf16_linear(codes.bfloat16(), bias, flags=flags),
        "int8 weight only": int8_weight_only_linear(codes, CodeGrid(scales, scales), bias, flags=flags),
        "int4": int4_linear(codes, CodeGrid(scales), bias, flags=flags),
        "int4 with codes": int4_linear(codes, CodeGrid(scales), bias, activations="int8", flags=flags),
        "int4 in bfloat16": int4_linear(codes, CodeGrid(scales), bias, activations="bfloat16", flags=flags),
        "fp8": fp8_weight_only_linear(codes.float().to(torch.float8_e4m3fn), scales, bias, flags=flags),
    }


def test_blocks_of_any_number_of_rows(flags: tuple[str, ...]) -> None:
    """Covers register blocks of one to twelve rows, and one, two, four or eight panels of outputs.

    Weights are decoded per block or once for all; threads take up to 192 rows at a time.
    """
    torch.manual_seed(2)
    x = torch.randn(500, 384)
    for name, layer in layers_of(530, 384, flags).items():
        assert layer is not None
        torch.set_num_threads(2)
        whole = layer(x)
        for at, num_rows in enumerate((*range(1, 26), 37, 64, 65, 193, 400)):
            torch.set_num_threads(1 + at % 2)
            assert torch.equal(layer(x[7 : 7 + num_rows]), whole[7 : 7 + num_rows]), f"{name}, {num_rows} rows"


def test_prompts(flags: tuple[str, ...]) -> None:
    """More rows than a thread takes at once have the same bits: in place, through sums, and with a bias."""
    torch.manual_seed(3)
    x = torch.randn(1100, 1024)
    for outputs, has_bias in ((144, False), (139, True)):
        codes = torch.randint(-8, 8, (outputs, 1024), dtype=torch.int8)
        one, scales = torch.rand(outputs, 1), torch.rand(outputs, 8)
        bias = torch.randn(outputs) if has_bias else None
        for name, layer, weight in (
            ("int8", int8_weight_only_linear(codes, CodeGrid(one), bias, flags=flags), codes * one),
            (
                "int4",
                int4_linear(codes, CodeGrid(scales, scales), bias, flags=flags),
                (codes.view(outputs, 8, 128) - scales[..., None]) * scales[..., None],
            ),
            ("fp8", fp8_weight_only_linear(codes.to(torch.float8_e4m3fn), one, bias, flags=flags), codes * one),
        ):
            assert layer is not None
            torch.set_num_threads(2)
            whole = layer(x)
            expected = x.double() @ weight.view(outputs, 1024).double().T
            assert_close(whole, expected if bias is None else expected + bias)
            for threads, first, num_rows in ((1, 0, 1), (2, 1067, 33), (1, 500, 128), (2, 7, 192), (1, 40, 529)):
                torch.set_num_threads(threads)
                part = layer(x[first : first + num_rows])
                assert torch.equal(part, whole[first : first + num_rows]), f"{name}, {num_rows} rows"


def test_rows_that_are_zero_infinite_or_not_numbers(flags: tuple[str, ...]) -> None:
    """Such rows affect no other row; those with infinity or NaN do not become finite."""
    torch.manual_seed(0)
    for name, layer in layers_of(40, 96, flags).items():
        assert layer is not None
        x = torch.randn(40, 96)
        clean = layer(x)
        dirty = x.clone()
        dirty[1], dirty[2, 3], dirty[3, 95], dirty[4] = 0.0, float("inf"), float("nan"), 1e-38
        result = layer(dirty)
        others = torch.tensor([0, *range(5, 40)])
        assert torch.equal(result[others], clean[others]), name
        assert torch.equal(result[1], layer(torch.zeros(1, 96))[0]), name
        assert torch.allclose(result[4], result[1]), name
        assert not result[2].isfinite().any(), name
        assert result[3].isnan().all(), name
        assert torch.equal(layer(dirty[2:4]).isnan(), result[2:4].isnan()), name


def test_layers_are_made_and_used_by_several_threads(flags: tuple[str, ...]) -> None:
    x = torch.randn(20, 96)
    torch.set_num_threads(1)
    layers = [layer for layer in layers_of(40, 96, flags).values() if layer is not None]

    def compute(seed: int) -> list[torch.Tensor]:
        quantized.libraries.pop(flags, None)
        another = int8_linear(torch.full((40, 96), seed, dtype=torch.int8), torch.ones(40, 1), None, flags=flags)
        assert another is not None
        return [layer(x) for layer in (*layers, another)]

    expected = [compute(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(compute, range(8)), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


def test_shapes_and_rounding_of_activations(flags: tuple[str, ...]) -> None:
    """Rows are quantized with ties to even; the largest magnitude becomes 127."""
    layer = bf16_linear(torch.randn(40, 96).bfloat16(), None, flags=flags)
    assert layer is not None
    x = torch.randn(2, 3, 192)[..., ::2]
    assert torch.equal(layer(x), layer(x.reshape(6, 96)).view(2, 3, 40))
    assert layer(torch.empty(0, 96)).shape == (0, 40)
    codes, scales = quantize_rows(
        torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0.0] * 5, [float("inf"), *[0.0] * 4]])
    )
    assert codes.tolist() == [[127, 0, 2, -2, -127], [0] * 5, [0] * 5]
    assert scales[:2].tolist() == [[1.0], [0.0]]
    assert scales[2].isnan().all()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impossible codes and scales raise errors; without kernels no layer is made."""
    if bf16_way() is None:
        pytest.skip("the kernels cannot be compiled here")
    codes, ones = torch.full((16, 64), 8, dtype=torch.int8), torch.ones(16, 1)
    with pytest.raises(ModelError, match="codes from 8 to 8 are not 4-bit codes"):
        int4_linear(codes, CodeGrid(ones), None)
    with pytest.raises(ModelError, match="64 inputs cannot have 2 scales of 64 inputs each"):
        int8_linear(codes, torch.ones(16, 2), None, group=64)
    with pytest.raises(ModelError, match="is NaN"):
        fp8_weight_only_linear(torch.full((16, 64), float("nan")).to(torch.float8_e4m3fn), ones, None)
    with pytest.raises(ModelError, match="more than 32 bits"):
        int8_linear(torch.zeros(1, 65_600, dtype=torch.int8), torch.ones(1, 1), None)
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    assert bf16_way() is None
    assert bf16_linear(torch.zeros(16, 64).bfloat16(), None) is None
