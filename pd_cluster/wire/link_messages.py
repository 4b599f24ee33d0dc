"""Messages that open and close a link between a prefill and a decode instance."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pd_cluster.numerics import Numerics
from pd_cluster.wire.message_base import (
    MAX_GROUPS,
    MAX_OFFER_NBYTES,
    KVWireDtype,
    Message,
    PairWish,
    ShortText,
    TransportName,
)

RuleName = Literal["all", "window", "state"]  # which tokens a group of layers keeps; see kv/group_rule.py


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """A named part of a layer's cache, with `width` values per token and head.

    `num_heads` counts the heads of the whole model; 0: as many as the layout has KV heads.
    """

    name: str
    width: int
    num_heads: int = 0


class LayoutInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The layout of a pool; kv/pool_compatibility.py says what two layouts must agree on."""

    num_layers: int
    num_kv_heads: int
    planes: tuple[Plane, ...]
    block_size: int
    dtype: str
    tp_size: int
    tp_rank: int
    plane_layers: tuple[tuple[int, ...], ...] = ()
    num_draft_layers: int = 0
    draft_head: ShortText = ""
    rule: RuleName = "all"
    window: int = 0
    layers: tuple[int, ...] = ()


class KVOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that must be equal at both ends of a link."""

    wire_dtype: KVWireDtype = "auto"
    checksum: bool = True
    hmac: bool = True
    mixed: bool = False  # the pools may have different dtypes


class LinkOpen(Message, frozen=True):
    """`layouts` and `num_blocks` describe the pools of P's rank 0, one for each group of layers.

    `lanes` is the list that kv/layer_groups.py makes; its indices name the lanes. `pair`: whether D may open
    communicators: if it has capacity for them (`free`), not at all (`none`), or as soon as it has capacity (`now`).
    """

    link_id: str
    model_identity: str
    numerics: Numerics
    layouts: Annotated[list[LayoutInfo], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    num_blocks: Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    options: KVOptions
    lanes: list[LaneOffer]
    pair: PairWish = "free"


class LaneOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of P sends this to one rank of D. `offers`: addresses for D's rank, for each transport that P allows.

    `probe_seed` determines the contents of the probe block in this group's pool at P's rank.
    """

    source_rank: int = 0
    target_rank: int = 0
    group: int = 0
    offers: list[TransportOffer]
    probe_seed: int


class TransportOffer(msgspec.Struct, frozen=True, kw_only=True):
    """`data`: the facts about P's end that D's end needs; only the transport reads it (see pd_cluster/transport)."""

    transport: TransportName
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_OFFER_NBYTES)] = b""


class LinkAnswer(Message, frozen=True):
    """D tries this transport in a lane; `layout` describes the pool of D's rank for the lane's group of layers."""

    link_id: str
    transport: TransportName
    layout: LayoutInfo
    lane: int = 0


class LinkReady(Message, frozen=True):
    """P's probe has arrived through a lane. `precision`: see kv.pool_route.PoolRoute ("" when KV is exact)."""

    link_id: str
    transport: TransportName
    precision: str = ""
    lane: int = 0


class LinkValue(Message, frozen=True):
    """A key that a library has set at the sender's end of a lane and that the other end needs; see
    transport/meeting.py.
    """

    transport: TransportName
    key: Annotated[str, msgspec.Meta(max_length=256)]
    value: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
    lane: int = 0


class LinkRest(Message, frozen=True):
    """From P: its end of the link is closed. From D: its end is closed, or will not be opened now."""

    link_id: str


class LinkYield(Message, frozen=True):
    """D needs this link's capacity for another link, so P closes this link (lets it rest) when its transfers have
    ended.
    """

    link_id: str


class LinkQueued(Message, frozen=True):
    """D will open the link when another link has given up its capacity."""

    link_id: str


class LinkRefused(Message, frozen=True):
    link_id: str
    reason: str
    retry: bool
