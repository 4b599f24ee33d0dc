"""Server-sent events, as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """Returns an event that carries its `type` as the name, too."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\n" + event(data)
