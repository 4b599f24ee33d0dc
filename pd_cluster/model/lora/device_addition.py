"""Adds adapters to a layer on an accelerator with plain products, one adapter after another, in the model's dtype.

Works on all devices, because it needs no kernel. Rows are gathered and added only along the first dimension: no device
then copies the whole tensor or waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear


class ActivationDevice(NamedTuple):
    """The device and the dtype of the activations."""

    device: torch.device
    dtype: torch.dtype


class DeviceAddition:
    """An adapter's part of one layer: one product for the A of all modules, then one per module for its B."""

    __slots__ = ("_a", "_parts")

    def __init__(self, parts: Sequence[tuple[slice, torch.Tensor, torch.Tensor]], place: ActivationDevice) -> None:
        """`parts`: slices of the layer's output features, with A [rank, in_features] and B [out_features, rank]."""
        self._a = torch.cat([a for _, a, _ in parts]).to(place.device, place.dtype)
        self._parts: list[tuple[slice, slice, torch.Tensor]] = []
        first = 0
        for outputs, a, b in parts:
            self._parts.append((slice(first, first + len(a)), outputs, b.to(place.device, place.dtype).contiguous()))
            first += len(a)

    def add(self, x: torch.Tensor, y: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Computes the adapter's outputs from `rows` of x [num_rows, in_features], and adds them to the same rows of y
        [num_rows, out_features].

        `rows` [num_chosen] int64 is on the device.
        """
        if isinstance(rows, slice):
            low, place = linear(x[rows], self._a), y[rows]
            for ranks, outputs, b in self._parts:
                place[:, outputs] += linear(low[:, ranks], b)
            return
        low = linear(x.index_select(0, rows), self._a)
        added = y.new_zeros(len(rows), y.shape[1])
        for ranks, outputs, b in self._parts:
            added[:, outputs] = linear(low[:, ranks], b)
        y.index_add_(0, rows, added)
