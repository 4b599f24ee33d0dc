"""The adapters of one loaded model: which modules can have adapters, and which adapters are loaded."""

from __future__ import annotations

import logging

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.devices.device import use
from pd_cluster.devices.device_streams import mark
from pd_cluster.errors import ModelError
from pd_cluster.model.lora.adapter_row_blocks import MOST_ADAPTERS
from pd_cluster.model.lora.adapter_slots import SlotTable
from pd_cluster.model.lora.lora_targets import LoraTargets
from pd_cluster.model.lora.tensor_placement import ModelWeights, TensorPlacement

log = logging.getLogger(__name__)


class Adapters(SlotTable[LoraFolder]):
    """`places`: the model's modules that can have adapters."""

    def __init__(self, weights: ModelWeights | None = None) -> None:
        """`weights` None: the model is whole and has the names of its files."""
        super().__init__("adapter")
        self.places = LoraTargets()
        self._weights = weights or ModelWeights()

    def put(self, slot: int, folder: LoraFolder) -> None:
        device = self.places.rows.device
        use(device)  # on an accelerator, this thread launches its work there
        placed = TensorPlacement(self.places, self._weights, folder).puts()  # all parts, before any is stored
        self._take_place(slot, folder)
        for put in placed:
            put(slot)
        mark(device).wait()  # launches of other threads would not wait for this thread's
        log.info("adapter %s: %d parts of %s", folder.digest[:12], len(placed), folder.path)

    def clear_slot(self, slot: int) -> None:
        mark(self.places.rows.device).wait()  # launched steps that use the adapter may not have finished
        self.places.drop(slot)
        self.places.rows.places.pop(slot, None)

    def _take_place(self, slot: int, folder: LoraFolder) -> None:
        """Assigns the adapter an index in the device's tables. Raises ModelError if the tables are full."""
        places = self.places.rows.places
        free = set(range(MOST_ADAPTERS)).difference(places.values())
        if not free:
            raise ModelError(
                f"{folder.path}: {MOST_ADAPTERS} adapters are loaded, the most that a device takes; drop one first"
            )
        places[slot] = min(free)

    def adopt(self, new: Adapters) -> None:
        """Attaches the adapters loaded here to the layers of `new`, which has no adapters yet.

        `new` belongs to the same model, loaded again; it must not be used afterwards.
        """
        with self._lock:
            new.places.move_adapters_from(self.places)
            self.places = new.places
        self.compare_with(new)

    def compare_with(self, new: Adapters) -> None:
        """From now on, base weights in adapters' files are compared with the weights of `new`."""
        self._weights = new._weights
