"""Pools in block-major order: each block is one contiguous range, in host or device memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pd_cluster.kv.device_copy import copy_blocks, warm
from pd_cluster.kv.kv_layout import DTYPE_NBYTES, AlikeLayers, KVLayout
from pd_cluster.kv.pool_memory import Memory, Move, Seen, ids_on, paired_runs, runs, slots_of
from pd_cluster.native.streaming_copy import streaming_copy
from pd_cluster.wire import KVPiece

HOT_NBYTES = 1 << 20  # this many bytes are copied and then checked at a time, while the core's own cache holds them


class _AlikePlanes(NamedTuple):
    """Layers [first, stop) with equal planes. Each plane: [num_blocks, stop - first, block_size, heads, width]."""

    first: int
    stop: int
    planes: list[torch.Tensor]


class BlockMajor:
    """The base of both memories: one allocation, [num_blocks, block_numel]. A block's layers are in order.

    If all layers are equal and all planes have one shape, `data` views the allocation as [num_blocks, num_layers,
    num_planes, block_size, local_kv_heads, width].
    """

    def __init__(self, layout: KVLayout, parts: Sequence[torch.Tensor]) -> None:
        (whole,) = parts
        self.layout = layout
        num_blocks = len(whole)
        self._numbers = whole.view(num_blocks, -1)
        self.bytes = self._numbers.view(torch.uint8)  # [num_blocks, block_nbytes]
        # The offset of each layer in a block, and of the block's end, in bytes.
        self._starts = [layout.layers_nbytes(0, layer) for layer in range(layout.num_layers + 1)]
        self._alike = [self._planes_of(each) for each in layout.alike]
        self._planes = [
            [plane[:, at] for plane in planes] for first, stop, planes in self._alike for at in range(stop - first)
        ]
        shapes = layout.block_shapes(layout.planes)
        self._data: torch.Tensor | None = None
        if len(self._alike) == 1 and len(set(shapes)) == 1:
            self._data = self._numbers.view(num_blocks, layout.num_layers, len(shapes), *shapes[0])

    def _planes_of(self, alike: AlikeLayers) -> _AlikePlanes:
        layout, (first, stop, planes) = self.layout, alike
        itemsize = DTYPE_NBYTES[layout.dtype]
        layers = self._numbers[:, self._starts[first] // itemsize : self._starts[stop] // itemsize]
        layers = layers.view(len(layers), stop - first, -1)
        shapes = layout.block_shapes(planes)
        parts = torch.split(layers, [math.prod(shape) for shape in shapes], dim=2)
        views = [part.view(len(layers), stop - first, *shape) for part, shape in zip(parts, shapes, strict=True)]
        return _AlikePlanes(first, stop, views)

    @classmethod
    def shapes(cls, layout: KVLayout, num_blocks: int) -> list[tuple[int, ...]]:
        return [(num_blocks, layout.block_numel)]

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self._numbers]

    @property
    def data(self) -> torch.Tensor:
        assert self._data is not None
        return self._data

    @property
    def device(self) -> torch.device:
        return self._numbers.device

    def __len__(self) -> int:
        return len(self._numbers)

    def planes(self, layer: int) -> list[torch.Tensor]:
        return list(self._planes[layer])

    def _alike_planes(self, piece: KVPiece) -> list[torch.Tensor]:
        """Returns the planes of a piece's layers, each [num_blocks, num_layers, …]. These layers must be alike."""
        found = next(each for each in self._alike if each.first <= piece.first_layer < each.stop)
        assert piece.stop_layer <= found.stop
        layers = slice(piece.first_layer - found.first, piece.stop_layer - found.first)
        return [plane[:, layers] for plane in found.planes]

    def heads_of(self, piece: KVPiece, heads: Sequence[slice]) -> list[torch.Tensor]:
        ids = ids_on(self.device, torch.tensor(piece.block_ids))
        planes = zip(self._alike_planes(piece), heads, strict=True)
        return [plane[:, :, :, own].index_select(0, ids).transpose(0, 1) for plane, own in planes]

    def put_vectors(
        self, planes: Sequence[torch.Tensor], piece: KVPiece, into: list[int], heads: Sequence[slice]
    ) -> None:
        block, offset = slots_of(self.layout, piece, into, self.device)
        for plane, vectors, own in zip(self._alike_planes(piece), planes, heads, strict=True):
            target = plane[:, :, :, own]
            target[block, :, offset] = vectors.transpose(0, 1)  # [num_tokens, num_layers, heads, width]

    def view_of(self, piece: KVPiece) -> torch.Tensor | None:
        first, count = piece.block_ids[0], len(piece.block_ids)
        layers = self._layers(piece)[first : first + count]
        is_run = piece.block_ids == list(range(first, first + count))
        return layers.view(-1) if is_run and layers.is_contiguous() else None

    def _layers(self, piece: KVPiece) -> torch.Tensor:
        """Returns all blocks as bytes, restricted to the piece's layers."""
        return self.bytes[:, self._starts[piece.first_layer] : self._starts[piece.stop_layer]]

    def _layers_of(self, source: Memory, piece: KVPiece) -> torch.Tensor:
        assert isinstance(source, BlockMajor)
        return source._layers(piece)


