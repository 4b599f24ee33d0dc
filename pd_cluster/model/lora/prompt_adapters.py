"""Prompt adapters of a loaded model, which supply a prompt's first tokens, the virtual ones.

Prompt tuning and p-tuning supply embeddings. Prefix tuning supplies keys and values: the rows of virtual tokens are
computed like all others, then the adapter's keys and values overwrite theirs in the pool, layer by layer. The scheduler
ends a chunk after the virtual tokens, so that later rows read the overwritten values.
"""

from __future__ import annotations

import logging

import torch

from pd_cluster.checkpoints.prompt_adapter_folder import TENSOR, PromptFolder
from pd_cluster.devices.device import CPU, Device, use
from pd_cluster.devices.device_streams import mark
from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.model.inputs.virtual_token_rows import Ints, VirtualRows, VirtualTokens
from pd_cluster.model.lora.adapter_slots import SlotTable
from pd_cluster.model.lora.tensor_placement import DTYPES

log = logging.getLogger(__name__)


class PromptAdapters(SlotTable[PromptFolder]):
    """The prompt adapters of one rank."""

    def __init__(
        self,
        hidden_size: int,
        layout: KVLayout,
        factor: float = 1.0,
        order: torch.Tensor | None = None,
        device: Device = CPU,
    ) -> None:
        """`factor`: the model's factor of embeddings. `order`: the order of a key's features in the pool; None: the
        model's order.
        """
        super().__init__("prompt adapter")
        self._hidden_size, self._layout, self._factor, self._order = hidden_size, layout, factor, order
        self._device = device
        self._loaded: dict[int, VirtualTokens] = {}

    def put(self, slot: int, folder: PromptFolder) -> None:
        use(self._device)  # this thread copies to the accelerator
        self._loaded[slot] = self._read(folder)
        mark(self._device).wait()  # launches of other threads would not wait for this thread's
        log.info("prompt adapter %s: %d virtual tokens of %s", folder.digest[:20], folder.num_tokens, folder.path)

    def clear_slot(self, slot: int) -> None:
        mark(self._device).wait()  # launched steps that use the adapter may not have finished
        del self._loaded[slot]

    def rows(self, parts: Ints) -> VirtualRows:
        return VirtualRows(parts, [self._loaded[slot] for slot in parts[:, 0].tolist()])

    def _read(self, folder: PromptFolder) -> VirtualTokens:
        place, stored = f"{folder.file}: {TENSOR}", folder.tensor
        count = stored.shape[0] * stored.shape[1]
        self._check_width(place, folder)
        matrix = torch.frombuffer(folder.weights(), dtype=DTYPES[stored.dtype], count=count, offset=stored.start)
        if not matrix.isfinite().all():
            raise ModelError(f"{place}: contains NaN or infinity")
        matrix = matrix.float().view(stored.shape).to(self._device.torch_name, copy=True)
        if folder.kind == "prompt":
            return VirtualTokens(embeddings=matrix if self._factor == 1.0 else matrix * self._factor)
        return VirtualTokens(kv=self._given_kv(matrix))

    def _check_width(self, place: str, folder: PromptFolder) -> None:
        """Raises ModelError if the adapter's rows have the wrong width for the model."""
        given, layout = folder.tensor.shape[1], self._layout
        if folder.kind == "prompt":
            if given != self._hidden_size:
                raise ModelError(f"{place}: rows have {given} values; this model has {self._hidden_size}")
            return
        if {plane.name for plane in layout.planes} != {"k", "v"} or layout.width_of("k") != layout.width_of("v"):
            raise ModelError(f"{place}: this model's cache has no plain keys and values, which prefix tuning needs")
        width = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
        if given != width:
            raise ModelError(
                f"{place}: rows have {given} values; this model's keys and values have {width} ({layout.num_layers} "
                f"layers, {layout.num_kv_heads} heads of {layout.head_dim})"
            )

    def _given_kv(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns keys and values of this rank's heads, with features in the pool's order."""
        layout = self._layout
        kv = matrix.view(len(matrix), layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
        kv = kv[..., slice(*layout.head_range), :].permute(1, 2, 0, 3, 4).contiguous()
        if self._order is not None:
            kv[:, 0] = kv[:, 0][..., self._order.to(kv.device)]
        return kv
