"""X25519 of RFC 7748, as in ZeroMQ's CURVE, with the standard library only.

Tables and keys are written on machines without libzmq. The code is not constant-time: a public key is computed once, on
the machine that has just drawn the private key, and a shared secret once for each pair of keys in a process's life.
"""

from __future__ import annotations

from typing import Final

KEY_NBYTES: Final = 32
_PRIME: Final = 2**255 - 19
_BASE_POINT: Final = 9
_A24: Final = 121665  # (486662 - 2) / 4, the curve's constant in the ladder


def public_key(private: bytes) -> bytes:
    """Computes the public key: the product of the base point. Raises ValueError for a key of another length."""
    return _product(private, _BASE_POINT)


def shared_secret(private: bytes, public: bytes) -> bytes:
    """Computes the secret that the owners of two private keys share, each with the other's public key.

    Raises ValueError for a key of another length, and for a public key that gives every owner the same secret.
    """
    if len(public) != KEY_NBYTES:
        raise ValueError(f"a public key has {KEY_NBYTES} bytes, this has {len(public)}")
    found = _product(private, int.from_bytes(public, "little") & (1 << 255) - 1)
    if not any(found):
        raise ValueError("a public key of low order")
    return found


def _product(private: bytes, point: int) -> bytes:
    """Multiplies a point (RFC 7748, section 5: the Montgomery ladder)."""
    if len(private) != KEY_NBYTES:
        raise ValueError(f"a private key has {KEY_NBYTES} bytes, this has {len(private)}")
    scalar = int.from_bytes(private, "little")
    scalar = scalar & ~7 & ~(1 << 255) | 1 << 254
    x2, z2, x3, z3 = 1, 0, point, 1
    swapped = 0
    for at in range(254, -1, -1):
        bit = scalar >> at & 1
        if bit != swapped:
            x2, x3, z2, z3, swapped = x3, x2, z3, z2, bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb = d * a % _PRIME, c * b % _PRIME
        aa, bb = a * a % _PRIME, b * b % _PRIME
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % _PRIME, point * (da - cb) ** 2 % _PRIME
        x2, z2 = aa * bb % _PRIME, e * (aa + _A24 * e) % _PRIME
    if swapped:
        x2, z2 = x3, z3
    return (x2 * pow(z2, _PRIME - 2, _PRIME) % _PRIME).to_bytes(KEY_NBYTES, "little")
