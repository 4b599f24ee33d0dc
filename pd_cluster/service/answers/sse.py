"""Server-sent events, as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
