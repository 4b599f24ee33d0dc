"""Linear layers with quantized weights in Triton: codes are packed once at load, and decoded where they are multiplied.

With few rows, reading the weight takes most of the time, so tiles are narrow and the inputs are split over programs.
With many rows, arithmetic does, so the weight is decoded to memory once and cuBLAS multiplies. In between, tiles are
wide. The number of splits depends only on the weight's shape. After a layer is made, nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.kernels.cuda.linear import quantized_linear_kernels as kernels
from pd_cluster.model.kernels.cuda.linear.triton_linear import ROW_TILES_TOGETHER, Tiling
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.weights.bit_unpacking import E2M1_DOUBLED
from pd_cluster.model.weights.quantized_weight import CodedWeight, Int8Weight

TILE, IN_WORD = 128, 8  # inputs in a tile of words, and codes in a word: see quantized_linear_kernels.py
LEAST_GROUP = TILE // IN_WORD  # the fewest inputs that may share a scale: the inputs of one slot
INT4, E2M1, INT8, E4M3, ROUNDED, PLAIN = range(6)
EXACT = float(1 << 23)
MOST_ZERO = 1 << 20  # the largest zero point of codes in words for which sums with EXACT are exact
DECODED_ROWS = 16  # outputs that a program decodes
ROUND_BLOCK = 8192  # inputs that a program rounds at once

MANY_ROWS = 1024  # with this many rows the weight is decoded to memory; not for float32, where cuBLAS is not faster
SPLIT_ROWS = 64  # with at most this many rows, inputs are split over programs
PROGRAMS = 264  # the goal: two on each multiprocessor of an H100
LEAST_TILES = 4  # the fewest tiles in a split
MAX_SPLITS = 8

# (most rows, tile); `block_k` is in bytes. Not measured yet.
TILINGS_16_BITS = (
    (16, Tiling(16, 64, 64, 4, 4)),
    (32, Tiling(32, 64, 64, 4, 4)),
    (64, Tiling(64, 64, 64, 4, 3)),
    (1 << 31, Tiling(128, 64, 64, 8, 3)),
)
TILINGS_32_BITS = ((16, Tiling(16, 32, 32, 4, 2)), (1 << 31, Tiling(64, 64, 32, 8, 2)))
FIXED_16_BITS, FIXED_32_BITS = TILINGS_16_BITS[2][1], TILINGS_32_BITS[1][1]  # with `is_deterministic`


def coded_tiling(num_rows: int, dtype: torch.dtype, is_deterministic: bool = False) -> Tiling:
    if is_deterministic:
        return FIXED_32_BITS if dtype == torch.float32 else FIXED_16_BITS
    tilings = TILINGS_32_BITS if dtype == torch.float32 else TILINGS_16_BITS
    return next(tile for most, tile in tilings if num_rows <= most)


@dataclass(frozen=True, slots=True)
class WeightCodes:
    """A weight's codes in the kernels' layout; for experts all tensors have a leading dimension of experts.

    For ROUNDED, `zeros` are the shifts [..., num_outputs] int32 for activations that are rounded with `inputs`.
    """

    stored: torch.Tensor  # [..., num_outputs, width] int32 words or bytes
    scales: torch.Tensor  # [..., num_outputs, num_groups] float32
    zeros: torch.Tensor | None  # None: all zero points equal `zero`
    zero: float
    kind: int
    num_inputs: int
    inputs: tuple[float, float] | None = None  # the scale and zero point of activations in the file

    def block_k(self, tile: Tiling) -> int:
        """Returns the number of inputs per step; they share one scale, except for codes in words."""
        if self.kind <= E2M1:
            return TILE
        num_groups = self.scales.shape[-1]
        block = max(32, tile.block_k) if self.kind == ROUNDED else tile.block_k
        while self.kind != ROUNDED and num_groups > 1 and self.group_size % block:
            block //= 2
        return block

    @property
    def group_size(self) -> int:
        return self.num_inputs // self.scales.shape[-1] if self.kind != ROUNDED else self.num_inputs

    @property
    def constants(self) -> dict[str, object]:
        return {
            "NUM_INPUTS": self.num_inputs,
            "WIDTH": self.stored.shape[-1],
            "GROUP_SIZE": self.group_size,
            "NUM_GROUPS": 1 if self.kind == ROUNDED else self.scales.shape[-1],
            "KIND": self.kind,
            "HAS_ZEROS": self.zeros is not None,
            "OFFSET": self.zero + EXACT if self.kind == INT4 else self.zero,
        }


def codes_of(weight: LinearWeight) -> WeightCodes | None:
    """Packs a weight on its device. Returns None if it is not quantized or has groups too small for the kernels."""
    if isinstance(weight, Int8Weight):
        return _rounded(weight)
    if not isinstance(weight, CodedWeight) or weight.dtype not in DTYPES:
        return None
    num_inputs, num_groups = weight.codes.shape[-1], weight.scales.shape[-1]
    if num_groups > 1 and num_inputs // num_groups % LEAST_GROUP:
        return None
    scales = weight.scales.contiguous()
    if weight.codes.dtype.is_floating_point:
        stored = _filled(weight.codes.view(torch.uint8))
        is_odd = bool(weight.zeros.any()) or bool(((weight.codes.view(torch.uint8) & 127) == 127).any())
        return None if is_odd else WeightCodes(stored, scales, None, 0.0, E4M3, num_inputs)
    least, most = (int(each) for each in weight.codes.aminmax())
    least = next((each for each in (-8, 0) if each <= least and most < each + 16), least)
    zeros = weight.zeros - least
    if most < least + 16 and bool((zeros == zeros.round()).all()) and float(zeros.abs().max()) <= MOST_ZERO:
        words = _words(_filled(weight.codes - least))
        return WeightCodes(words, scales, *_constant(zeros), INT4, num_inputs)
    if (small := _e2m1(weight)) is not None:
        return WeightCodes(_words(_filled(small)), (2 * weight.scales).contiguous(), None, 0.0, E2M1, num_inputs)
    return WeightCodes(_filled(weight.codes), scales, *_constant(weight.zeros), INT8, num_inputs)


def _rounded(weight: Int8Weight) -> WeightCodes | None:
    if weight.dtype not in DTYPES:
        return None
    stored, num_inputs = _filled(weight.codes), weight.codes.shape[-1]
    if weight.inputs is None:
        return WeightCodes(stored, weight.scales.contiguous(), None, 0.0, ROUNDED, num_inputs)
    if weight.inputs.dim() != 1:
        return None  # experts, each with its own scales of activations
    scale, zero = (float(each) for each in weight.inputs)
    shifts = weight.codes.sum(-1, dtype=torch.int32) * int(zero)
    return WeightCodes(stored, weight.scales * scale, shifts, 0.0, ROUNDED, num_inputs, (scale, zero))


def _constant(zeros: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """Returns (zero points, 0), or if all are equal (None, their value)."""
    first = zeros.flatten()[:1]
    return (None, float(first)) if bool((zeros == first).all()) else (zeros.contiguous(), 0.0)


def _filled(codes: torch.Tensor) -> torch.Tensor:
    """Pads rows to whole tiles with zeros, which are multiplied only by zeros."""
    missing = -codes.shape[-1] % TILE
    if not missing:
        return codes.contiguous()
    return torch.cat((codes, codes.new_zeros((*codes.shape[:-1], missing))), dim=-1)


def _words(fields: torch.Tensor) -> torch.Tensor:
    """Packs four-bit codes [..., tiles * TILE] into words, in the kernels' order."""
    slots = fields.view(*fields.shape[:-1], -1, IN_WORD, LEAST_GROUP)
    words = torch.zeros_like(slots[..., 0, :], dtype=torch.int32)
    for slot in range(IN_WORD):
        words |= slots[..., slot, :].to(torch.int32) << 4 * slot
    return words.flatten(-2)


