"""The adapters of one loaded model: its modules that can have them, and those that are loaded."""

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
    """`places`: the modules of the model that can have adapters."""

    def __init__(self, weights: ModelWeights | None = None) -> None:
        """`weights` None: a whole model, with names as in the files."""
        super().__init__("adapter")
        self.places = LoraTargets()
        self._weights = weights or ModelWeights()

    def put(self, slot: int, folder: LoraFolder) -> None:
        device = self.places.rows.device
        use(device)  # where it is an accelerator, this thread's launches go there
        placed = TensorPlacement(self.places, self._weights, folder).puts()  # all of it, before any is put
        self._take_place(slot, folder)
        for put in placed:
            put(slot)
        mark(device).wait()  # other threads' launches do not wait for this one's
        log.info("adapter %s: %d parts of %s", folder.digest[:12], len(placed), folder.path)

    def take_away(self, slot: int) -> None:
        mark(self.places.rows.device).wait()  # steps that have it are launched, and may not be computed
        self.places.drop(slot)
        self.places.rows.places.pop(slot, None)

    def _take_place(self, slot: int, folder: LoraFolder) -> None:
        """Gives an adapter a place in the device's tables. Raises ModelError if they are full."""
        places = self.places.rows.places
        free = set(range(MOST_ADAPTERS)).difference(places.values())
        if not free:
            raise ModelError(f"{folder.path}: {MOST_ADAPTERS} adapters are loaded, as many as a device takes")
        places[slot] = min(free)

    def adopt(self, new: Adapters) -> None:
        """Puts the adapters that are loaded here beside the layers of `new`, which has none.

        `new` belongs to the same model, loaded again, and is of no use afterwards.
        """
        with self._lock:
            new.places.take_from(self.places)
            self.places = new.places
