"""The shape of a KV cache block, and the conditions under which two pools can exchange blocks.

Knows nothing of tensors: sizes are integers, dtypes are names.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pd_cluster.errors import LinkError
from pd_cluster.settings.engine import MAX_BLOCK_SIZE, MAX_TP_SIZE
from pd_cluster.wire import KVPiece, LayoutInfo, Plane

CODE_BITS = {"int8": 8, "fp8_e4m3": 8, "int4": 4}  # of vectors that are codes with one scale behind them
DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2, **dict.fromkeys(CODE_BITS, 1)}  # codes lie as bytes
SCALE_NBYTES = 4  # one float32
LATENT, INDEX = "latent", "index"


class AlikeLayers(NamedTuple):
    """Consecutive layers [first, stop) that have the same planes."""

    first: int
    stop: int
    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One rank's share of a block holds, in each layer, its planes in order, each [block_size, local_kv_heads, width].

    `plane_layers`: for each plane the layers that have it, ascending. It is () where every layer has every plane.
    num_kv_heads counts the whole model. Heads are split evenly over tp_size ranks; with more ranks than heads each head
    is replicated on tp_size / num_kv_heads ranks. `dtype` is the pool's, which may be narrower than the model's: see
    `stored_width`.
    """

    num_layers: int
    num_kv_heads: int
    planes: tuple[Plane, ...]
    block_size: int  # tokens
    dtype: str
    tp_size: int = 1
    tp_rank: int = 0
    plane_layers: tuple[tuple[int, ...], ...] = ()
    num_draft_layers: int = 0
    draft_head: str = ""

    @property
    def alike(self) -> tuple[AlikeLayers, ...]:
        """Returns all layers in order, in as few runs of alike ones as there are."""
        return _alike(self.num_layers, self.planes, self.plane_layers)

    def parts_of(self, piece: KVPiece) -> Iterator[tuple[tuple[Plane, ...], KVPiece]]:
        """Cuts a piece where its layers' planes change; yields the planes of each part."""
        for first, stop, planes in self.alike:
            start, end = max(first, piece.first_layer), min(stop, piece.stop_layer)
            if start < end:
                yield planes, replace_layers(piece, start, end)

    @property
    def head_range(self) -> tuple[int, int]:
        """Returns the global KV heads [start, stop) on this rank."""
        if self.tp_size <= self.num_kv_heads:
            per_rank = self.num_kv_heads // self.tp_size
            return self.tp_rank * per_rank, (self.tp_rank + 1) * per_rank
        head = self.tp_rank * self.num_kv_heads // self.tp_size
        return head, head + 1

    @property
    def local_kv_heads(self) -> int:
        start, stop = self.head_range
        return stop - start

    def width_of(self, name: str) -> int:
        """Returns the width of the plane of this name."""
        return next(plane.width for plane in self.planes if plane.name == name)

    @property
    def head_dim(self) -> int:
        """Returns the width of keys and of values, if these two are the planes."""
        keys, values = self.width_of("k"), self.width_of("v")
        assert keys == values
        return keys

    @property
    def has_latents(self) -> bool:
        """Whether heads are made anew from what is kept, which no rank has a share of: one vector for all heads."""
        return self.planes[0].name == LATENT

    @property
    def has_index(self) -> bool:
        """Whether some layers choose the keys that a token attends to."""
        return any(plane.name == INDEX for plane in self.planes)

    def stored_widths(self, planes: Iterable[Plane]) -> list[int]:
        """Returns the elements that a vector of each of these planes takes."""
        return [stored_width(self.dtype, plane.width) for plane in planes]

    def layer_numel(self, planes: Iterable[Plane]) -> int:
        """Counts the elements of one block in a layer with these planes, on this rank."""
        return self.local_kv_heads * self.block_size * sum(self.stored_widths(planes))

    def layers_nbytes(self, first: int, stop: int) -> int:
        """Counts the bytes of one block in layers [first, stop), which lie one behind the other, on this rank."""
        whole = KVPiece(0, 0, first, stop - first, [])
        numel = sum(part.num_layers * self.layer_numel(planes) for planes, part in self.parts_of(whole))
        return numel * DTYPE_NBYTES[self.dtype]

    @property
    def most_layer_nbytes(self) -> int:
        """Counts the bytes of one block in the largest layer, on this rank."""
        return max(self.layer_numel(each.planes) for each in self.alike) * DTYPE_NBYTES[self.dtype]

    @property
    def block_numel(self) -> int:
        """Counts the elements of one block, all layers, on this rank."""
        return sum((each.stop - each.first) * self.layer_numel(each.planes) for each in self.alike)

    @property
    def token_nbytes(self) -> int:
        """Returns the bytes of one token, all layers, on this rank."""
        return self.block_nbytes // self.block_size

    @property
    def block_nbytes(self) -> int:
        return self.block_numel * DTYPE_NBYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def of_rank(self, tp_rank: int) -> KVLayout:
        """Returns the layout of the same pool on another rank of its instance."""
        return replace(self, tp_rank=tp_rank)

    def to_info(self) -> LayoutInfo:
        return LayoutInfo(**{name: getattr(self, name) for name in LayoutInfo.__struct_fields__})

    @classmethod
    def from_info(cls, info: LayoutInfo) -> KVLayout:
        return cls(**{name: getattr(info, name) for name in info.__struct_fields__})