def _e2m1(weight: CodedWeight) -> torch.Tensor | None:
    """Returns four-bit codes if all codes of the weight are twice the value of an E2M1 float; otherwise None."""
    if weight.zeros.any():
        return None
    most = E2M1_DOUBLED[-1]
    codes = torch.full((2 * most + 1,), -1, dtype=torch.int8, device=weight.codes.device)
    for code, doubled in enumerate(E2M1_DOUBLED):
        codes[most - doubled], codes[most + doubled] = 8 | code, code
    if int(weight.codes.abs().max()) > most:  # in int8, abs(-128) is -128: caught below
        return None
    found = codes[weight.codes.to(torch.int32) + most] if int(weight.codes.min()) >= -most else codes[:1]
    return None if bool((found < 0).any()) or found.shape != weight.codes.shape else found


class QuantizedLinear:
    """`x @ weight.T + bias` for x [..., in_features]. `is_deterministic`: one tile for all numbers of rows."""

    __slots__ = ("_arrived", "_bias", "_codes", "_is_deterministic")

    def __init__(self, codes: WeightCodes, bias: torch.Tensor | None, is_deterministic: bool = False) -> None:
        self._codes, self._is_deterministic = codes, is_deterministic
        self._bias = None if bias is None else bias.detach().contiguous()
        num_tiles = triton.cdiv(codes.stored.shape[0], min(tile.block_n for _, tile in TILINGS_32_BITS))
        self._arrived = torch.zeros(num_tiles, dtype=torch.int32, device=codes.stored.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes = self._codes
        rows = x.reshape(-1, x.shape[-1])
        assert rows.shape[1] == codes.num_inputs
        assert rows.dtype in DTYPES
        num_outputs = codes.stored.shape[0]
        if not rows.numel():
            return x.new_empty((*x.shape[:-1], num_outputs))
        is_many = len(rows) > MANY_ROWS and x.dtype != torch.float32 and not self._is_deterministic
        if is_many and codes.kind != ROUNDED:
            return torch.nn.functional.linear(x, decoded(codes, x.dtype), self._bias)
        return self._product(rows).view(*x.shape[:-1], num_outputs)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        codes, bias = self._codes, self._bias
        num_rows, num_outputs = len(rows), codes.stored.shape[0]
        tile = coded_tiling(num_rows, rows.dtype, self._is_deterministic)
        block_k = codes.block_k(tile)
        out = rows.new_empty(num_rows, num_outputs)
        num_row_tiles = triton.cdiv(num_rows, tile.block_m)
        num_tiles = num_row_tiles * triton.cdiv(num_outputs, tile.block_n)
        splits = 1 if num_row_tiles > 1 or self._is_deterministic else splits_of(num_outputs, codes.num_inputs, block_k)
        scales, taken = codes.scales, rows.contiguous()
        if codes.kind == ROUNDED:
            taken, scales = rounded(rows, codes.inputs)
        partial = out
        if splits > 1:
            dtype = torch.int32 if codes.kind == ROUNDED else torch.float32
            partial = rows.new_empty(num_tiles * splits * tile.block_m * tile.block_n, dtype=dtype)
        kernels.coded_linear_product[(num_tiles, splits)](
            taken,
            scales,
            codes.stored,
            codes.scales,
            codes.scales if codes.zeros is None else codes.zeros,
            out if bias is None else bias,
            out,
            partial,
            self._arrived,
            num_rows,
            num_row_tiles,
            NUM_OUTPUTS=num_outputs,
            HAS_BIAS=bias is not None,
            SPLITS=splits,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=block_k,
            GROUP=ROW_TILES_TOGETHER,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=codes.kind != ROUNDED,
            **codes.constants,
        )
        return out


def splits_of(num_outputs: int, num_inputs: int, block_k: int) -> int:
    """Returns how many programs share a tile of a weight's outputs: several if one per tile leaves the device idle."""
    wanted = PROGRAMS // -(-num_outputs // 64)
    most = min(MAX_SPLITS, -(-num_inputs // block_k) // LEAST_TILES)
    return max(1, min(1 << max(0, wanted.bit_length() - 1), 1 << max(0, most.bit_length() - 1)))


def rounded(rows: torch.Tensor, inputs: tuple[float, float] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 codes of rows [num_rows, in_features], and float32 scales [num_rows], unset with `inputs`."""
    assert rows.stride(1) == 1
    num_rows, num_inputs = rows.shape
    codes = rows.new_empty(num_rows, num_inputs, dtype=torch.int8)
    scales = rows.new_empty(num_rows, dtype=torch.float32)
    block = min(ROUND_BLOCK, triton.next_power_of_2(num_inputs))
    scale, zero = inputs or (1.0, 0.0)
    kernels.round_rows[(num_rows,)](
        *(rows, codes, scales, rows.stride(0), scale, float(int(zero))),
        NUM_INPUTS=num_inputs,
        BLOCK=block,
        IS_STATIC=inputs is not None,
        num_warps=max(1, min(8, block // 512)),
        enable_fp_fusion=False,
    )
    return codes, scales


def decoded(codes: WeightCodes, dtype: torch.dtype) -> torch.Tensor:
    """Returns the decoded weight, [num_outputs, in_features]."""
    num_outputs = codes.stored.shape[0]
    out = codes.scales.new_empty(num_outputs, codes.num_inputs, dtype=dtype)
    kernels.decode_rows[(triton.cdiv(num_outputs, DECODED_ROWS), triton.cdiv(codes.num_inputs, TILE))](
        codes.stored,
        codes.scales,
        codes.scales if codes.zeros is None else codes.zeros,
        out,
        NUM_OUTPUTS=num_outputs,
        ROWS=DECODED_ROWS,
        num_warps=4,
        **codes.constants,
    )
    return out


def linear_of(weight: LinearWeight, is_deterministic: bool = False) -> Linear | None:
    """Returns the layer of a quantized weight; None if the weight can only be multiplied as floats."""
    codes = codes_of(weight)
    return None if codes is None else QuantizedLinear(codes, weight.bias, is_deterministic)
