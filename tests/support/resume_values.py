"""Constants shared by the tests of resumable streams and their processes."""

from __future__ import annotations

DIGEST, OTHER = b"d" * 32, b"d" * 8 + b"e" * 24
WINDOW_S, ROOM = 30.0, 100_000