class HostBlocks(BlockMajor):
    """Host memory. Copies bypass the processor's caches if the machine supports that. Calls return after the copy."""

    def gather(self, piece: KVPiece) -> torch.Tensor:
        layers = self._layers(piece)
        found = [layers[first : first + count] for first, count in runs(piece.block_ids)]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole.reshape(-1)  # this copies if the bytes are not contiguous

    def scatter(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        """Writes without the processor's caches, so that the payload's buffer stays in them."""
        copy = streaming_copy()
        at = 0
        for part in self._contiguous(piece, into):
            source = payload[at : at + len(part)]
            if copy is not None:
                copy(part, source)
            else:
                part.copy_(source)
            at += len(part)

    def contiguous_parts(self, piece: KVPiece) -> list[torch.Tensor]:
        return self._contiguous(piece, piece.block_ids)

    def copy_from(self, source: Memory, piece: KVPiece, into: list[int], seen: Seen | None = None) -> None:
        """Copies in parts, and passes each part to `seen` while the core's own cache holds it.

        `seen` receives the source of the part if the copy bypasses the cache, otherwise the written part.
        """
        here, there = self._layers_of(source, piece), self._layers(piece)
        copy = streaming_copy()
        for first, start, count in paired_runs(piece.block_ids, into):
            to_blocks, of_blocks = there[start : start + count], here[first : first + count]
            are_whole = to_blocks.is_contiguous() and of_blocks.is_contiguous()  # either pool may have further layers
            pairs = zip(*(_contiguous(each, are_whole) for each in (to_blocks, of_blocks)), strict=True)
            for to, of in _cached_parts(pairs) if seen is not None else pairs:
                if copy is not None:
                    copy(to, of)
                else:
                    to.copy_(of)
                if seen is not None:
                    seen(of if copy is not None else to)

    def move(self, kind: Move, pairs: Sequence[tuple[int, int]], host: torch.Tensor) -> None:
        blocks, copy = self.bytes, streaming_copy() or torch.Tensor.copy_
        if kind in ("copy", "clear"):
            for source, target in pairs:  # states are so large that indexing would be slow
                if kind == "clear":
                    blocks[target].zero_()
                else:
                    copy(blocks[target], blocks[source])
            return
        sources, targets = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
        to, of = (host, blocks) if kind == "out" else (blocks, host)
        to.index_copy_(0, targets, of.index_select(0, sources))

    def warm(self) -> None: ...

    def _contiguous(self, piece: KVPiece, blocks: list[int]) -> list[torch.Tensor]:
        layers = self._layers(piece)
        found = (layers[first : first + count] for first, count in runs(blocks))
        return [part for each in found for part in _contiguous(each, each.is_contiguous())]


class DeviceBlocks(BlockMajor):
    """An accelerator's memory. Calls launch their work, which may still run when they return."""

    def gather(self, piece: KVPiece) -> torch.Tensor:
        layers, count = self._layers(piece), len(piece.block_ids)
        payload = torch.empty((count, *layers.shape[1:]), dtype=torch.uint8, device=layers.device)
        into = list(range(count))
        copy_blocks(layers, payload, piece.block_ids, into, paired_runs(piece.block_ids, into))
        return payload.view(-1)

    def scatter(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        layers = self._layers(piece)
        source, of = payload.view(len(into), *layers.shape[1:]), list(range(len(into)))
        copy_blocks(source, layers, of, into, paired_runs(of, into))

    def contiguous_parts(self, piece: KVPiece) -> list[torch.Tensor]:
        return [self.gather(piece)]

    def copy_from(self, source: Memory, piece: KVPiece, into: list[int], seen: Seen | None = None) -> None:
        assert seen is None
        ids = piece.block_ids
        copy_blocks(self._layers_of(source, piece), self._layers(piece), ids, into, paired_runs(ids, into))

    def move(self, kind: Move, pairs: Sequence[tuple[int, int]], host: torch.Tensor) -> None:
        """Copies to and from the host block by block, and within the memory with one call."""
        blocks = self.bytes
        if kind == "copy":
            sources, targets = ([*each] for each in zip(*pairs, strict=True))
            assert not {*sources} & {*targets}
            copy_blocks(blocks, blocks, sources, targets, paired_runs(sources, targets))
            return
        if kind == "clear":
            blocks.index_fill_(0, ids_on(self.device, torch.tensor([target for _, target in pairs])), 0)
            return
        to, of = (host, blocks) if kind == "out" else (blocks, host)
        for source, target in pairs:
            to[target].copy_(of[source], non_blocking=True)

    def warm(self) -> None:
        warm(self.device)


def _contiguous(blocks: torch.Tensor, is_whole: bool) -> list[torch.Tensor]:
    """Splits [n, nbytes] of a pool into contiguous parts: one part if it has all layers, otherwise one per block."""
    return [blocks.view(-1)] if is_whole else [block.view(-1) for block in blocks]


def _cached_parts(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for to, of in pairs:
        for at in range(0, len(of), HOT_NBYTES):
            yield to[at : at + HOT_NBYTES], of[at : at + HOT_NBYTES]
