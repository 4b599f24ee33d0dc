"""Tokens that a device has chosen, on their way to the host. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pd_cluster.device import Device
from pd_cluster.model.batch import on_device
from pd_cluster.streams import mark


class Tokens(Protocol):
    """The token that was chosen for each row of a step that was launched."""

    def wait(self) -> list[int]:
        """Once the device has come so far."""


class After(NamedTuple):
    """A step's input ids, before the host knows them: rows of the tokens of the step before."""

    tokens: Any  # the runner's own `Tokens`
    rows: Sequence[int]


class DeviceTokens:
    """Copied to the host while the device goes on."""

    def __init__(self, ids: torch.Tensor, device: Device) -> None:
        """`ids` [num_rows] int64, on the device."""
        self._ids, self._device = ids, device
        self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=device.is_accelerator)
        self._host.copy_(ids, non_blocking=True)
        self._copied = mark(device)

    def wait(self) -> list[int]:
        self._copied.wait()
        found: list[int] = self._host.tolist()
        return found

    def rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Those of some rows, [len(rows)] int64, on the device."""
        if list(rows) == list(range(len(self._ids))):
            return self._ids
        return self._ids.index_select(0, on_device({"rows": np.array(rows, dtype=np.int64)}, self._device)["rows"])
