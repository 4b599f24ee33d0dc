"""The shape of a KV cache block, and the lanes from one pool to another.

Knows nothing of tensors: sizes are integers, dtypes are names.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pd_cluster.kv.group_rule import Rule
from pd_cluster.settings.engine_config import MAX_TP_SIZE
from pd_cluster.wire import KVPiece, LayoutInfo, Plane, RuleName

CODE_BITS = {"int8": 8, "fp8_e4m3": 8, "int4": 4}  # bits per code, for vectors that are stored as codes with one scale
DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2, **dict.fromkeys(CODE_BITS, 1)}  # codes are stored as bytes
SCALE_NBYTES = 4  # one float32
LATENT, INDEX = "latent", "index"
COLD = "drafts cold"


class AlikeLayers(NamedTuple):
    """Consecutive layers [first, stop) that have the same planes."""

    first: int
    stop: int
    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of one rank's share of a block: for each layer, its planes in order, each [block_size, heads, width].

    A layout describes one group of the model's layers. `num_kv_heads` counts the heads of the whole model. A plane
    whose `num_heads` is not 0 has that number of heads instead, a divisor of `num_kv_heads`. The heads of each plane
    are split evenly over `tp_size` ranks; if there are more ranks than heads, each head is on several ranks.
    """

    num_layers: int
    num_kv_heads: int
    planes: tuple[Plane, ...]
    block_size: int  # tokens; 1 for states
    dtype: str  # of the pool; may be narrower than the model's: see `stored_width`
    tp_size: int = 1
    tp_rank: int = 0
    plane_layers: tuple[tuple[int, ...], ...] = ()  # by plane: its layers, ascending; (): every layer has every plane
    num_draft_layers: int = 0  # the last of the layers, which belong to a draft head
    draft_head: str = ""  # identifies what besides the model determines these layers' contents; "": there is none
    rule: RuleName = "all"  # a request holds the blocks of all tokens, of the last `window`, or one block with a state
    window: int = 0
    layers: tuple[int, ...] = ()  # the layers' indices in the model, ascending; (): the group has all layers

    @property
    def holds(self) -> Rule:
        """Returns which blocks a request holds in this group of layers."""
        return Rule(self.rule, self.window)

    @property
    def num_model_layers(self) -> int:
        """Counts the model's own layers."""
        return self.num_layers - self.num_draft_layers

    @property
    def without_head(self) -> KVLayout:
        """Returns the layout without the draft head's layers."""
        stop, planes, plane_layers = self.num_model_layers, self.planes, self.plane_layers
        if plane_layers:
            own = [tuple(layer for layer in layers if layer < stop) for layers in plane_layers]
            kept = [(plane, layers) for plane, layers in zip(planes, own, strict=False) if layers]
            planes, plane_layers = tuple(plane for plane, _ in kept), tuple(layers for _, layers in kept)
            if all(len(layers) == stop for layers in plane_layers):
                plane_layers = ()
        return replace(
            self, num_layers=stop, planes=planes, plane_layers=plane_layers, num_draft_layers=0, draft_head=""
        )

    @property
    def alike(self) -> tuple[AlikeLayers, ...]:
        """Returns all layers in order, joined into as few runs of layers with equal planes as possible."""
        return _alike(self.num_layers, self.planes, self.plane_layers)

    def parts_of(self, piece: KVPiece) -> Iterator[tuple[tuple[Plane, ...], KVPiece]]:
        """Cuts a piece where the planes of its layers change. Yields each part with its planes."""
        for first, stop, planes in self.alike:
            start, end = max(first, piece.first_layer), min(stop, piece.stop_layer)
            if start < end:
                yield planes, replace_layers(piece, start, end)

    @property
    def head_range(self) -> tuple[int, int]:
        """Returns the global KV heads [start, stop) on this rank."""
        return heads_of_rank(self.num_kv_heads, self.tp_size, self.tp_rank)

    @property
    def local_kv_heads(self) -> int:
        start, stop = self.head_range
        return stop - start

    def num_heads_of(self, plane: Plane) -> int:
        """Counts the whole model's heads of a plane."""
        return plane.num_heads or self.num_kv_heads

    def head_range_of(self, plane: Plane) -> tuple[int, int]:
        """Returns the global heads [start, stop) of a plane on this rank."""
        return heads_of_rank(plane.num_heads, self.tp_size, self.tp_rank) if plane.num_heads else self.head_range

    def local_heads(self, plane: Plane) -> int:
        """Counts the heads of a plane on this rank."""
        start, stop = self.head_range_of(plane)
        return stop - start

    def can_split(self, tp_size: int) -> bool:
        """Whether the heads of every plane can be split over this many ranks."""
        return all(can_split_heads(self.num_heads_of(plane), tp_size) for plane in self.planes)

    def width_of(self, name: str) -> int:
        """Returns the width of the plane with this name."""
        return next(plane.width for plane in self.planes if plane.name == name)

    @property
    def head_dim(self) -> int:
        """Returns the width of keys and values, which must be equal."""
        keys, values = self.width_of("k"), self.width_of("v")
        assert keys == values
        return keys

    @property
    def has_one_width(self) -> bool:
        """Whether all planes have vectors of the same width, as most attention kernels require."""
        return len({plane.width for plane in self.planes}) == 1

    @property
    def has_latents(self) -> bool:
        """Whether the planes are latents: one vector for all heads, which ranks cannot split."""
        return self.planes[0].name == LATENT

    @property
    def has_index(self) -> bool:
        """Whether some layers have an index that chooses which keys a token attends to."""
        return any(plane.name == INDEX for plane in self.planes)

    def block_shapes(self, planes: Iterable[Plane]) -> list[tuple[int, int, int]]:
        """Returns the shape of each of these planes in one block: [block_size, heads on this rank, stored width]."""
        dtype, size = self.dtype, self.block_size
        return [(size, self.local_heads(plane), stored_width(dtype, plane.width)) for plane in planes]

    def layer_numel(self, planes: Iterable[Plane]) -> int:
        """Counts the elements of one block in a layer with these planes, on this rank."""
        return sum(map(math.prod, self.block_shapes(planes)))

    def local_layer(self, layer_idx: int) -> int:
        """Returns the index of a model's layer in this group. Raises ValueError if the layer is in another group."""
        return self.layers.index(layer_idx) if self.layers else layer_idx

    def layers_nbytes(self, first: int, stop: int) -> int:
        """Counts the bytes of one block in layers [first, stop), which are consecutive, on this rank."""
        whole = KVPiece(0, 0, first, stop - first, [])
        numel = sum(part.num_layers * self.layer_numel(planes) for planes, part in self.parts_of(whole))
        return numel * DTYPE_NBYTES[self.dtype]

    @property
    def most_layer_nbytes(self) -> int:
        """Counts the bytes of one block in the largest layer, on this rank."""
        return max(self.layer_numel(each.planes) for each in self.alike) * DTYPE_NBYTES[self.dtype]

    @property
    def block_numel(self) -> int:
        """Counts the elements of one block in all layers, on this rank."""
        return sum((each.stop - each.first) * self.layer_numel(each.planes) for each in self.alike)

    @property
    def token_nbytes(self) -> int:
        """Counts the bytes of one token in all layers, on this rank."""
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


