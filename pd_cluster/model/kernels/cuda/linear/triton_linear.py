"""Linear layers in Triton whose tile depends only on the weight, so a row's bits do not depend on the number of rows.

cuBLAS chooses different kernels, with different orders of sums, for different numbers of rows. Here a single row costs
as much as a whole tile, and no sum is split over programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.kernels.cuda.linear import linear_kernels as kernels

ROW_TILES_TOGETHER = 16  # this many row tiles that read the same columns are adjacent in program order


@dataclass(frozen=True, slots=True)
class Tiling:
    """One program's share of a product: its rows, its columns, and the inner elements per step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# (least out_features, tile). Narrow layers get narrow tiles, so that a single row occupies enough multiprocessors. Not
# measured yet.
TILINGS_16_BITS = ((8192, Tiling(128, 128, 64, 8, 3)), (0, Tiling(64, 64, 64, 4, 4)))
TILINGS_32_BITS = ((0, Tiling(64, 64, 32, 8, 2)),)


def linear_tiling(out_features: int, dtype: torch.dtype) -> Tiling:
    """Returns the tile for a layer. It must never depend on the number of rows."""
    table = TILINGS_32_BITS if dtype == torch.float32 else TILINGS_16_BITS
    return next(tile for least, tile in table if out_features >= least)


class TritonLinear:
    """`x @ weight.T + bias` for x [num_rows, in_features], contiguous or not; sums are float32, rounded once."""

    __slots__ = ("_bias", "_tile", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert weight.dtype in DTYPES
        assert bias is None or bias.shape == weight.shape[:1]
        self._weight = weight.detach().contiguous()
        self._bias = None if bias is None else bias.detach().contiguous()
        self._tile = linear_tiling(weight.shape[0], weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, tile = self._weight, self._bias, self._tile
        num_rows, (num_outputs, num_inputs) = len(x), weight.shape
        assert x.shape == (num_rows, num_inputs)
        assert x.dtype == weight.dtype
        out = x.new_empty(num_rows, num_outputs)
        if not out.numel():
            return out
        num_row_tiles = triton.cdiv(num_rows, tile.block_m)
        kernels.linear_product[(num_row_tiles * triton.cdiv(num_outputs, tile.block_n),)](
            x.contiguous(),
            weight,
            bias if bias is not None else weight,
            out,
            num_rows,
            num_row_tiles,
            NUM_INPUTS=num_inputs,
            NUM_OUTPUTS=num_outputs,
            HAS_BIAS=bias is not None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP=ROW_TILES_TOGETHER,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out
