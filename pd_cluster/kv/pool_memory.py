"""Declares the interface of a pool's memory; block_major.py and layer_major.py implement its orders of blocks.

Verbatim payloads are the same bytes from each of them: block by block, in each the layers, in each the planes, in each
[block_size, heads, width]. Widths are those in which vectors are stored (kv/kv_vectors.py). Knows nothing of
transports or of blocks' holders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from pd_cluster.kv.kv_layout import CODE_BITS, KVLayout
from pd_cluster.wire import KVPiece

MODEL_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TORCH_DTYPES = {**MODEL_DTYPES, **dict.fromkeys(CODE_BITS, torch.uint8)}  # of a pool's elements

Move = Literal["copy", "out", "in", "clear"]
GroupMove = tuple[Move, int, int, int]  # source and target block, and the group of layers whose pool they are in
Seen = Callable[[torch.Tensor], None]


class Memory(Protocol):
    """Holds the blocks of one pool, extra ones included. Devices do their work in the current stream's order."""

    layout: KVLayout

    def __init__(self, layout: KVLayout, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: allocations of the shapes that `shapes` returns."""

    @classmethod
    def shapes(cls, layout: KVLayout, num_blocks: int) -> list[tuple[int, ...]]:
        """Returns the shapes of the allocations for this many blocks, in numbers of the layout's dtype."""

    @property
    def parts(self) -> list[torch.Tensor]:
        """Returns the allocations, for other processes to map."""

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int:
        """Counts blocks."""

    def planes(self, layer: int) -> list[torch.Tensor]:
        """Returns the planes of a layout's layer, each [num_blocks, block_size, heads, width], perhaps strided."""

    def gather(self, piece: KVPiece) -> torch.Tensor:
        """Returns the verbatim payload, [nbytes] uint8; a view of the memory where possible."""

    def view_of(self, piece: KVPiece) -> torch.Tensor | None:
        """Returns the verbatim payload as a view; None: it is not contiguous."""

    def scatter(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        """Writes a payload of `gather` to these blocks."""

    def contiguous_parts(self, piece: KVPiece) -> list[torch.Tensor]:
        """Returns the verbatim payload in order, as contiguous bytes, without a copy where possible."""

    def copy_from(self, source: Memory, piece: KVPiece, into: list[int], seen: Seen | None = None) -> None:
        """Copies blocks of a memory of the same kind and layout to these. `seen` receives the bytes, in ordered parts.

        Only host memory supports `seen`.
        """

    def heads_of(self, piece: KVPiece, heads: Sequence[slice]) -> list[torch.Tensor]:
        """Returns a copy of each plane's heads, as `heads` has them, of the piece's blocks, possibly strided.

        Each is [num_layers, num_blocks, block_size, num_heads, width]; the layers are alike (`KVLayout.parts_of`).
        """

    def put_vectors(
        self, planes: Sequence[torch.Tensor], piece: KVPiece, into: list[int], heads: Sequence[slice]
    ) -> None:
        """Writes vectors in the pool's own form to these heads of each plane, of the piece's tokens in `into`.

        There is a tensor for each plane: [num_layers, num_tokens, num_heads, width]; the layers are alike.
        """

    def move(self, kind: Move, pairs: Sequence[tuple[int, int]], host: torch.Tensor) -> None:
        """Copies blocks (source, target) within the memory, out to `host` or back in from it; or clears the targets.

        The order is free: no target is another one, or a source in the same memory. `host` is
        [num_blocks, block_nbytes] uint8.
        """

    def warm(self) -> None:
        """Compiles what copies need: when a link opens rather than for its first transfer."""


def ids_on(device: torch.device, ids: torch.Tensor) -> torch.Tensor:
    """Returns the host's numbers on a device, copied in the current stream's order without waiting for it."""
    return ids if device.type == "cpu" else ids.pin_memory().to(device, non_blocking=True)


def runs(ids: list[int]) -> list[tuple[int, int]]:
    """Joins consecutive ids: [3, 4, 5, 9] -> [(3, 3), (9, 1)] as (first, count)."""
    found: list[tuple[int, int]] = []
    for block in ids:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


def paired_runs(source: list[int], target: list[int]) -> list[tuple[int, int, int]]:
    """Returns (first source block, first target block, count) for stretches consecutive on both sides."""
    found: list[tuple[int, int, int]] = []
    for s, t in zip(source, target, strict=True):
        if found:
            first, start, count = found[-1]
            if first + count == s and start + count == t:
                found[-1] = (first, start, count + 1)
                continue
        found.append((s, t, 1))
    return found


def slots_of(layout: KVLayout, piece: KVPiece, into: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns the places of the piece's tokens in a pool that holds them in these blocks, on `device`.

    They are the block and the offset of each.
    """
    tokens = torch.arange(piece.num_tokens) + piece.first_token % layout.block_size
    block = torch.tensor(into)[tokens // layout.block_size]
    return ids_on(device, block), ids_on(device, tokens % layout.block_size)
