"""Computes LoRA adapters of a linear layer in C, for those rows of a step that have an adapter.

A row's result does not depend on other rows. Knows nothing of where adapters come from.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.native import build

Ints = npt.NDArray[np.int64]
Parts = Sequence[tuple[slice, torch.Tensor]]  # some output features of the layer, and their B [out_features, rank]

ROWS, RANKS, INPUTS, OUTPUTS = 4, 8, 16, 64  # as in lora_products.h
MOST_RANKS = 8192
_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def load_function() -> Any:
    """Returns pd_lora; None without the kernels."""
    if not build.are_wanted():
        return None
    try:
        function = build.load().pd_lora
    except build.KernelsUnavailable:  # the model's loader has logged why
        return None
    function.argtypes = [_Pointer, _Int, _Int, _Pointer, _Int, _Pointer, _Pointer, _Int, _Pointer, _Int]
    function.restype = None
    return function


class StepBlocks:
    """The rows of a step with adapters, in C's form: blocks of at most four rows of one adapter."""

    def __init__(self, slots: Ints) -> None:
        """`slots` [num_rows]: the slots of the rows' adapters; 0: no adapter."""
        rows = np.flatnonzero(slots)
        self._rows = rows[np.argsort(slots[rows], kind="stable")]
        present, counts = np.unique(slots[rows], return_counts=True)
        firsts = np.cumsum(counts) - counts
        blocks = [
            (slot, first + at, min(ROWS, count - at))
            for slot, first, count in zip(present.tolist(), firsts.tolist(), counts.tolist(), strict=True)
            for at in range(0, count, ROWS)
        ]
        self.row_ids = torch.from_numpy(self._rows)
        self._blocks = np.array(blocks, dtype=np.int64).reshape(-1, 3)
        self.rows, self.blocks = self._rows.ctypes.data, self._blocks.ctypes.data
        self.num_blocks = len(blocks)
        self.most_slot = int(slots.max(initial=0))


class LoraTable:
    """The adapters of one linear layer, by their slots."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Ints, list[torch.Tensor]]] = {}
        self._addresses: Ints = np.zeros(8, dtype=np.int64)  # by slot; 0: the slot's adapter does not change this layer

    @staticmethod
    def is_possible() -> bool:
        return load_function() is not None

    def put(self, slot: int, a: torch.Tensor, parts: Parts) -> None:
        """Adds an adapter, on any thread. `a`: A of all parts, joined to [sum of ranks, in_features]; all float32."""
        packed_a, packed_bs = _packed_a(a), [_packed_b(b) for _, b in parts]
        numbers, first = [packed_a.shape[0] * RANKS, len(parts), packed_a.data_ptr()], 0
        assert numbers[0] <= MOST_RANKS
        for (outputs, b), packed_b in zip(parts, packed_bs, strict=True):
            numbers += [first, b.shape[1], outputs.start, outputs.stop - outputs.start, packed_b.data_ptr()]
            first += b.shape[1]
        record = np.array(numbers, dtype=np.int64)
        self.kept[slot] = record, [packed_a, *packed_bs]
        addresses = np.zeros(max(len(self._addresses), 2 * slot), dtype=np.int64)
        addresses[: len(self._addresses)] = self._addresses
        addresses[slot] = record.ctypes.data
        self._addresses = addresses  # replaced as a whole, because a running step may use the old array

    def drop(self, slot: int) -> None:
        """Removes an adapter that no running step uses."""
        if slot in self.kept:
            self._addresses[slot] = 0
            del self.kept[slot]

    def add(self, x: torch.Tensor, y: torch.Tensor, blocks: StepBlocks) -> None:
        """Adds the adapters' outputs for x [num_rows, in_features] to y [num_rows, out_features]; both float32."""
        assert x.dtype == y.dtype == torch.float32
        assert x.stride(1) == y.stride(1) == 1
        addresses = self._addresses
        if len(addresses) <= blocks.most_slot:
            addresses = np.concatenate((addresses, np.zeros(blocks.most_slot, dtype=np.int64)))
        load_function()(
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            y.data_ptr(),
            y.stride(0),
            blocks.rows,
            blocks.blocks,
            blocks.num_blocks,
            addresses.ctypes.data,
            torch.get_num_threads(),
        )


def _packed_a(a: torch.Tensor) -> torch.Tensor:
    """Returns A [rank, in_features] in C's order, padded with zeros."""
    ranks, inputs = -(-a.shape[0] // RANKS), -(-a.shape[1] // INPUTS)
    padded = a.new_zeros((ranks * RANKS, inputs * INPUTS))
    padded[: a.shape[0], : a.shape[1]] = a
    return padded.view(ranks, RANKS, inputs, INPUTS).permute(0, 2, 1, 3).contiguous()


def _packed_b(b: torch.Tensor) -> torch.Tensor:
    """Returns B [out_features, rank] in C's order, padded with zeros."""
    outputs = -(-b.shape[0] // OUTPUTS)
    padded = b.new_zeros((outputs * OUTPUTS, b.shape[1]))
    padded[: b.shape[0]] = b
    return padded.view(outputs, OUTPUTS, b.shape[1]).permute(0, 2, 1).contiguous()
