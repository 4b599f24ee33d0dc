"""Messages survive the wire, and all other bytes are rejected."""

from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.kv.layout import keys_and_values
from pd_cluster.numerics import Numerics
from pd_cluster.transport.device_memory import MemoryPart
from pd_cluster.transport.ipc import MAX_EXPORT_NBYTES, PoolExport, decode_export
from pd_cluster.types import MOST_UNTOLD, Image, LegEnd, LinkState, Order, RopePositions, Sampling, Span, TokenOutput

LAYOUT = wire.LayoutInfo(
    num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=16, dtype="float32", tp_size=1, tp_rank=0
)
TOKEN = TokenOutput("r", 0, 0, 3, 17, "stop", earlier=(2**31 - 1, 0))
BODIES: list[wire.Body] = [
    wire.Heartbeat(load=wire.Load(num_blocks=3, links={"decode-0@1": LinkState("up", ("shm",))})),
    wire.Heartbeat(),
    wire.Hello(kind="worker"),
    wire.Welcome(b"p" * 32, b"t" * 16),
    wire.Gone(),
    wire.Join(role="decode", host="fd00::1", port=65535, device_ids=["4", "5"], model_identity="ab" * 32),
    wire.JoinAnswer("no"),
    wire.Leave(),
    wire.WantedAdapters([wire.AdapterPlace("ab" * 32, "/adapters/french")]),
    wire.ResetCache(),
    wire.Sleep(2),
    wire.AdapterStates(["ab" * 32], {"cd" * 32: "no such folder"}),
    wire.Peers(
        [
            wire.PeerInfo(
                name="decode-0", epoch=2**61, role="decode", host="127.0.0.1", control_port=1, public_key=b"k" * 32
            )
        ],
        term=2**62,
    ),
    wire.StaleOrder(2**62),
    wire.Submit(
        "r", 0, "t", "prefill", "decode-0@1", Order([1, 2, 3], Sampling(stop_token_ids=(4,), seed=2**64 - 1)), 9.5
    ),
    wire.Submit("r", 0, "t", "decode", "", Order([1], Sampling(beam_width=2, early_stopping="never")), 0.0),
    wire.Submit(
        "r", 1, "t", "hybrid", "", Order([1], Sampling()), 0.0, keep=wire.Keep(b"d" * 32, 0.5, 9, b"r", None, [TOKEN])
    ),
    wire.Release("r", 0, "go on"),
    wire.Find(b"d" * 32),
    wire.Found(b"d" * 32, "r", 1, Order([1], Sampling()), b"recipe", 7),
    wire.Attach(b"d" * 32, "r", 1),
    wire.Abort("r", 1),
    wire.Outputs([TOKEN], [LegEnd("r", 0, "broken")]),
    wire.Outputs(events=[wire.TraceEvent("t", 2.5, "sent", {"start": 0, "nbytes": 2**62})], now_s=3.5),
    wire.Submit("r", 0, "t", "hybrid", "", Order([1], Sampling(), priority=-7, gathers=True, batch="b"), 0.0),
    wire.Submit(
        "r",
        0,
        "t",
        "prefill",
        "decode-0@1",
        Order(
            [1, 2, 2],
            Sampling(),
            spans=(Span(1, 3, b"d" * 32),),
            images=(Image(2, 4, bytes(range(256))),),
            rope_positions=RopePositions(((0, 1, 1), (0, 1, 1), (0, 1, 2)), -1),
        ),
        0.0,
    ),
    wire.CacheKeys(added=b"8 bytes.", removed=bytes(16), is_whole=True, tier="disk"),
    wire.LinkOpen(
        "l",
        "id",
        Numerics(),
        LAYOUT,
        7,
        wire.KVOptions(),
        [
            wire.LaneOffer(
                offers=[
                    wire.TransportOffer(transport="shm", data=b"a"),
                    wire.TransportOffer(transport="ipc", data=b"b GPU-1"),
                    wire.TransportOffer(transport="nccl"),
                ],
                probe_seed=2**62,
            )
        ],
    ),
    wire.EncoderOpen("id", Numerics(), ["shm", "dist"]),
    wire.EncoderAnswer("", "socket", "group"),
    wire.EncoderMeet(),
    wire.Encode(2**61, b"d" * 32 + b"salt", Image(2, 4, bytes(range(256))), 10.0),
    wire.EncodeDone(2**61, bytes(16), 192, 2**64 - 1),
    wire.EncodeFailed(1, "full"),
    wire.EncodeAbort([1, 2]),
    wire.LinkAnswer("l", "dist", LAYOUT),
    wire.LinkReady("l", "shm"),
    wire.LinkValue("dist", "0/1", b"\2\0", 3),
    wire.LinkRefused("l", "no", False),
    wire.LinkRest("l"),
    wire.LinkYield("l"),
    wire.LinkQueued("l"),
    wire.Offer("t", 5, num_cached_tokens=3),
    wire.Credit("t"),
    wire.Revoke("t"),
    wire.Cancel("t", "full"),
    wire.KVFrame(2**61, b"header", b"mac"),
    wire.Confirm("t"),
    wire.Confirmed("t", True),
]