@functools.lru_cache(maxsize=64)
def _alike(
    num_layers: int, planes: tuple[Plane, ...], plane_layers: tuple[tuple[int, ...], ...]
) -> tuple[AlikeLayers, ...]:
    if not plane_layers:
        return (AlikeLayers(0, num_layers, planes),)
    having = [frozenset(layers) for layers in plane_layers]
    of_layer = [
        tuple(plane for plane, layers in zip(planes, having, strict=True) if layer in layers)
        for layer in range(num_layers)
    ]
    found, first = list[AlikeLayers](), 0
    for own, run in itertools.groupby(of_layer):
        stop = first + len(list(run))
        found.append(AlikeLayers(first, stop, own))
        first = stop
    return tuple(found)


def replace_layers(piece: KVPiece, first: int, stop: int) -> KVPiece:
    """Returns the same tokens in layers [first, stop)."""
    return KVPiece(piece.first_token, piece.num_tokens, first, stop - first, piece.block_ids)


def keys_and_values(head_dim: int) -> tuple[Plane, ...]:
    """Returns the planes of ordinary attention."""
    return Plane("k", head_dim), Plane("v", head_dim)


def latents(width: int, rope_width: int) -> tuple[Plane, ...]:
    """Returns the planes of latent attention (MLA): what keys and values are made of, and the rotated part of keys."""
    return Plane(LATENT, width), Plane("rope", rope_width)


def stored_width(dtype: str, width: int) -> int:
    """Returns the elements that a vector of `width` numbers takes in a pool of this dtype.

    Numbers are elements themselves. Codes are bytes, and the vector's scale follows them: so a token's bytes are final
    once they are written, and heads, tokens, layers and blocks can be taken apart without their codes' company.
    """
    bits = CODE_BITS.get(dtype)
    return width if bits is None else width * bits // 8 + SCALE_NBYTES


def can_hold(planes: Iterable[Plane], dtype: str) -> bool:
    """Whether vectors of these planes fill whole bytes."""
    bits = CODE_BITS.get(dtype, 8)
    return all(plane.width * bits % 8 == 0 for plane in planes)


def vectors_nbytes(planes: Iterable[Plane], dtype: str) -> int:
    """Counts the bytes that a token leaves in a layer with these planes for each KV head."""
    return sum(stored_width(dtype, plane.width) for plane in planes) * DTYPE_NBYTES[dtype]


def token_nbytes_of(info: LayoutInfo) -> int:
    """Counts the bytes of a token on all ranks of an instance, each KV head once."""
    alike = _alike(info.num_layers, info.planes, info.plane_layers)
    vectors = sum((each.stop - each.first) * vectors_nbytes(each.planes, info.dtype) for each in alike)
    return info.num_kv_heads * vectors


def check_pair(source: KVLayout, target: KVLayout) -> None:
    """Checks that KV cache of `source` can land in `target`; raises LinkError(retry=False) naming the field.

    Block size, dtype and tensor parallel size may differ: see pack.py and `lanes`.
    """
    for name, theirs, ours in _compared(source, target):
        if theirs != ours:
            raise LinkError(
                f"KV layout differs: {name} is {theirs} on the prefill instance and {ours} on the decode instance; "
                f"start both with the same model"
            )
    for layout in (source, target):
        if not can_split_heads(layout.num_kv_heads, layout.tp_size):
            raise LinkError(
                f"KV layout makes no sense: {layout.num_kv_heads} KV heads cannot be spread over {layout.tp_size} ranks"
            )
        if not _has_planes(layout) or min(plane.width for plane in layout.planes) < 1:
            raise LinkError("KV layout makes no sense: a layer has no planes, or one of them no numbers")
        if not can_hold(layout.planes, layout.dtype):
            raise LinkError(f"KV layout makes no sense: {layout.dtype} holds two numbers a byte, and a width is odd")
        is_rank = 0 <= layout.tp_rank < layout.tp_size
        if layout.dtype not in DTYPE_NBYTES or not 1 <= layout.block_size <= MAX_BLOCK_SIZE or not is_rank:
            raise LinkError(
                f"KV layout makes no sense: blocks of {layout.block_size} tokens of {layout.dtype!r}, rank "
                f"{layout.tp_rank} of {layout.tp_size}"
            )


