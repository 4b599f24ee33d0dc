"""Every message between processes: msgspec structs, msgpack on the wire, nothing else.

What each message means, who may send it when and what follows is in docs/protocol.md. Decoding checks types and
sizes; a frame that is not one of these raises `msgspec.DecodeError` and is dropped by the mailbox.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pd_cluster.numerics import Numerics
from pd_cluster.types import Leg, LegEnd, PromptOutput, Resumed, Role, SamplingParams, TokenOutput

PROTOCOL_VERSION = 12
MAX_MESSAGE_NBYTES = 64 << 20
MAX_EXPORT_NBYTES = 1024  # of a PoolExport, for each of its parts
MAX_EXPORT_PARTS = 1024
KEY_NBYTES = 32
PublicKey = Annotated[bytes, msgspec.Meta(max_length=KEY_NBYTES)]  # of a process's CURVE key pair; b"": none yet
TransportName = Literal["local", "ipc", "shm", "nccl", "hccl", "dist"]
KVWireDtype = Literal["auto", "int8"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that goes into an envelope."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells about itself with every heartbeat. num_blocks = free + cached + held."""

    num_running: int = 0
    num_waiting: int = 0
    num_landing: int = 0
    num_exporting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_held_blocks: int = 0
    num_preemptions: int = 0
    num_swap_blocks: int = 0
    num_free_swap_blocks: int = 0
    num_prefix_query_tokens: int = 0  # prompt tokens of admitted requests
    num_prefix_hit_tokens: int = 0  # those of them that were in the prefix cache
    num_queued_tokens: int = 0  # of prompts that are here and not computed yet
    prefill_tokens_per_s: float = 0.0  # of late, in steps that computed prompts; 0: none yet
    decode_step_s: float = 0.0  # of late, a step that gave running sequences their next token; 0: none yet
    num_steps: int = 0
    num_landings: int = 0
    kv_sent_nbytes: int = 0
    kv_received_nbytes: int = 0
    num_dropped_kv_frames: int = 0  # replayed, forged, foreign, out of order or not decodable
    num_handed_over: int = 0  # transfers from here that the peer confirmed
    num_failed_handovers: int = 0  # transfers from here that ended with an error
    num_expired_credits: int = 0  # offers that the peer left waiting for longer than it may
    num_expired_holds: int = 0  # transfers, from here or to here, that stood still for longer than they may
    num_leaked_blocks: int = 0  # held, at the least, by no request; exact while there is none
    is_draining: bool = False  # it takes no new requests
    links: dict[str, str] = {}  # peer's name@epoch -> "up (shm)", "opening", "refused: …"

    @property
    def progress(self) -> int:
        """Grows whenever the worker gets on with anything."""
        return self.num_steps + self.num_landings + self.kv_sent_nbytes + self.kv_received_nbytes


class Heartbeat(Message, frozen=True):
    load: Load | None = None


class Hello(Message, frozen=True):
    """First on every connection; says what kind of peer connects."""

    kind: Literal["scheduler", "worker"]
    version: int = PROTOCOL_VERSION


class Welcome(Message, frozen=True):
    """The answer to a Hello: only now the connection is open. `proof` is what admission.py makes of it.

    `table`: a digest of the global rank table that the process was started with.
    """

    proof: bytes
    table: bytes = b""


class Gone(Message, frozen=True):
    """The receiver of a message has given this connection up: nothing that is said over it is heard any more."""


# ---- scheduler <-> worker


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: what it is now, where, and by which key it is known. The host comes from the scheduler's rank table."""

    name: str
    epoch: int
    role: Role
    host: str
    control_port: int
    public_key: PublicKey
    tp_size: int = 1


class Peers(Message, frozen=True):
    """All live workers, the receiver among them: roles may change. Who is missing, or has a new epoch, is dead."""

    peers: list[PeerInfo]


class Submit(Message, frozen=True):
    request_id: str
    attempt: int
    transfer_id: str
    leg: Leg
    peer: str  # "name@epoch" of the other leg's worker; "" for a hybrid leg
    prompt_token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float  # seconds from now; 0: none
    cache_salt: str = ""
    resumed: list[Resumed] = []  # of a hybrid leg: the sequences that go on; empty: all, from the beginning
    priority: int = 0  # lower ones come first
    gathers: bool = False  # nobody reads single tokens: after the first, many may be told together
    batch: str = ""  # the name of many answers of which its caller wants none early; "": of none


class Abort(Message, frozen=True):
    request_id: str
    attempt: int
    index: int = -1  # one sequence of it; -1: all


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a transfer on a worker, and when by that worker's own monotonic clock."""

    transfer_id: str
    at_s: float
    what: str
    numbers: dict[str, int] = {}


class Outputs(Message, frozen=True):
    """What one step has for one scheduler: tokens, and the legs that ended; `now_s` is the clock of the events."""

    tokens: list[TokenOutput] = []
    ended: list[LegEnd] = []
    prompts: list[PromptOutput] = []
    events: list[TraceEvent] = []
    now_s: float = 0.0


class CacheKeys(Message, frozen=True):
    """Which full blocks a worker can share now (`added`) and which not any more, the last word for each.

    A key is the first 8 bytes of a block's hash (kv/prefix.py); keys are simply put together. With `is_whole` nothing
    that was said before counts.
    """

    added: bytes = b""
    removed: bytes = b""
    is_whole: bool = False


# ---- prefill -> decode and back: the link


class LayoutInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What two pools must agree about; see kv/layout.py."""

    num_layers: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    block_size: int
    dtype: str
    tp_size: int
    tp_rank: int


class KVOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What both ends of a link must have been started with alike."""

    wire_dtype: KVWireDtype = "auto"
    checksum: bool = True
    hmac: bool = True