def heads_of_rank(num_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Returns the heads [start, stop) on a rank: its share, or one head that other ranks have, too."""
    if tp_size <= num_heads:
        per_rank = num_heads // tp_size
        return tp_rank * per_rank, (tp_rank + 1) * per_rank
    head = tp_rank * num_heads // tp_size
    return head, head + 1


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
    """Returns the piece with layers [first, stop) in place of its own."""
    return KVPiece(piece.first_token, piece.num_tokens, first, stop - first, piece.block_ids)


def keys_and_values(head_dim: int, value_dim: int = 0) -> tuple[Plane, ...]:
    """Returns the planes of ordinary attention. `value_dim`: the width of values; 0: the same as that of keys."""
    return Plane("k", head_dim), Plane("v", value_dim or head_dim)


def latents(width: int, rope_width: int) -> tuple[Plane, ...]:
    """Returns the planes of latent attention (MLA): the latent of keys and values, and the rotary part of keys."""
    return Plane(LATENT, width), Plane("rope", rope_width)


def stored_width(dtype: str, width: int) -> int:
    """Returns how many elements a vector of `width` values takes in a pool of this dtype.

    In a plain dtype each value is an element. Codes are stored as bytes, followed by the vector's scale. So a token's
    bytes are final once they are written, and heads, tokens, layers and blocks can be separated without decoding.
    """
    bits = CODE_BITS.get(dtype)
    return width if bits is None else width * bits // 8 + SCALE_NBYTES


def can_hold(planes: Iterable[Plane], dtype: str) -> bool:
    """Whether vectors of these planes fill whole bytes."""
    bits = CODE_BITS.get(dtype, 8)
    return all(plane.width * bits % 8 == 0 for plane in planes)


def vectors_nbytes(planes: Iterable[Plane], dtype: str) -> int:
    """Counts the bytes that a token takes in a layer with these planes, per KV head."""
    return sum(stored_width(dtype, plane.width) for plane in planes) * DTYPE_NBYTES[dtype]


def num_common_layers(source: KVLayout | LayoutInfo, target: KVLayout | LayoutInfo) -> int:
    """Counts the first layers that both layouts share.

    A draft head's layers count only if both have the same head.
    """
    return source.num_layers - (source.num_draft_layers if source.draft_head != target.draft_head else 0)


def token_nbytes_of(source: LayoutInfo, target: LayoutInfo) -> int:
    """Counts the bytes of a token that an instance's ranks together send to another instance, each KV head once."""
    stop, nbytes = num_common_layers(source, target), 0
    for each in _alike(source.num_layers, source.planes, source.plane_layers):
        of_layer = sum(
            (plane.num_heads or source.num_kv_heads) * vectors_nbytes((plane,), source.dtype) for plane in each.planes
        )
        nbytes += max(0, min(each.stop, stop) - each.first) * of_layer
    return nbytes


def can_split_heads(num_kv_heads: int, tp_size: int) -> bool:
    """Whether every rank gets the same number of KV heads, or every head gets the same number of ranks."""
    return 1 <= tp_size <= MAX_TP_SIZE and num_kv_heads >= 1 and 0 in (num_kv_heads % tp_size, tp_size % num_kv_heads)


class Lane(NamedTuple):
    """A rank of P and a rank of D that have KV heads of a group of layers in common."""

    source_rank: int
    target_rank: int
    group: int = 0


def num_lanes(own: KVLayout, tp_sizes: Iterable[int]) -> int:
    """Counts this rank's lanes to or from instances with these numbers of ranks, in the direction that has more.

    Instances whose ranks cannot split the heads do not count, because their links are refused.
    """
    others = [replace(own, tp_size=size, tp_rank=0) for size in tp_sizes if own.can_split(size)]
    sent = sum(lane.source_rank == own.tp_rank for other in others for lane in lanes(own, other))
    return max(sent, sum(lane.target_rank == own.tp_rank for other in others for lane in lanes(other, own)))


def lanes(source: KVLayout, target: KVLayout) -> list[Lane]:
    """Lists the lanes between two instances, so that each rank of `target` gets each of its heads exactly once.

    If several ranks of `source` have the same head, the ranks of `target` are spread over them. The first lane is from
    rank 0 to rank 0. Planes with fewer heads than `num_kv_heads` use the same lanes: see `PoolRoute.heads_of`.
    """
    found: list[Lane] = []
    num_replicas = max(1, source.tp_size // source.num_kv_heads)
    for rank in range(target.tp_size):
        start, stop = target.of_rank(rank).head_range
        for head in range(start, stop):
            first = head * source.tp_size // source.num_kv_heads  # the first rank that has the head
            lane = Lane(first + rank % num_replicas, rank)
            if lane not in found:
                found.append(lane)
    return found
