"""Frames around the headers of one link.

Frames are numbered and authenticated, so each frame of the link passes once, in order. The receiver drops and counts
all other frames. A link survives any fault except a missing frame, because the payload that the missing frame announced
cannot be distinguished from the next one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from pd_cluster import wire
from pd_cluster.errors import LinkError

MAC_NBYTES = 16
MAX_SEQUENCE = 1 << 62


@dataclass(frozen=True, slots=True)
class LinkKey:
    """The key of one lane of a link between two lives of instances."""

    key: bytes
    is_on: bool = True  # False: frames are numbered but not authenticated
    lane: int = 0

    @classmethod
    def derive(
        cls, secret: bytes, link_id: str, sender: str, receiver: str, is_on: bool = True, lane: int = 0
    ) -> LinkKey:
        """Derives the key. `sender` and `receiver`: name@epoch."""
        parts = [part.encode() for part in ("pd-cluster kv 2", link_id, str(lane), sender, receiver)]
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return cls(hmac.digest(secret, message, "sha256"), is_on, lane)

    @property
    def checksum_seed(self) -> int:
        return int.from_bytes(hashlib.sha256(b"checksum" + self.key).digest()[:8], "big")

    def mac(self, sequence: int, header: bytes) -> bytes:
        if not self.is_on:
            return b""
        return hmac.digest(self.key, sequence.to_bytes(8, "big") + header, "sha256")[:MAC_NBYTES]


class Sealer:
    """P's end: numbers and signs frames."""

    def __init__(self, key: LinkKey) -> None:
        self._key = key
        self.next_sequence = 0

    def seal(self, header: wire.KVHeader) -> wire.KVFrame:
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        data = wire.encode_header(header)
        return wire.KVFrame(sequence, data, self._key.mac(sequence, data), self._key.lane)


@dataclass(slots=True)
class Opener:
    """D's end: checks frames. `dropped`: counts of dropped frames by reason."""

    key: LinkKey
    next_sequence: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def open(self, frame: wire.KVFrame) -> wire.KVHeader | None:
        """Returns a frame's header; None if the frame is dropped. Raises LinkError if an earlier frame is missing."""
        reason = self._reason_to_drop(frame)
        if reason == "out of order":
            self.dropped[reason] += 1
            raise LinkError(f"KV frame {frame.sequence} arrived, but {self.next_sequence} was expected", retry=True)
        if not reason:
            self.next_sequence += 1
            try:
                return wire.decode_header(frame.header)
            except (msgspec.DecodeError, ValueError):  # ValueError: text that is not UTF-8
                reason = "not decodable"
        self.dropped[reason] += 1
        return None

    def _reason_to_drop(self, frame: wire.KVFrame) -> str:
        if not 0 <= frame.sequence < MAX_SEQUENCE:
            return "forged"
        if not hmac.compare_digest(frame.mac, self.key.mac(frame.sequence, frame.header)):
            return "forged"
        if frame.sequence < self.next_sequence:
            return "replayed"
        return "out of order" if frame.sequence > self.next_sequence else ""
