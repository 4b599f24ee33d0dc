"""Encodes, seals and decodes messages."""

from __future__ import annotations

import weakref
from typing import cast

import msgspec

from pd_cluster.types import RequestSpec
from pd_cluster.wire.encoder_messages import (
    Encode,
    EncodeAbort,
    EncodeDone,
    EncodeFailed,
    EncoderAnswer,
    EncoderMeet,
    EncoderOpen,
)
from pd_cluster.wire.link_messages import (
    LinkAnswer,
    LinkOpen,
    LinkQueued,
    LinkReady,
    LinkRefused,
    LinkRest,
    LinkValue,
    LinkYield,
)
from pd_cluster.wire.membership_messages import (
    AdapterStates,
    ChangeWeights,
    CheckWeights,
    Gone,
    Heartbeat,
    Hello,
    Join,
    JoinAnswer,
    Leave,
    Peers,
    ResetCache,
    Sleep,
    StaleTerm,
    WantedAdapters,
    Welcome,
)
from pd_cluster.wire.request_messages import Abort, CacheKeys, Outputs, Submit, Wake
from pd_cluster.wire.resume_messages import Attach, Find, Found, Release
from pd_cluster.wire.transfer_messages import Cancel, Confirm, Confirmed, Credit, KVFrame, KVHeader, Offer, Pull, Revoke
from pd_cluster.wire.unit_messages import UnitDone, UnitDrain, UnitKey, UnitTerms, UnitWake
from pd_cluster.wire.weight_messages import SeekWeights, SendWeights, TakeWeights, WeightAddress

Body = (
    Heartbeat
    | Hello
    | Welcome
    | Gone
    | Join
    | JoinAnswer
    | Leave
    | Peers
    | StaleTerm
    | WantedAdapters
    | AdapterStates
    | ResetCache
    | Sleep
    | CheckWeights
    | ChangeWeights
    | Submit
    | Abort
    | Outputs
    | CacheKeys
    | Wake
    | Release
    | Find
    | Found
    | Attach
    | LinkOpen
    | LinkAnswer
    | LinkReady
    | LinkValue
    | LinkRefused
    | LinkRest
    | LinkYield
    | LinkQueued
    | EncoderOpen
    | EncoderAnswer
    | EncoderMeet
    | Encode
    | EncodeDone
    | EncodeFailed
    | EncodeAbort
    | Offer
    | Pull
    | Credit
    | Revoke
    | Cancel
    | KVFrame
    | Confirm
    | Confirmed
    | UnitTerms
    | UnitKey
    | UnitWake
    | UnitDrain
    | UnitDone
    | SeekWeights
    | TakeWeights
    | WeightAddress
    | SendWeights
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    from_name: str
    from_epoch: int
    to_epoch: int
    body: Body


class _SealedEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """An envelope with an encoded body."""

    from_name: str
    from_epoch: int
    to_epoch: int
    body: msgspec.Raw


LONG_NUM_TOKENS = 1 << 14
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_header_decoder: msgspec.msgpack.Decoder[KVHeader] = msgspec.msgpack.Decoder(KVHeader)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def encode_body(body: Body) -> msgspec.Raw:
    """Encodes a body. The sender's thread calls it, so that an encoding error reaches the sender, not the mailbox."""
    if isinstance(body, Submit) and len(body.order.prompt_token_ids) >= LONG_NUM_TOKENS:
        body = msgspec.structs.replace(body, order=cast(RequestSpec, _latest_spec.encode(body.order)))
    return msgspec.Raw(_encoder.encode(body))


class _LatestRequestSpec:
    """The encoding of the latest order with a long prompt: both legs of a request carry the same order."""

    def __init__(self) -> None:
        self._latest: tuple[weakref.ref[RequestSpec], msgspec.Raw] | None = None

    def encode(self, order: RequestSpec) -> msgspec.Raw:
        latest = self._latest
        if latest is not None and latest[0]() is order:
            return latest[1]
        encoded = msgspec.Raw(_encoder.encode(order))
        self._latest = weakref.ref(order, self._forget), encoded
        return encoded

    def _forget(self, gone: weakref.ref[RequestSpec]) -> None:
        if self._latest is not None and self._latest[0] is gone:
            self._latest = None


_latest_spec = _LatestRequestSpec()


def encode_header(header: KVHeader) -> bytes:
    return _encoder.encode(header)


def decode_header(data: bytes) -> KVHeader:
    """Decodes the header. Raises msgspec.DecodeError (including ValidationError)."""
    return _header_decoder.decode(data)


def seal(from_name: str, from_epoch: int, to_epoch: int, body: msgspec.Raw) -> bytes:
    return _encoder.encode(_SealedEnvelope(from_name, from_epoch, to_epoch, body))


def decode(frame: bytes) -> Envelope:
    """Decodes an envelope. Raises msgspec.DecodeError (including ValidationError) for anything else."""
    return _decoder.decode(frame)
