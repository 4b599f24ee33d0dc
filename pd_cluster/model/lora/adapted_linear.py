"""Linear layers with adapters: y = W x + B (A x) for rows with an adapter, y = W x for all other rows.

The rows of one adapter are computed together, and a row's values do not depend on other rows. A step without adapters
costs one comparison per layer. Does not deal with files and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.devices.device import CPU, Device
from pd_cluster.kv.pool_memory import ids_on
from pd_cluster.model.layers.packed_linear import Linear, make_linear
from pd_cluster.model.lora.adapter_row_blocks import AdaptedBlocks, copied
from pd_cluster.model.lora.device_addition import ActivationDevice, DeviceAddition
from pd_cluster.native.lora_products import LoraTable, StepBlocks

Ints = npt.NDArray[np.int64]
NONE = 0  # the slot of rows without an adapter
RANK_MULTIPLE = 16  # ranks are padded with zeros to a multiple, so that parts of a product start at vector boundaries

# The rows of one adapter in a step, ascending; a slice if they are adjacent.
Segment = tuple[int, slice | torch.Tensor]


class StepRows:
    """Maps the current step's rows to adapter slots; all layers of a model share one instance."""

    def __init__(self) -> None:
        self.are_adapted = False  # whether any row has an adapter
        self.place: ActivationDevice | None = None  # the layers' device; None: host memory
        self._slots: Ints | None = None  # [num_rows]
        self._segments: Sequence[Segment] | None = None
        self._blocks: StepBlocks | None = None
        self.device: Device = CPU
        self.has_tables = False  # whether device kernels have tables
        self.places: dict[int, int] = {}  # slot -> index in the tables
        self._on_device: AdaptedBlocks | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether an accelerator computes the adapters."""
        return self.place is not None or self.has_tables

    def begin(self, slots: Ints | None, lens: Ints) -> None:
        """Starts a step. Sequence i has `lens[i]` rows and the adapter in `slots[i]`; None: no sequence has one."""
        self._set(None if slots is None else np.repeat(slots, lens))

    def use(self, blocks: AdaptedBlocks) -> None:
        """Starts a step whose rows are in device buffers that the caller fills."""
        self._set(None)
        self.are_adapted, self._on_device = True, blocks

    def keep(self, rows: Ints | None) -> None:
        """Drops all of the current rows except `rows` [num_kept], which may be None if no row has an adapter."""
        if self._slots is not None:
            assert rows is not None
            self._set(self._slots[rows])

    @property
    def on_device(self) -> AdaptedBlocks:
        """The rows by adapter, for the kernels of a device."""
        if self._on_device is None:
            assert self._slots is not None
            self._on_device = copied(self._slots, self.places, self.device)
        return self._on_device

    def take(self, step: StepRows, rows: torch.Tensor) -> None:
        """Takes the adapters of these rows of `step`, [num_taken] int64, for layers that compute only these rows."""
        self._set(None if step._slots is None else step._slots[rows.numpy()])

    @property
    def segments(self) -> Sequence[Segment]:
        """Returns the rows by adapter; at least one row must have an adapter."""
        if self._segments is None:
            assert self._slots is not None
            found = _segments(self._slots)
            if (place := self.place) is not None:
                found = [(slot, at if isinstance(at, slice) else ids_on(place.device, at)) for slot, at in found]
            self._segments = found
        return self._segments

    @property
    def blocks(self) -> StepBlocks:
        """Returns the rows by adapter for the C kernel."""
        if self._blocks is None:
            assert self._slots is not None
            self._blocks = StepBlocks(self._slots)
        return self._blocks

    def _set(self, slots: Ints | None) -> None:
        self._slots, self.are_adapted = slots, slots is not None and bool(slots.any())
        self._segments = self._blocks = self._on_device = None


def _segments(slots: Ints) -> list[Segment]:
    found: list[Segment] = []
    for slot in np.unique(slots):
        if slot == NONE:
            continue
        rows = np.flatnonzero(slots == slot)
        first, stop = int(rows[0]), int(rows[-1]) + 1
        found.append((int(slot), slice(first, stop) if stop - first == len(rows) else torch.from_numpy(rows)))
    return found


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank pair of one module. `a` [rank, in_features]; `b` [out_features, rank], already scaled; float32."""

    a: torch.Tensor
    b: torch.Tensor


