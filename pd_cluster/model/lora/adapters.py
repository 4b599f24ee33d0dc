"""The adapters of one loaded model: which of its linear layers can have them, and those that are loaded.

Modules are named as transformers names them; a fused layer has several. On a rank that has a share of the model, A and
B are cut as the weights beside them are, so that existing sums add the parts up.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pd_cluster.checkpoints.lora_folder import LoraFolder, Stored
from pd_cluster.devices.device import Device, synchronize, use
from pd_cluster.errors import ModelError
from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.layers.linear import Linear
from pd_cluster.model.layers.packing import PackedModule
from pd_cluster.model.lora.adapted import (
    NONE,
    AdaptedLinear,
    AdaptedModule,
    DeviceTable,
    Features,
    LowRank,
    Site,
    StepRows,
)
from pd_cluster.model.lora.device_rows import MOST_ADAPTERS
from pd_cluster.model.parallel.plan import WHOLE, Cut
from pd_cluster.model.parallel.shard import take

log = logging.getLogger(__name__)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

CutOf = Callable[[str, tuple[int, ...]], Cut]
MakeTable = Callable[[list[slice], int], DeviceTable]


def uncut(key: str, shape: tuple[int, ...]) -> Cut:
    return WHOLE


class Adapters:
    """`cut`: this rank's share of a weight, by its name in the files."""

    def __init__(self, cut: CutOf = uncut, name_of: Callable[[str], str] = str) -> None:
        """`name_of`: a weight's name in the model that is served, by its name in the model that was trained."""
        self.rows = StepRows()
        self.slots: dict[str, int] = {}  # by the adapters' digests
        self._slots_given = itertools.count(NONE + 1)  # none of them twice
        self._places: dict[str, tuple[Site, Features]] = {}
        self._cut, self._name_of = cut, name_of
        self._lock = threading.Lock()

    # ---- the model's layers

    def beside(
        self, layer: Linear, path: str, modules: dict[str, tuple[int, int]], order: torch.Tensor | None
    ) -> Linear:
        """Returns the layer with adapters beside it.

        `modules`: out_features and in_features of the modules of `path` that it joins, in their order. `order`: the
        layer's i-th output feature is the `order[i]`-th of theirs together; it keeps each module's in one piece.
        """
        site, first = Site(self.rows), 0
        for name, (out_features, in_features) in modules.items():
            outputs = slice(first, first + out_features)
            own = None if order is None else order[outputs] - first
            assert own is None or torch.equal(own.sort().values, torch.arange(out_features))
            self._places[f"{path}.{name}"] = site, Features(in_features, outputs, own)
            first += out_features
        return AdaptedLinear(layer, site)

    def take_over(self, model: torch.nn.Module, prefix: str = "") -> None:
        """Puts adapters beside the linear modules of transformers' layers.

        Which of them can have adapters shows when they are `watched`: others, such as those of experts, see other rows
        than the step's.
        """
        for path, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                features = _features(child)
                whole = ".".join(part for part in (prefix, path, name) if part)
                if features is None or not any(part.isdigit() for part in whole.split(".")):
                    continue  # not in a layer: the output layer
                site = Site(self.rows)
                setattr(parent, name, AdaptedModule(child, site, *features))
                self._places[whole] = site, Features(features[1], slice(0, features[0]))

    @contextmanager
    def watched(self, num_rows: int) -> Iterator[None]:
        """Watches a step of so many rows; modules that did not compute exactly these rows, once, take no adapters."""
        sites = {id(site): site for site, _ in self._places.values()}.values()
        for site in sites:
            site.nums_rows = []
        yield
        for name, (site, _) in list(self._places.items()):
            if site.nums_rows != [num_rows]:
                del self._places[name]
        for site in sites:
            site.nums_rows = None

    def begin(self, batch: ForwardBatch) -> None:
        """Starts a step."""
        if batch.adapted_rows is not None:
            self.rows.use(batch.adapted_rows)
        else:
            self.rows.begin(batch.adapters, batch.query_lens)

    def move_to(self, device: Device, make: MakeTable) -> None:
        """Computes on this device, before any adapter is loaded. `make`: a table of a layer's outputs and inputs."""
        assert not self.slots
        self.rows.device, self.rows.has_tables = device, True
        for site, modules, num_inputs in self._layers():
            site.table, site.there = None, make(modules, num_inputs)

    def _layers(self) -> list[tuple[Site, list[slice], int]]:
        found: dict[int, tuple[Site, list[slice], int]] = {}
        for site, part in self._places.values():
            found.setdefault(id(site), (site, [], part.in_features))[1].append(part.outputs)
        return list(found.values())

    # ---- adapters

    def load(self, folder: LoraFolder, slot: int | None = None) -> int:
        """Loads an adapter on any thread, while steps are computed; returns its slot. Raises ModelError.

        `slot`: the one that it has on rank 0; None: the next.
        """
        with self._lock:
            known = self.slots.get(folder.digest)
            if known is not None and slot in (None, known):
                return known
            slot = self.next_slot() if slot is None else slot
            use(self.rows.device)  # where it is an accelerator, this thread's launches go there
            parts_of_sites = self._parts(folder)
            self._take_place(slot, folder)
            for site, parts in parts_of_sites:
                site.put(slot, parts)
            if known is not None:  # of a load that rank 0 has given up
                self._drop(known)
            synchronize(self.rows.device)  # other threads' launches do not wait for this one's
            self.slots[folder.digest] = slot  # last: now requests may have it
            log.info("adapter %s: %d modules of %s", folder.digest[:12], len(folder.modules), folder.path)
            return slot

    def drop(self, digest: str) -> None:
        """Forgets an adapter that no request has, between two steps."""
        with self._lock:
            slot = self.slots.pop(digest, None)
            if slot is not None:
                self._drop(slot)
                log.info("adapter %s is dropped", digest[:12])

    def _drop(self, slot: int) -> None:
        synchronize(self.rows.device)  # steps that have it are launched, and may not be computed
        for site, _ in self._places.values():
            site.drop(slot)
        self.rows.places.pop(slot, None)

    def _take_place(self, slot: int, folder: LoraFolder) -> None:
        """Gives an adapter a place in the device's tables. Raises ModelError if they are full."""
        places = self.rows.places
        free = set(range(MOST_ADAPTERS)).difference(places.values())
        if not free:
            raise ModelError(f"{folder.path}: {MOST_ADAPTERS} adapters are loaded, as many as a device takes")
        places[slot] = min(free)

    def adopt(self, new: Adapters) -> None:
        """Puts the adapters that are loaded here beside the layers of `new`, which has none.

        `new` belongs to the same model, loaded again, and is of no use afterwards.
        """
        with self._lock:
            for name, (site, _) in new._places.items():
                old, _ = self._places[name]
                site.table, site.additions = old.table, old.additions
            new.rows.place = self.rows.place
            self.rows, self._places = new.rows, new._places

    def next_slot(self) -> int:
        """Returns a slot that no adapter has had."""
        return next(self._slots_given)

    def _parts(self, folder: LoraFolder) -> list[tuple[Site, list[tuple[slice, LowRank]]]]:
        data = bytearray(folder.weights())
        found: dict[int, tuple[Site, list[tuple[slice, LowRank]]]] = {}
        for name, pair in folder.modules.items():
            place = f"{folder.file}: {name}"
            key = self._name_of(f"{name}.weight").removesuffix(".weight")
            if key not in self._places:
                raise ModelError(f"{place}: this model has no linear layer of this name that takes adapters")
            site, part = self._places[key]
            low = self._low_rank(place, key, part, _read(place, data, pair.a), _read(place, data, pair.b))
            low.b.mul_(folder.settings.scale_of(name))
            if not low.b.isfinite().all():
                raise ModelError(f"{place}: numbers too large for float32 once they are scaled (lora_alpha)")
            found.setdefault(id(site), (site, []))[1].append((part.outputs, low))
        return list(found.values())

    def _low_rank(self, place: str, key: str, part: Features, a: torch.Tensor, b: torch.Tensor) -> LowRank:
        """Returns this rank's share, in the layer's order. Raises ModelError."""
        given = f"A {list(a.shape)} and B {list(b.shape)}"
        cut = self._cut(f"{key}.weight", (b.shape[0], a.shape[1]))
        if cut.pieces is not None:
            a, b = (a, take(b, cut)) if cut.dim == 0 else (take(a, cut), b)
        out_features = part.outputs.stop - part.outputs.start
        if a.shape[1] != part.in_features or b.shape[0] != out_features:
            share = "" if cut.pieces is None else " for this rank's share"
            raise ModelError(
                f"{place}: {given} do not fit this model's layer, which has {part.in_features} inputs and "
                f"{out_features} outputs{share}"
            )
        return LowRank(a, b.clone() if part.order is None else b[part.order])


def _read(place: str, data: bytearray, stored: Stored) -> torch.Tensor:
    """Returns a matrix of the file as float32. Raises ModelError if one of its numbers is none."""
    count = stored.shape[0] * stored.shape[1]
    matrix = torch.frombuffer(data, dtype=DTYPES[stored.dtype], count=count, offset=stored.start)
    if not matrix.isfinite().all():
        raise ModelError(f"{place}: NaN or infinity among its numbers")
    return matrix.float().view(stored.shape)


def _features(module: Any) -> tuple[int, int] | None:
    """Returns out_features and in_features of a linear module of known kind."""
    if isinstance(module, PackedModule) or type(module) is torch.nn.Linear:
        return int(module.out_features), int(module.in_features)
    if type(module).__name__ == "Conv1D":  # GPT-2's, whose weight is transposed
        return int(module.weight.shape[1]), int(module.weight.shape[0])
    return None
