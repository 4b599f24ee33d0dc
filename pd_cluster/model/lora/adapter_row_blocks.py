"""A step's rows by adapter, on an accelerator: blocks of rows of one adapter each. Knows nothing of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.devices.device import Device
from pd_cluster.model.inputs.forward_batch import on_device

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
BLOCK_ROWS = 16  # of a block
MOST_ADAPTERS = 1024  # on a device at a time


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedBlocks:
    """`rows` [num_places] int32: those with adapters, by adapter. `blocks` [num_blocks, 3] int32: an adapter's place in
    the tables, the first of its places, and how many; a block of none is skipped.
    """

    rows: torch.Tensor
    blocks: torch.Tensor


def blocks_of(slots: Ints, places: Mapping[int, int]) -> tuple[Ints32, Ints32]:
    """Returns the arrays of DeviceBlocks; `slots` [num_rows]: the rows' adapters, 0 for none."""
    rows = np.flatnonzero(slots)
    rows = rows[np.argsort(slots[rows], kind="stable")]
    found, firsts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
    blocks = [
        (places[slot], first + at, min(BLOCK_ROWS, count - at))
        for slot, first, count in zip(found.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        for at in range(0, count, BLOCK_ROWS)
    ]
    return rows.astype(np.int32), np.array(blocks, dtype=np.int32).reshape(-1, 3)


def most_blocks(num_rows: int, max_loras: int) -> int:
    """Returns the most blocks of so many rows with at most `max_loras` adapters."""
    return num_rows // BLOCK_ROWS + min(num_rows, max_loras)


def copied(slots: Ints, places: Mapping[int, int], device: Device) -> AdaptedBlocks:
    rows, blocks = blocks_of(slots, places)
    return AdaptedBlocks(**on_device({"rows": rows, "blocks": blocks}, device))
