"""Computes public keys of X25519 (RFC 7748), which ZeroMQ's CURVE uses, by libzmq or by the host's `openssl`."""

from __future__ import annotations

import subprocess
from typing import Final

from ranktable_tools.errors import MISSING, RankTableError

KEY_NBYTES: Final = 32
_TIMEOUT_S: Final = 10.0
_AS_PRIVATE: Final = bytes.fromhex("302e020100300506032b656e04220420")  # the bytes before a key in DER (RFC 8410)
_AS_PUBLIC: Final = bytes.fromhex("302a300506032b656e032100")


class NoImplementation(RankTableError):
    """This host has neither libzmq nor an `openssl` with X25519."""


def public_key(private: bytes) -> bytes:
    """Computes the public key. Raises ValueError for a key of the wrong length, and NoImplementation."""
    if len(private) != KEY_NBYTES:
        raise ValueError(f"a private key has {KEY_NBYTES} bytes, this one has {len(private)}")
    found = _by_libzmq(private) or _by_openssl(private)
    if found is None:
        expected = "pyzmq for this Python, or `openssl` with X25519"
        way_out = "install one, or run `pd-ranktable keys` on a host that has pd-cluster and copy its files"
        raise NoImplementation("keys", "X25519", MISSING, expected, way_out)
    return found


def _by_libzmq(private: bytes) -> bytes | None:
    try:
        import zmq
        from zmq.utils import z85
    except ImportError:
        return None
    if not zmq.has("curve"):
        return None
    found: bytes = z85.decode(zmq.curve_public(z85.encode(private)))
    return found


def _by_openssl(private: bytes) -> bytes | None:
    """Passes the private key through standard input, because other users can see a process's arguments."""
    command = ["openssl", "pkey", "-inform", "DER", "-pubout", "-outform", "DER"]
    try:
        found = subprocess.run(
            command, input=_AS_PRIVATE + private, capture_output=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    is_public = len(found) == len(_AS_PUBLIC) + KEY_NBYTES and found.startswith(_AS_PUBLIC)
    return found[-KEY_NBYTES:] if is_public else None