HEADERS: list[wire.KVHeader] = [
    wire.KVChunk("t", 0, wire.KVPiece(0, 20, 3, 2, [1, 2]), 64, 2**64 - 1),
    wire.KVEnd("t", 1, 5, [TOKEN]),
    wire.KVEnd("t", 1, 5, [TokenOutput("r", 0, 1, 0, 17, score=-0.1)]),
    wire.KVProbe("dist", wire.KVChunk("", 0, wire.KVPiece(0, 16, 0, 2, [9]), 64, 1)),
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: type(header).__name__)
def test_headers_round_trip(header: wire.KVHeader) -> None:
    assert wire.decode_header(wire.encode_header(header)) == header


def test_every_message_is_here() -> None:
    assert {type(body) for body in BODIES} == set(get_args(wire.Body))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_round_trip(body: wire.Body) -> None:
    envelope = wire.Envelope("prefill-0", 2**62 - 1, 5, body)
    assert wire.decode(wire.encode(envelope)) == envelope


@pytest.mark.parametrize("seed", range(20))
def test_damaged_frames_are_refused_or_still_typed(seed: int) -> None:
    """Whatever bytes come: a DecodeError, or an envelope whose fields have the right types."""
    rng = random.Random(seed)
    for body in BODIES:
        frame = bytearray(wire.encode(wire.Envelope("prefill-0", 1, 2, body)))
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            envelope = wire.decode(bytes(frame[: rng.randrange(1, len(frame) + 1)]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        assert type(envelope.body) in get_args(wire.Body)
        assert isinstance(envelope.to_epoch, int)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_sealing_in_two_steps_is_the_same(body: wire.Body) -> None:
    assert wire.seal("a", 1, 2, wire.encode_body(body)) == wire.encode(wire.Envelope("a", 1, 2, body))


def test_what_cannot_be_encoded_is_the_senders_error() -> None:
    with pytest.raises(OverflowError):
        wire.encode_body(wire.Submit("r", 0, "t", "prefill", "", Order([1], Sampling(top_k=2**70)), 0.0))


def test_a_foreign_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode(msgspec.msgpack.encode(["a", 1, 2, {"type": "Shutdown"}]))


def test_more_tokens_together_than_are_ever_told_are_no_message() -> None:
    for num_tokens, is_one in ((MOST_UNTOLD, True), (MOST_UNTOLD + 1, False)):
        token = TokenOutput("r", 0, 0, num_tokens, 5, earlier=(5,) * num_tokens)
        frame = wire.encode(wire.Envelope("decode-0", 1, 2, wire.Outputs([token])))
        if is_one:
            assert wire.decode(frame).body == wire.Outputs([token])
        else:
            with pytest.raises(msgspec.ValidationError, match="<= 63"):
                wire.decode(frame)


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


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_an_id_that_no_vocabulary_has_is_no_message(token_id: int) -> None:
    for token in (TokenOutput("r", 0, 0, 1, token_id), TokenOutput("r", 0, 0, 1, 5, earlier=(token_id,))):
        with pytest.raises(msgspec.ValidationError):
            wire.decode(wire.encode(wire.Envelope("decode-0", 1, 2, wire.Outputs([token]))))