def _compared(source: KVLayout, target: KVLayout) -> Iterator[tuple[str, object, object]]:
    """Yields the fields that must be the same, under their public names."""
    for name in ("num_layers", "num_kv_heads"):
        yield name, getattr(source, name), getattr(target, name)
    if (names := [plane.name for plane in source.planes]) != [plane.name for plane in target.planes]:
        yield "planes", ", ".join(names), ", ".join(plane.name for plane in target.planes)
        return
    for theirs, ours in zip(source.planes, target.planes, strict=True):
        yield f"{theirs.name}_head_dim", theirs.width, ours.width
    yield "plane_layers", source.plane_layers, target.plane_layers


def _has_planes(layout: KVLayout) -> bool:
    """Whether each layer has a plane, and no plane a layer that is not there, or the same one twice."""
    if not layout.plane_layers:
        return bool(layout.planes)
    known = range(layout.num_layers)
    is_known = all(list(layers) == sorted({*layers} & {*known}) for layers in layout.plane_layers)
    return is_known and len(layout.plane_layers) == len(layout.planes) and all(each.planes for each in layout.alike)


def can_split_heads(num_kv_heads: int, tp_size: int) -> bool:
    """Whether every rank gets the same number of KV heads, or every head the same number of ranks."""
    return 1 <= tp_size <= MAX_TP_SIZE and num_kv_heads >= 1 and 0 in (num_kv_heads % tp_size, tp_size % num_kv_heads)


class Lane(NamedTuple):
    """Carries the KV heads that two ranks have in common from one to the other."""

    source_rank: int
    target_rank: int


def num_lanes(own: KVLayout, tp_sizes: Iterable[int]) -> int:
    """Counts the lanes of this rank to or from instances with so many ranks, in the direction that has more.

    Instances over whose ranks the heads cannot be spread get none: they are refused when they link.
    """
    others = [replace(own, tp_size=size, tp_rank=0) for size in tp_sizes if can_split_heads(own.num_kv_heads, size)]
    sent = sum(lane.source_rank == own.tp_rank for other in others for lane in lanes(own, other))
    return max(sent, sum(lane.target_rank == own.tp_rank for other in others for lane in lanes(other, own)))


def lanes(source: KVLayout, target: KVLayout) -> list[Lane]:
    """Lists the senders and receivers between two instances: each rank of `target` gets each of its heads exactly once.

    Where a head is replicated on several ranks of `source`, the ranks of `target` are spread over them. The first lane
    is from rank 0 to rank 0.
    """
    found: list[Lane] = []
    num_replicas = max(1, source.tp_size // source.num_kv_heads)
    for rank in range(target.tp_size):
        start, stop = target.of_rank(rank).head_range
        for head in range(start, stop):
            first = head * source.tp_size // source.num_kv_heads  # the first rank that has it
            lane = Lane(first + rank % num_replicas, rank)
            if lane not in found:
                found.append(lane)
    return found


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one pool into another: the contents of a payload, and the cost in precision.

    `one_sided`: the receiver reads the sender's pool itself, so a smaller payload gains nothing.
    """

    source: KVLayout
    target: KVLayout
    wants_int8: bool = False
    one_sided: bool = False

    @property
    def is_verbatim(self) -> bool:
        """Whether payloads are the blocks' own bytes."""
        same = (self.source.block_size, self.source.dtype) == (self.target.block_size, self.target.dtype)
        return same and self.source.head_range == self.target.head_range and self.wire_dtype == self.source.dtype

    @property
    def heads(self) -> tuple[int, int]:
        """Returns the KV heads [start, stop), counted over the whole model, that both ranks have."""
        (first, last), (start, stop) = self.source.head_range, self.target.head_range
        return max(first, start), min(last, stop)

    @property
    def num_heads(self) -> int:
        start, stop = self.heads
        return stop - start

    def heads_in(self, layout: KVLayout) -> slice:
        """Returns their position in a pool of this layout."""
        start, stop = self.heads
        first = layout.head_range[0]
        return slice(start - first, stop - first)

    @property
    def wire_dtype(self) -> str:
        """Returns the dtype of a payload: the narrowest of the two pools' and, where it is wanted, int8."""
        dtypes = [self.source.dtype, self.target.dtype, *(["int8"] if self.wants_int8 and not self.one_sided else [])]
        return min(dtypes, key=lambda dtype: CODE_BITS.get(dtype, 8 * DTYPE_NBYTES[dtype]))  # the first of equal ones

    @property
    def precision(self) -> str:
        """Returns "" when the target holds just what it would have computed itself, otherwise its dtype on the way."""
        source, target = self.source.dtype, self.target.dtype
        if self.wire_dtype not in (source, target):
            return self.wire_dtype
        return "" if source == target else source

    def payload_nbytes(self, piece: KVPiece) -> int:
        if self.is_verbatim:
            return len(piece.block_ids) * self.source.layers_nbytes(piece.first_layer, piece.stop_layer)
        parts = self.source.parts_of(piece)
        nbytes = sum(part.num_layers * vectors_nbytes(planes, self.wire_dtype) for planes, part in parts)
        return piece.num_tokens * self.num_heads * nbytes
