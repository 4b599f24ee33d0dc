"""A link accepts only its own frames, once and in order; it drops and counts all others."""

from __future__ import annotations

import random

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.errors import LinkError
from pd_cluster.transport.link_frames import LinkKey, Opener, Sealer
from pd_cluster.types import TokenOutput

KEY = LinkKey.derive(b"secret", "link", "prefill-0@1", "decode-0@2")
OTHERS = [
    LinkKey.derive(b"another secret", "link", "prefill-0@1", "decode-0@2"),
    LinkKey.derive(b"secret", "another link", "prefill-0@1", "decode-0@2"),
    LinkKey.derive(b"secret", "link", "prefill-0@9", "decode-0@2"),  # an earlier process of the peer
    LinkKey.derive(b"secret", "link", "prefill-0@1", "decode-0@9"),
    LinkKey.derive(b"secret", "linkprefill-0@1", "", "decode-0@2"),  # the same bytes, split differently
]


def header(at: int) -> wire.KVHeader:
    return wire.KVEnd(f"t{at}", at, 5, [TokenOutput("r", 0, 0, 0, 5)])


def frames(key: LinkKey = KEY, count: int = 3) -> list[wire.KVFrame]:
    sealer = Sealer(key)
    return [sealer.seal(header(at)) for at in range(count)]


def test_frames_pass_in_order_and_once() -> None:
    opener = Opener(KEY)
    first, second, third = frames()
    assert [opener.open(frame) for frame in (first, second)] == [header(0), header(1)]
    assert not opener.dropped
    assert [opener.open(frame) for frame in (first, second, third)] == [None, None, header(2)]
    assert opener.dropped == {"replayed": 2}


@pytest.mark.parametrize("key", OTHERS)
def test_a_frame_of_another_link_is_dropped(key: LinkKey) -> None:
    opener = Opener(KEY)
    assert opener.open(frames(key)[0]) is None
    assert opener.dropped == {"forged": 1}
    assert opener.open(frames()[0]) == header(0), "the link must stay up"


def test_a_missing_frame_ends_the_link() -> None:
    opener = Opener(KEY)
    first, _, third = frames()
    assert opener.open(first) is not None
    with pytest.raises(LinkError, match="frame 2 arrived, but 1 was expected") as caught:
        opener.open(third)
    assert caught.value.retry
    assert opener.dropped == {"out of order": 1}


def test_a_header_that_does_not_decode_is_dropped() -> None:
    opener = Opener(KEY)
    odd = wire.encode_header(wire.KVEnd("transfer", 0, 0, [])).replace(b"transfer", b"\xff\xfe" * 4)
    for at, data in enumerate((b"\xc1 nothing", odd)):
        assert opener.open(wire.KVFrame(at, data, KEY.mac(at, data))) is None
    assert opener.dropped == {"not decodable": 2}


def test_any_change_of_a_frame_is_noticed() -> None:
    rng, frame = random.Random(0), frames()[0]
    for _ in range(60):
        name = rng.choice(["sequence", "header", "mac"])
        if name == "sequence":
            changed = msgspec.structs.replace(frame, sequence=rng.choice([1, -1, 2**63, 2**64 - 1]))
        else:
            data = bytearray(getattr(frame, name))
            if rng.random() < 0.3:
                del data[rng.randrange(len(data)) :]
            else:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            changed = msgspec.structs.replace(frame, **{name: bytes(data)})
        opener = Opener(KEY)
        assert opener.open(changed) is None
        assert opener.dropped == {"forged": 1}


def test_without_hmac_frames_are_still_numbered() -> None:
    key = LinkKey.derive(b"secret", "link", "p", "d", is_on=False)
    opener = Opener(key)
    first, second, _ = frames(key)
    assert first.mac == b""
    assert opener.open(first) is not None
    assert opener.open(first) is None
    assert opener.open(second) is not None
    unproven = LinkKey.derive(b"secret", "link", "prefill-0@1", "decode-0@2", is_on=False)
    assert Opener(KEY).open(frames(unproven)[0]) is None, "an unproven frame must not be accepted"