class LinkOpen(Message, frozen=True):
    """`layout` is of P's rank 0; `lanes` are those of kv/layout.py: a lane is named by its place among them."""

    link_id: str
    model_identity: str
    numerics: Numerics
    layout: LayoutInfo
    num_blocks: int
    options: KVOptions
    lanes: list[LaneOffer]


class LaneOffer(msgspec.Struct, frozen=True, kw_only=True):
    """From one rank of P to one of D. `offers`: for each transport that P allows, where D's rank finds it.

    `probe_seed`: what the probe block of P's rank holds.
    """

    source_rank: int = 0
    target_rank: int = 0
    offers: list[TransportOffer]
    probe_seed: int


class TransportOffer(msgspec.Struct, frozen=True, kw_only=True):
    """local, ipc, shm: `address` is a random name. Else `port` of the store, `address` the group's name.

    `backend`: nccl, hccl or gloo, of a group. `device_uuid`: the accelerator that P's pool is on.
    """

    transport: TransportName
    address: str = ""
    port: int = 0
    backend: str = ""
    device_uuid: str = ""


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """`handle` names an allocation to the driver; the part's `nbytes` begin `offset_nbytes` into it."""

    handle: Annotated[bytes, msgspec.Meta(max_length=512)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    offset_nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class PoolExport(msgspec.Struct, frozen=True, kw_only=True):
    """What P hands to D over their Unix socket (transport/ipc.py): how to map the pool's device memory.

    A block-major pool is one part; one that lies by layers has a part for each, in order.
    """

    parts: Annotated[list[MemoryPart], msgspec.Meta(max_length=MAX_EXPORT_PARTS)]
    block_nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LinkAnswer(Message, frozen=True):
    """D tries this transport in a lane; `layout` is of its rank's pool."""

    link_id: str
    transport: TransportName
    layout: LayoutInfo
    lane: int = 0


class LinkReady(Message, frozen=True):
    """P's probe has come through a lane. `precision` names what the KV loses on its way ("" when it is exact)."""

    link_id: str
    transport: TransportName
    precision: str = ""
    lane: int = 0


class LinkRefused(Message, frozen=True):
    link_id: str
    reason: str
    retry: bool


class Offer(Message, frozen=True):
    transfer_id: str
    num_tokens: int


class Credit(Message, frozen=True):
    """D has landing blocks for tokens [first_token, num_tokens); earlier ones it has already."""

    transfer_id: str
    first_token: int = 0


class Revoke(Message, frozen=True):
    transfer_id: str


class Cancel(Message, frozen=True):
    transfer_id: str
    reason: str


class KVPiece(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [first_token, first_token + num_tokens) of a prompt in layers [first_layer, first_layer + num_layers).

    `block_ids` are P's blocks that hold these tokens; one-sided transports read them.
    """

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    block_ids: list[int]

    @property
    def stop_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def stop_layer(self) -> int:
        return self.first_layer + self.num_layers


class KVChunk(msgspec.Struct, frozen=True, tag=True):
    """Announces one payload. `index` counts the chunks of this transfer from 0; checksum 0: none."""

    transfer_id: str
    index: int
    piece: KVPiece
    nbytes: int
    checksum: int


class KVEnd(msgspec.Struct, frozen=True, tag=True):
    transfer_id: str
    num_chunks: int
    num_tokens: int
    first_tokens: list[TokenOutput]


class KVProbe(msgspec.Struct, frozen=True, tag=True):
    """Announces the probe block as a payload of this transport."""

    transport: TransportName
    chunk: KVChunk


KVHeader = KVChunk | KVEnd | KVProbe


class KVFrame(Message, frozen=True):
    """A header on its way: `sequence` counts the frames of its lane from 0; see transport/guard.py."""

    sequence: int
    header: bytes
    mac: bytes
    lane: int = 0


class Confirm(Message, frozen=True):
    transfer_id: str


class Confirmed(Message, frozen=True):
    transfer_id: str
    held: bool


Body = (
    Heartbeat
    | Hello
    | Welcome
    | Gone
    | Peers
    | Submit
    | Abort
    | Outputs
    | CacheKeys
    | LinkOpen
    | LinkAnswer
    | LinkReady
    | LinkRefused
    | Offer
    | Credit
    | Revoke
    | Cancel
    | KVFrame
    | Confirm
    | Confirmed
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    from_name: str
    from_epoch: int
    to_epoch: int
    body: Body


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    """An envelope whose body is encoded already."""

    from_name: str
    from_epoch: int
    to_epoch: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_export_decoder = msgspec.msgpack.Decoder(PoolExport)
_header_decoder: msgspec.msgpack.Decoder[KVHeader] = msgspec.msgpack.Decoder(KVHeader)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def encode_body(body: Body) -> msgspec.Raw:
    """Done by whoever sends, so that what cannot be encoded is the sender's own error, not the mailbox's end."""
    return msgspec.Raw(_encoder.encode(body))


def encode_header(header: KVHeader) -> bytes:
    return _encoder.encode(header)


def decode_header(data: bytes) -> KVHeader:
    """Raises msgspec.DecodeError (ValidationError included)."""
    return _header_decoder.decode(data)


def decode_export(data: bytes) -> PoolExport:
    """Raises msgspec.DecodeError (ValidationError included)."""
    return _export_decoder.decode(data)


def seal(from_name: str, from_epoch: int, to_epoch: int, body: msgspec.Raw) -> bytes:
    return _encoder.encode(_Sealed(from_name, from_epoch, to_epoch, body))


def decode(frame: bytes) -> Envelope:
    """Raises msgspec.DecodeError (ValidationError included) for anything that is not an envelope."""
    return _decoder.decode(frame)
