"""Adapters of one linear layer on CUDA: A and B are on the device, and a table holds their addresses.

The tables' memory never moves, so a graph captured with one adapter serves all adapters that are loaded later. Launch
sizes depend on the number of row blocks, not on ranks: programs beyond an adapter's rank return at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pd_cluster.model.kernels.cuda.elementwise_kernels import DTYPES
from pd_cluster.model.kernels.cuda.linear import lora_kernels as kernels
from pd_cluster.model.lora.adapted_linear import LowRank
from pd_cluster.model.lora.adapter_row_blocks import BLOCK_ROWS, MOST_ADAPTERS, AdaptedBlocks

BLOCK_R = 16  # ranks are padded with zeros to a multiple of this
BLOCK_K = 64
TILE_OUTPUTS = 64
SPLIT_INPUTS = 1024  # the fewest inputs of a split
MAX_SPLITS = 8


class CudaTable:
    """`modules`: the slice of outputs for each module that the layer joins; `max_rank`: the largest rank that a module
    of an adapter may have.
    """

    def __init__(
        self, modules: Sequence[slice], num_inputs: int, dtype: torch.dtype, device: torch.device, max_rank: int
    ) -> None:
        assert dtype in DTYPES
        self._modules, self._num_inputs, self._dtype, self._device = list(modules), num_inputs, dtype, device
        self._low_width = len(modules) * -(-max_rank // BLOCK_R) * BLOCK_R
        self._splits = max(1, min(MAX_SPLITS, num_inputs // SPLIT_INPUTS))
        self._width = 2 + 3 * len(modules)
        self._table = torch.zeros(MOST_ADAPTERS, self._width, dtype=torch.int64, device=device)
        tiles = [
            (at, each.start, first, each.stop - each.start)
            for at, each in enumerate(modules)
            for first in range(0, each.stop - each.start, TILE_OUTPUTS)
        ]
        numbers = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._tiles, self._ends = numbers[:, :3].contiguous(), numbers[:, 3].contiguous()
        self.kept: dict[int, list[torch.Tensor]] = {}

    def put(self, place: int, parts: Sequence[tuple[slice, LowRank]]) -> None:
        """Stores an adapter at an index of the table that no running step reads."""
        ranks = [-(-part.a.shape[0] // BLOCK_R) * BLOCK_R for _, part in parts]
        a = torch.zeros(sum(ranks), self._num_inputs, dtype=self._dtype, device=self._device)
        assert len(a) <= self._low_width
        row = [a.data_ptr(), len(a), *[0] * (self._width - 2)]
        kept, first = [a], 0
        for (outputs, part), rank in zip(parts, ranks, strict=True):
            a[first : first + len(part.a)] = part.a.to(self._device, self._dtype)
            b = torch.zeros(part.b.shape[0], rank, dtype=self._dtype, device=self._device)
            b[:, : part.b.shape[1]] = part.b.to(self._device, self._dtype)
            at = 2 + 3 * self._modules.index(outputs)
            row[at : at + 3] = [first, rank, b.data_ptr()]
            kept.append(b)
            first += rank
        self._table[place] = torch.tensor(row, dtype=torch.int64, device="cpu").to(self._device)
        self.kept[place] = kept

    def drop(self, place: int) -> None:
        """Removes an adapter; call it when the device has finished every step that uses the adapter."""
        if self.kept.pop(place, None) is not None:
            self._table[place] = 0

    def add(self, x: torch.Tensor, y: torch.Tensor, step: AdaptedBlocks) -> None:
        """Adds the adapters' outputs for x [num_rows, num_inputs] to y [num_rows, num_outputs]."""
        assert x.dtype == y.dtype == self._dtype
        assert x.shape[1] == self._num_inputs
        assert x.stride(1) == y.stride(1) == 1
        num_places, num_blocks = len(step.rows), len(step.blocks)
        if not num_blocks:
            return
        low = x.new_empty(self._splits * num_places * self._low_width, dtype=torch.float32)
        common = {
            "LOW_WIDTH": self._low_width,
            "TABLE_WIDTH": self._width,
            "SPLITS": self._splits,
            "BLOCK_M": BLOCK_ROWS,
            "BLOCK_R": BLOCK_R,
            "num_warps": 4,
        }
        kernels.lora_shrink[(num_blocks, self._splits, self._low_width // BLOCK_R)](
            *(x, low, self._table, step.rows, step.blocks, x.stride(0), num_places),
            NUM_INPUTS=self._num_inputs,
            BLOCK_K=BLOCK_K,
            **common,
        )
        kernels.lora_expand[(num_blocks, len(self._tiles))](
            *(y, low, self._table, step.rows, step.blocks, self._tiles, self._ends, y.stride(0), num_places),
            BLOCK_N=TILE_OUTPUTS,
            **common,
        )
