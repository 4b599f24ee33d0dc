"""Prompt adapters of a loaded model: what stands in the place of a prompt's first, virtual tokens.

Prompt tuning and p-tuning replace embeddings. Prefix tuning has finished keys and values: the rows of virtual tokens
are computed like others and nobody reads the results, because each layer's keys and values are overwritten with the
adapter's once they are in the pool. The scheduler ends a chunk behind them, so that later rows read them there.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.checkpoints.prompt_folder import TENSOR, PromptFolder
from pd_cluster.errors import ModelError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import KVPool
from pd_cluster.kv.vectors import encode, write_kv
from pd_cluster.model.lora.adapters import DTYPES
from pd_cluster.types import Request

Ints = npt.NDArray[np.int64]
NUM_COLUMNS = 4  # of `virtual_parts`

log = logging.getLogger(__name__)


def virtual_parts(chunks: Sequence[tuple[Request, int]], slots: Mapping[str, int]) -> Ints | None:
    """Returns the virtual tokens that a step computes; None: there are none.

    [num_parts, NUM_COLUMNS]: the adapter's slot, its first token, the first row of the step, and how many follow.
    """
    found: list[tuple[int, int, int, int]] = []
    row = 0
    for request, num_tokens in chunks:
        start = request.num_computed_tokens
        count = min(request.num_virtual_tokens - start, num_tokens)
        if count > 0:
            found.append((slots[request.order.variant], start, row, count))
        row += num_tokens
    return np.array(found, dtype=np.int64) if found else None


@dataclass(frozen=True, slots=True)
class Loaded:
    """`embeddings` [num_tokens, hidden_size], or `kv` [num_layers, 2, num_tokens, num_kv_heads, head_dim]; float32."""

    embeddings: torch.Tensor | None = None
    kv: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class VirtualRows:
    """A step's rows of virtual tokens, each part with its adapter."""

    parts: Ints
    adapters: Sequence[Loaded]  # by part

    def embed(self, x: torch.Tensor) -> None:
        """Replaces embeddings x, [num_tokens, hidden_size], in place."""
        for (_, first, row, count), adapter in zip(self.parts.tolist(), self.adapters, strict=True):
            if adapter.embeddings is not None:
                x[row : row + count] = adapter.embeddings[first : first + count].to(x.dtype)

    def written(self, layer_idx: int, pool: KVPool, slots: torch.Tensor) -> None:
        """Overwrites the keys and values that a layer has written; `slots` [num_tokens]: the rows' own."""
        for (_, first, row, count), adapter in zip(self.parts.tolist(), self.adapters, strict=True):
            if adapter.kv is not None:
                keys, values = (
                    encode(each[first : first + count], pool.layout.dtype) for each in adapter.kv[layer_idx]
                )
                write_kv(keys, values, *pool.layer(layer_idx), slots[row : row + count])


class PromptAdapters:
    """Those of one rank, by their variants."""

    def __init__(
        self, hidden_size: int, layout: KVLayout, factor: float = 1.0, order: torch.Tensor | None = None
    ) -> None:
        """`factor`: of all embeddings before the first layer. `order`: the pool's of a key's features; None: as is."""
        self.slots: dict[str, int] = {}
        self._hidden_size, self._layout, self._factor, self._order = hidden_size, layout, factor, order
        self._loaded: dict[int, Loaded] = {}
        self._slots_given = itertools.count(1)
        self._lock = threading.Lock()

    def load(self, folder: PromptFolder, slot: int | None = None) -> int:
        """Loads one on any thread, while steps are computed; returns its slot. Raises ModelError.

        `slot`: the one that it has on rank 0; None: the next.
        """
        with self._lock:
            known = self.slots.get(folder.digest)
            if known is not None and slot in (None, known):
                return known
            slot = self.next_slot() if slot is None else slot
            self._loaded[slot] = self._read(folder)
            self.slots[folder.digest] = slot  # last: now requests may have it
            if known is not None:
                del self._loaded[known]
            log.info("prompt adapter %s: %d virtual tokens of %s", folder.digest[:20], folder.num_tokens, folder.path)
            return slot

    def drop(self, digest: str) -> None:
        """Forgets an adapter that no request has, between two steps."""
        with self._lock:
            slot = self.slots.pop(digest, None)
            if slot is not None:
                del self._loaded[slot]

    def next_slot(self) -> int:
        """Returns a slot that no adapter has had."""
        return next(self._slots_given)

    def rows(self, parts: Ints) -> VirtualRows:
        return VirtualRows(parts, [self._loaded[slot] for slot in parts[:, 0].tolist()])

    def _read(self, folder: PromptFolder) -> Loaded:
        place, stored = f"{folder.file}: {TENSOR}", folder.tensor
        count = stored.shape[0] * stored.shape[1]
        data = bytearray(folder.weights())
        matrix = torch.frombuffer(data, dtype=DTYPES[stored.dtype], count=count, offset=stored.start)
        if not matrix.isfinite().all():
            raise ModelError(f"{place}: NaN or infinity among its numbers")
        matrix = matrix.float().view(stored.shape).clone()
        if folder.kind == "prompt":
            if stored.shape[1] != self._hidden_size:
                raise ModelError(f"{place}: rows of {stored.shape[1]}; this model has {self._hidden_size}")
            return Loaded(embeddings=matrix if self._factor == 1.0 else matrix * self._factor)
        return Loaded(kv=self._given_kv(place, matrix))

    def _given_kv(self, place: str, matrix: torch.Tensor) -> torch.Tensor:
        """Returns keys and values in the pool's order. Raises ModelError where they do not fit it."""
        layout = self._layout
        if layout.tp_size > 1:
            raise ModelError(f"{place}: prefix tuning takes one rank, not {layout.tp_size}; use prompt tuning")
        if {plane.name for plane in layout.planes} != {"k", "v"} or layout.width_of("k") != layout.width_of("v"):
            raise ModelError(f"{place}: this model's cache has no plain keys and values, which prefix tuning gives")
        width = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
        if matrix.shape[1] != width:
            raise ModelError(
                f"{place}: rows of {matrix.shape[1]}; this model's keys and values have {width} ({layout.num_layers} "
                f"layers, {layout.num_kv_heads} heads of {layout.head_dim})"
            )
        kv = matrix.view(len(matrix), layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
        kv = kv.permute(1, 2, 0, 3, 4).contiguous()
        if self._order is not None:
            kv[:, 0] = kv[:, 0][..., self._order]
        return kv
