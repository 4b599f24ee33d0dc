"""Pools in layer-major order, one allocation per layer, for operators that need contiguous planes, as on NPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.pool_memory import Memory, Move, Seen, ids_on, slots_of
from pd_cluster.wire import KVPiece

ALL = slice(None)


class LayerMajor:
    """`layers[i]` has the planes of layer i in order, each [num_blocks, block_size, heads, width].

    If all planes have one shape, `layers[i]` is [num_planes, num_blocks, block_size, heads, width]; otherwise it is
    flat.
    """

    def __init__(self, layout: KVLayout, parts: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self.layers = list(parts)
        self._num_blocks = self.layers[0].numel() // layout.layer_numel(layout.alike[0].planes)
        self._planes: list[list[torch.Tensor]] = []
        for first, stop, planes in layout.alike:
            shapes = [(self._num_blocks, *shape) for shape in layout.block_shapes(planes)]
            numels = [math.prod(shape) for shape in shapes]
            self._planes += [
                [flat.view(shape) for flat, shape in zip(torch.split(layer.view(-1), numels), shapes, strict=True)]
                for layer in self.layers[first:stop]
            ]

    @classmethod
    def shapes(cls, layout: KVLayout, num_blocks: int) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        for first, stop, planes in layout.alike:
            of_planes = set(layout.block_shapes(planes))
            shape: tuple[int, ...] = (num_blocks * layout.layer_numel(planes),)
            if len(of_planes) == 1:
                shape = (len(planes), num_blocks, *of_planes.pop())
            shapes += [shape] * (stop - first)
        return shapes

    @property
    def parts(self) -> list[torch.Tensor]:
        return self.layers

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    def __len__(self) -> int:
        return self._num_blocks

    def planes(self, layer: int) -> list[torch.Tensor]:
        return list(self._planes[layer])

    def gather(self, piece: KVPiece) -> torch.Tensor:
        return self._gathered(self._ids(piece.block_ids), _layers_of(piece)).view(-1)

    def view_of(self, piece: KVPiece) -> None:
        """Returns None: a block's planes are not contiguous in this memory."""

    def scatter(self, payload: torch.Tensor, piece: KVPiece, into: list[int]) -> None:
        blocks = payload.view(len(into), -1).to(self.device)
        self._scatter(self._ids(into), blocks, _layers_of(piece))

    def contiguous_parts(self, piece: KVPiece) -> list[torch.Tensor]:
        return [self.gather(piece)]

    def copy_from(self, source: Memory, piece: KVPiece, into: list[int], seen: Seen | None = None) -> None:
        """Copies layer by layer, without gathering blocks first."""
        assert seen is None
        assert isinstance(source, LayerMajor)
        layers = _layers_of(piece)
        self._copy(source, self._ids(piece.block_ids), self._ids(into), layers)

    def heads_of(self, piece: KVPiece, heads: Sequence[slice]) -> list[torch.Tensor]:
        ids = self._ids(piece.block_ids)
        by_plane = zip(zip(*self._planes[_layers_of(piece)], strict=True), heads, strict=True)
        return [torch.stack([plane.index_select(0, ids)[:, :, own] for plane in planes]) for planes, own in by_plane]

    def put_vectors(
        self, planes: Sequence[torch.Tensor], piece: KVPiece, into: list[int], heads: Sequence[slice]
    ) -> None:
        block, offset = slots_of(self.layout, piece, into, self.device)
        slots = (block * self.layout.block_size + offset)[:, None]
        rows: dict[tuple[int, int, int], torch.Tensor] = {}  # row indices, by number of heads and range of heads
        for at, layer in enumerate(self._planes[_layers_of(piece)]):
            for plane, vectors, own in zip(layer, planes, heads, strict=True):
                num_heads, width = plane.shape[2:]
                key = (num_heads, own.start, own.stop)
                if key not in rows:
                    rows[key] = (slots * num_heads + torch.arange(own.start, own.stop, device=self.device)).flatten()
                plane.view(-1, width).index_copy_(0, rows[key], vectors[at].reshape(-1, width))

    def move(self, kind: Move, pairs: Sequence[tuple[int, int]], host: torch.Tensor) -> None:
        sources, targets = ([*each] for each in zip(*pairs, strict=True))
        if kind == "copy":
            assert not {*sources} & {*targets}
            self._copy(self, self._ids(sources), self._ids(targets), ALL)
        elif kind == "clear":
            for plane in self._flat_planes(ALL):
                plane.index_fill_(0, self._ids(targets), 0)
        for source, target in pairs if kind in ("out", "in") else ():
            if kind == "out":
                host[target].copy_(self._gathered(self._ids([source]), ALL)[0], non_blocking=True)
            else:
                block = host[source].to(self.device, non_blocking=True)
                self._scatter(self._ids([target]), block[None], ALL)

    def warm(self) -> None: ...

    def _ids(self, blocks: list[int]) -> torch.Tensor:
        return ids_on(self.device, torch.tensor(blocks))

    def _flat_planes(self, layers: slice) -> list[torch.Tensor]:
        """Returns every plane of each of these layers, as [num_blocks, elements per block].

        Always index such a plane, or a view of the whole plane, along its first dimension. To write along another
        dimension, NPUs copy the whole tensor out and back, which overwrites data that a step has written in the
        meantime on another stream.
        """
        return [plane.flatten(1) for layer in self._planes[layers] for plane in layer]

    def _gathered(self, ids: torch.Tensor, layers: slice) -> torch.Tensor:
        """Returns a copy of some blocks in block-major order: [num_ids, nbytes] uint8."""
        found = [plane.index_select(0, ids) for plane in self._flat_planes(layers)]
        return torch.cat(found, dim=1).view(torch.uint8)

    def _scatter(self, ids: torch.Tensor, blocks: torch.Tensor, layers: slice) -> None:
        planes = self._flat_planes(layers)
        numbers = torch.split(blocks.view(planes[0].dtype), [plane.shape[1] for plane in planes], dim=1)
        for plane, values in zip(planes, numbers, strict=True):
            plane.index_copy_(0, ids, values)

    def _copy(self, source: LayerMajor, ids: torch.Tensor, into: torch.Tensor, layers: slice) -> None:
        for there, here in zip(self._flat_planes(layers), source._flat_planes(layers), strict=True):
            there.index_copy_(0, into, here.index_select(0, ids))


def _layers_of(piece: KVPiece) -> slice:
    return slice(piece.first_layer, piece.stop_layer)