class Addition:
    """An adapter's part of one layer without C kernels: one product for the A of all modules, then one for each B."""

    __slots__ = ("_a", "_parts")

    def __init__(self, parts: Sequence[tuple[slice, LowRank]]) -> None:
        """`parts`: slices of the layer's output features, each with the matrices whose product is added to it."""
        self._a = make_linear(torch.cat([padded_ranks(part.a, 0) for _, part in parts]))
        self._parts: list[tuple[slice, slice, Linear]] = []
        first = 0
        for outputs, part in parts:
            b = padded_ranks(part.b, 1)
            self._parts.append((slice(first, first + b.shape[1]), outputs, make_linear(b)))
            first += b.shape[1]

    def add(self, x: torch.Tensor, y: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Computes the adapter's outputs from `rows` of x [num_rows, in_features], and adds them to the same rows of y
        [num_rows, out_features].
        """
        low = self._a(x[rows].float())
        for ranks, outputs, b in self._parts:
            added, place = b(low[:, ranks].contiguous()), y[:, outputs]
            if y.dtype != torch.float32:
                place[rows] = (place[rows].float() + added).to(y.dtype)
            elif isinstance(rows, slice):
                place[rows] += added
            else:
                place.index_add_(0, rows, added)


def padded_ranks(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    missing = -matrix.shape[dim] % RANK_MULTIPLE
    if not missing:
        return matrix
    shape = list(matrix.shape)
    shape[dim] = missing
    return torch.cat((matrix, matrix.new_zeros(shape)), dim)


@dataclass(frozen=True, slots=True)
class ModuleFeatures:
    """The features, on this rank, of a module of the transformers model. Its layer may join several modules.

    `outputs`: the module's slice of the layer's output features. `order` [out_features] int64: feature i of this slice
    is the module's feature `order[i]`; None: the order is the same.
    """

    in_features: int
    outputs: slice
    order: torch.Tensor | None = None


class DeviceTable(Protocol):
    """Adds the outputs of loaded adapters to one layer on a device; adapters are addressed by table index."""

    def put(self, place: int, parts: Sequence[tuple[slice, LowRank]]) -> None: ...

    def drop(self, place: int) -> None: ...

    def add(self, x: torch.Tensor, y: torch.Tensor, step: AdaptedBlocks) -> None: ...


@dataclass(slots=True)
class LinearAdapters:
    """The parts of the loaded adapters for one linear layer, by slot."""

    rows: StepRows
    table: LoraTable | None = field(default_factory=lambda: LoraTable() if LoraTable.is_possible() else None)
    additions: dict[int, Addition | DeviceAddition] = field(default_factory=dict)  # if C kernels are not available
    nums_rows: list[int] | None = None  # rows of each call, recorded during `watched`
    there: DeviceTable | None = None  # on an accelerator, replaces `table` and `additions`

    def put(self, slot: int, parts: Sequence[tuple[slice, LowRank]]) -> None:
        """Adds an adapter; any thread may call this. `parts`: slices of the layer's output features, each with its
        matrices.
        """
        if self.there is not None:
            self.there.put(self.rows.places[slot], parts)
        elif self.rows.place is not None:
            self.additions[slot] = DeviceAddition([(at, part.a, part.b) for at, part in parts], self.rows.place)
        elif self.table is None:
            self.additions[slot] = Addition(parts)
        else:
            self.table.put(slot, torch.cat([part.a for _, part in parts]), [(at, part.b) for at, part in parts])

    def drop(self, slot: int) -> None:
        """Removes an adapter that no row uses. Call it between steps."""
        if self.there is not None:
            self.there.drop(self.rows.places[slot])
        self.additions.pop(slot, None)
        if self.table is not None:
            self.table.drop(slot)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' outputs for x [..., num_rows, in_features] to y in place; returns y."""
        if self.nums_rows is not None:
            self.nums_rows.append(x.numel() // x.shape[-1])
        if not self.rows.are_adapted:
            return y
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if self.there is not None:
            self.there.add(flat_x, flat_y, self.rows.on_device)
        elif self.table is not None and self.rows.place is None:
            self._add_in_c(self.table, flat_x.float().contiguous(), flat_y)
        else:
            for slot, rows in self.rows.segments:
                if (addition := self.additions.get(slot)) is not None:
                    addition.add(flat_x, flat_y, rows)
        return y

    def _add_in_c(self, table: LoraTable, x: torch.Tensor, y: torch.Tensor) -> None:
        blocks = self.rows.blocks
        if y.dtype == torch.float32:
            table.add(x, y, blocks)
            return
        added = torch.zeros(y.shape)
        table.add(x, added, blocks)
        rows = blocks.row_ids
        y[rows] = (y[rows].float() + added[rows]).to(y.dtype)


class AdaptedLinear:
    """A fused layer's product with adapters. `part`: the slice of the inputs that adapters read; None: all inputs."""

    __slots__ = ("_base", "_part", "_site")

    def __init__(self, base: Linear, site: LinearAdapters, part: slice | None = None) -> None:
        self._base, self._site, self._part = base, site, part

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._site.add(x if self._part is None else x[..., self._part], self._base(x))


class AdaptedModule(torch.nn.Module):
    """A linear module with adapters, in place of the same module of the transformers model."""

    def __init__(self, base: torch.nn.Module, site: LinearAdapters, out_features: int, in_features: int) -> None:
        super().__init__()
        self._base = base
        self._site = site
        self.out_features, self.in_features = out_features, in_features
        self.weight = base.weight  # other code reads the weight's dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._site.add(x, self._base(x))
