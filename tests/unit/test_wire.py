"""Messages survive encoding and decoding, and all other bytes are rejected."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from pd_cluster import wire
from pd_cluster.transport.device_memory import MemoryPart
from pd_cluster.transport.ipc import MAX_EXPORT_NBYTES, PoolExport, decode_export
from pd_cluster.types import MAX_UNSENT, RequestSpec, Sampling, TokenOutput


def any_of(kind: inspect.Type, rng: random.Random) -> Any:
    """Draws a value of a type within the limits of its annotation."""
    match kind:
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType(ge=least, le=most):
            return rng.choice([0 if least is None else least, 1, 2**63 - 1 if most is None else most])
        case inspect.FloatType(ge=least):
            return rng.choice([0.0 if least is None else least, 9.5])
        case inspect.StrType(pattern=pattern):
            return rng.choice(["", "r", "é"]) if pattern is None else "ab" * 32  # a digest
        case inspect.BytesType(min_length=least, max_length=most):
            return rng.randbytes(least or rng.randrange(40 if most is None else most + 1))
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.UnionType(types=types):
            return any_of(rng.choice(types), rng)
        case inspect.ListType(item_type=item, min_length=least):
            return [any_of(item, rng) for _ in range(least or rng.randrange(3))]
        case inspect.VarTupleType(item_type=item, min_length=least):
            return tuple(any_of(item, rng) for _ in range(least or rng.randrange(3)))
        case inspect.TupleType(item_types=items):
            return tuple(any_of(item, rng) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {any_of(key, rng): any_of(value, rng) for _ in range(rng.randrange(3))}
        case inspect.NamedTupleType(cls=struct, fields=fields):
            return struct(*(any_of(each.type, rng) for each in fields))
        case inspect.StructType(cls=struct, fields=fields):
            return struct(**{each.name: any_of(each.type, rng) for each in fields})
        case inspect.NoneType():
            return None
    raise AssertionError(kind)


def some(struct: Any, number: int) -> list[Any]:
    rng = random.Random(struct.__name__)
    return [any_of(inspect.type_info(struct), rng) for _ in range(number)]


KINDS: tuple[Any, ...] = get_args(wire.Body)


PEER = wire.PeerInfo(name="decode-0", epoch=2**61, role="decode", host="h", control_port=1, public_key=b"k" * 32)
EXTREME: list[wire.Body] = [
    wire.Join(role="decode", host="fd00::1", port=65535, device_ids=["4", "5"], model_identity="ab" * 32),
    wire.Peers([PEER], term=2**62),
    wire.Submit("r", 0, "t", "hybrid", "", RequestSpec([1], Sampling(seed=2**64 - 1), priority=-7, gathers=True), 0.0),
    wire.Submit("r", 0, "t", "decode", "", RequestSpec([1], Sampling(beam_width=2, early_stopping="never")), 0.0),
    wire.Outputs(events=[wire.TraceEvent("t", 2.5, "sent", {"start": 0, "nbytes": 2**62})], now_s=3.5),
    wire.CacheKeys(added=b"8 bytes.", removed=bytes(16), is_whole=True, tier="disk"),
    wire.EncodeDone(2**61, bytes(16), 192, 2**64 - 1),
    wire.KVFrame(2**61, b"header", b"mac"),
]


def test_a_long_order_arrives_whole_whichever_was_encoded_before() -> None:
    """Both legs of a request carry one order, whose encoding is kept while it lives."""
    orders = [RequestSpec([at] * 20_000, Sampling(seed=at)) for at in (1, 2)]
    for order in (orders[0], orders[0], orders[1], orders[0], RequestSpec([3] * 20_000, Sampling())):
        for leg in ("prefill", "decode"):
            submit = wire.Submit("r", 1, "t", leg, "peer", order, 2.5, weight=7)
            sealed = wire.seal("s", 1, 2, wire.encode_body(submit))
            assert wire.decode(sealed).body == submit
            assert sealed == wire.encode(wire.Envelope("s", 1, 2, submit))


def test_extremes_are_within_the_limits() -> None:
    for body in EXTREME:
        assert wire.decode(wire.encode(wire.Envelope("prefill-0", 1, 2, body))).body == body
    header = wire.KVChunk("t", 0, wire.KVPiece(0, 20, 3, 2, [1, 2]), 64, 2**64 - 1)
    assert wire.decode_header(wire.encode_header(header)) == header


@pytest.mark.parametrize("kind", get_args(wire.KVHeader), ids=lambda kind: kind.__name__)
def test_headers_round_trip(kind: Any) -> None:
    for header in some(kind, 20):
        assert wire.decode_header(wire.encode_header(header)) == header


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_round_trip(kind: Any) -> None:
    """Covers sealing in one step and in two."""
    for body in some(kind, 30):
        envelope = wire.Envelope("prefill-0", 2**62 - 1, 5, body)
        frame = wire.encode(envelope)
        assert wire.decode(frame) == envelope
        assert wire.seal("prefill-0", 2**62 - 1, 5, wire.encode_body(body)) == frame


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damaged_frames_are_refused_or_still_typed(kind: Any) -> None:
    """Any bytes give a DecodeError, or an envelope whose fields have the right types."""
    rng = random.Random(1)
    for body in some(kind, 20):
        frame = bytearray(wire.encode(wire.Envelope("prefill-0", 1, 2, body)))
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            envelope = wire.decode(bytes(frame[: rng.randrange(1, len(frame) + 1)]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        assert type(envelope.body) in KINDS
        assert isinstance(envelope.to_epoch, int)


def test_what_cannot_be_encoded_is_the_senders_error_and_a_foreign_message_is_refused() -> None:
    with pytest.raises(OverflowError):
        wire.encode_body(wire.Submit("r", 0, "t", "prefill", "", RequestSpec([1], Sampling(top_k=2**70)), 0.0))
    with pytest.raises(msgspec.ValidationError):
        wire.decode(msgspec.msgpack.encode(["a", 1, 2, {"type": "Shutdown"}]))


def test_more_tokens_together_than_are_ever_told_and_ids_that_no_vocabulary_has_are_no_message() -> None:
    most = TokenOutput("r", 0, 0, MAX_UNSENT, 5, earlier=(5,) * MAX_UNSENT)
    frame = wire.encode(wire.Envelope("decode-0", 1, 2, wire.Outputs([most])))
    assert wire.decode(frame).body == wire.Outputs([most])
    wrong = [msgspec.structs.replace(most, earlier=(5,) * (MAX_UNSENT + 1))]
    for token_id in (-1, 2**31):
        wrong += [TokenOutput("r", 0, 0, 1, token_id), TokenOutput("r", 0, 0, 1, 5, earlier=(token_id,))]
    for token in wrong:
        with pytest.raises(msgspec.ValidationError):
            wire.decode(wire.encode(wire.Envelope("decode-0", 1, 2, wire.Outputs([token]))))


def test_what_maps_a_pool_survives_and_is_bounded() -> None:
    part = MemoryPart(handle=b"h" * 512, nbytes=2**61, offset_nbytes=2**61)
    for num_parts in (1, 40):
        export = PoolExport(parts=[part] * num_parts, block_nbytes=2**61)
        data = msgspec.msgpack.encode(export)
        assert len(data) <= MAX_EXPORT_NBYTES * num_parts
        assert decode_export(data) == export
    whole = msgspec.structs.asdict(export)
    for change in ({"handle": b"h" * 513}, {"nbytes": -1}, {"offset_nbytes": 2**62}):
        broken = whole | {"parts": [msgspec.structs.asdict(part), msgspec.structs.asdict(part) | change]}
        with pytest.raises(msgspec.DecodeError):
            decode_export(msgspec.msgpack.encode(broken))
    for wrong in ({"block_nbytes": 1.5}, {"parts": [part] * 1025}, {"parts": None}):
        with pytest.raises(msgspec.DecodeError):
            decode_export(msgspec.msgpack.encode(whole | wrong))
