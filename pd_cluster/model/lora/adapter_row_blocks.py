"""Splits a step's rows on an accelerator into blocks of rows with one adapter each. Independent of kernels."""

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
BLOCK_ROWS = 16  # rows in a block
MOST_ADAPTERS = 1024  # loaded on a device at once, at most


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedBlocks:
    """Rows with adapters, sorted by adapter.

    A row of `blocks` has the adapter's index in the device's tables, the index in `rows` of the block's first row, and
    the block's number of rows. Blocks of 0 rows are skipped.
    """

    rows: torch.Tensor  # [num_adapted] int32: row indexes
    blocks: torch.Tensor  # [num_blocks, 3] int32


def blocks_of(slots: Ints, places: Mapping[int, int]) -> tuple[Ints32, Ints32]:
    """Returns `rows` and `blocks` of AdaptedBlocks; `slots` [num_rows]: the adapter slot of each row, 0 for none."""
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
    """Returns how many blocks `num_rows` rows with at most `max_loras` adapters can need."""
    return num_rows // BLOCK_ROWS + min(num_rows, max_loras)


def copied(slots: Ints, places: Mapping[int, int], device: Device) -> AdaptedBlocks:
    rows, blocks = blocks_of(slots, places)
    return AdaptedBlocks(**on_device({"rows": rows, "blocks": blocks}, device))
