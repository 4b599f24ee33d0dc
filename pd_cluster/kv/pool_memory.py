"""Declares the interface of a pool's memory; block_major.py and layer_major.py implement it for two memory orders.

A verbatim payload has the same bytes in both orders: block by block, in each block layer by layer, in each layer plane
by plane, each plane [block_size, heads, width]. Widths are the stored widths (kv/kv_vectors.py). Knows nothing of
transports or of blocks' holders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from pd_cluster.kv.kv_layout import CODE_BITS, KVLayout
from pd_cluster.wire import KVPiece

MODEL_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TORCH_DTYPES = {**MODEL_DTYPES, **dict.fromkeys(CODE_BITS, torch.uint8)}  # the dtypes of a pool's elements

Move = Literal["copy", "out", "in", "clear"]
GroupMove = tuple[Move, int, int, int]  # the kind, source and target block, and the index of the group of layers
Seen = Callable[[torch.Tensor], None]


class Memory(Protocol):
    """The blocks of one pool, including the extra ones. On devices, calls run in the order of the current stream."""

    layout: KVLayout

    def __init__(self, layout: KVLayout, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: allocations of the shapes that `shapes` returns."""

    @classmethod
    def shapes(cls, layout: KVLayout, num_blocks: int) -> list[tuple[int, ...]]:
        """Returns the shapes of the allocations for this many blocks, in elements of the layout's dtype."""

    @property
    def parts(self) -> list[torch.Tensor]:
        """Returns the allocations, for other processes to map."""

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int:
        """Counts blocks."""

    def planes(self, layer: int) -> list[torch.Tensor]:
        """Returns the planes of a layer of the layout, each [num_blocks, block_size, heads, width]; may be strided."""

    def gather(self, piece: KVPiece) -> torch.Tensor:
        """Returns the verbatim payload, [nbytes] uint8; a view of the memory if possible."""

    def view_of(self, piece: KVPiece) -> torch.Tensor | None:
        """Returns the verbatim payload as a view; None if it is not contiguous."""

    def scatter(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        """Writes to the blocks `into` a payload that `gather` returned."""

    def contiguous_parts(self, piece: KVPiece) -> list[torch.Tensor]:
        """Returns the verbatim payload as contiguous parts, in order, without a copy if possible."""

    def copy_from(self, source: Memory, piece: KVPiece, into: list[int], seen: Seen | None = None) -> None:
        """Copies blocks from a memory of the same kind and layout. `seen` receives the bytes in parts, in order.

        Only host memory supports `seen`.
        """

    def heads_of(self, piece: KVPiece, heads: Sequence[slice]) -> list[torch.Tensor]:
        """Returns, for each plane, a copy of the heads that `heads` selects, in the piece's blocks; may be strided.

        Each is [num_layers, num_blocks, block_size, num_heads, width]. The layers must have equal planes
        (`KVLayout.parts_of`).
        """

    def put_vectors(
        self, planes: Sequence[torch.Tensor], piece: KVPiece, into: list[int], heads: Sequence[slice]
    ) -> None:
        """Writes stored vectors to these heads of each plane, for the piece's tokens, in the blocks `into`.

        `planes`: for each plane [num_layers, num_tokens, num_heads, width]. The layers must have equal planes.
        """

    def move(self, kind: Move, pairs: Sequence[tuple[int, int]], host: torch.Tensor) -> None:
        """Copies blocks (source, target) within the memory, to `host` or from it, or clears the targets.

        The order of copies is undefined, so no target may occur twice or also be a source. `host`: [num_blocks,
        block_nbytes] uint8.
        """

    def warm(self) -> None:
        """Compiles the copy kernels when a link opens, so that the first transfer need not wait."""


def ids_on(device: torch.device, ids: torch.Tensor) -> torch.Tensor:
    """Copies integers from the host to a device, in the current stream's order. Does not wait for the copy."""
    return ids if device.type == "cpu" else ids.pin_memory().to(device, non_blocking=True)


def runs(ids: list[int]) -> list[tuple[int, int]]:
    """Joins consecutive ids into (first, count): [3, 4, 5, 9] -> [(3, 3), (9, 1)]."""
    found: list[tuple[int, int]] = []
    for block in ids:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


def paired_runs(source: list[int], target: list[int]) -> list[tuple[int, int, int]]:
    """Returns (first source block, first target block, count) for stretches that are consecutive in both lists."""
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
    """Returns the block and the offset of each of the piece's tokens, in a pool whose blocks `into` have these tokens.

    Both tensors are on `device`.
    """
    tokens = torch.arange(piece.num_tokens) + piece.first_token % layout.block_size
    block = torch.tensor(into)[tokens // layout.block_size]
    return ids_on(device, block), ids_on(device, tokens % layout.block_size)
