"""Encodes server-sent events."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


def named_event(name: str, data: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(data)
