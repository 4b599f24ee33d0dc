"""Tokens that a device has chosen and copies to the host. Does not use requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_streams import mark
from pd_cluster.model.inputs.forward_batch import on_device
from pd_cluster.model.inputs.step_input import StepInput
from pd_cluster.model.sampling.row_logprobs import PendingLogprobs, logprobs_from
from pd_cluster.model.sampling.sampler import Sampled


class Tokens(Protocol):
    """The tokens chosen for each row of a launched step."""

    def wait(self) -> list[Sampled]:
        """Returns the tokens once the device has produced them."""


class After(NamedTuple):
    """The source of a step's input ids before the host has them: rows of the previous step's tokens."""

    tokens: Any  # the runner's own `Tokens`
    rows: Sequence[int | None]  # one entry for each chunk of a single token; None: the host has that chunk's tokens

    def input_ids(self, step: StepInput) -> torch.Tensor:
        """Returns the step's input ids, [num_tokens] int64, on the device that chose the previous tokens."""
        rows = [row for row in self.rows if row is not None]
        chosen: torch.Tensor = self.tokens.rows(rows)
        if len(rows) == len(step.input_ids):
            return chosen
        starts = np.cumsum(step.rows[:, 0]) - step.rows[:, 0]
        at = starts[[row is not None for row in self.rows]]
        there = on_device({"input_ids": step.input_ids, "at": at}, self.tokens.device)
        return there["input_ids"].index_copy(0, there["at"], chosen)


class DeviceTokens:
    """Tokens that are copied to the host while the device continues."""

    def __init__(self, ids: torch.Tensor, device: Device, telling: PendingLogprobs | None = None) -> None:
        """`ids` [num_rows] int64, on the device; `telling`: the logprobs of some of them."""
        self._ids, self.device, self._telling = ids, device, telling
        self._host = self._on_the_way(ids)
        self._numbers = None if telling is None else self._on_the_way(telling.numbers)
        self._copied = mark(device)

    def _on_the_way(self, there: torch.Tensor) -> torch.Tensor:
        host = torch.empty(there.shape, dtype=there.dtype, pin_memory=self.device.is_accelerator)
        return host.copy_(there, non_blocking=True)

    def wait(self) -> list[Sampled]:
        self._copied.wait()
        ids: list[int] = self._host.tolist()
        if self._telling is None or self._numbers is None:
            return [Sampled(token_id, None) for token_id in ids]
        rows, told = self._telling.rows, logprobs_from(self._numbers.numpy(), self._telling)
        found = dict(zip(rows, told, strict=True))
        return [Sampled(token_id, found.get(row)) for row, token_id in enumerate(ids)]

    def rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Returns the tokens of some rows, [len(rows)] int64, on the device."""
        if list(rows) == list(range(len(self._ids))):
            return self._ids
        return self._ids.index_select(0, on_device({"rows": np.array(rows, dtype=np.int64)}, self.device)["rows"])
