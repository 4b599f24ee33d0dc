"""Encrypts blocks of KV cache, and their names, for storage outside the process: in files and shared stores.

A block's hash covers model, numerics, variant, salt and all tokens (prefix_index.py). Its body is encrypted with
AES-256-GCM. HKDF derives the key from the secret, the layout and this hash, so a body stored under another block's name
fails authentication. Nonces are 96 random bits; this suffices because a key seals only one content, and only a few
times. A block's name is its hash, encrypted with AES-SIV: without the secret, the name reveals nothing and cannot be
forged; with the secret, it yields the hash.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

MAGIC = b"PDK1"
NONCE_NBYTES, TAG_NBYTES = 12, 16
HEADER_NBYTES = len(MAGIC) + NONCE_NBYTES
OVERHEAD_NBYTES = HEADER_NBYTES + TAG_NBYTES
NAME_LENGTH = 96  # hex digits of a hash and its SIV


class _Key:
    def __init__(self, secret: bytes, scope: bytes) -> None:
        derived = HKDF(SHA256(), 96, salt=b"pd-cluster kv tiers 1", info=scope).derive(secret)
        self._blocks, self._names = derived[:32], AESSIV(derived[32:])

    def name(self, content: bytes) -> str:
        return self._names.encrypt(content, [MAGIC]).hex()

    def content(self, name: str) -> bytes | None:
        try:
            return self._names.decrypt(bytes.fromhex(name), [MAGIC])
        except (InvalidTag, ValueError):
            return None

    def cipher(self, content: bytes) -> AESGCM:
        return AESGCM(HKDFExpand(SHA256(), 32, MAGIC + content).derive(self._blocks))


class Seal:
    """Seals and opens blocks.

    `secrets`: the first one seals; the others are from before a rotation, and only open blocks. `scope` identifies
    everything that a block's hash does not cover: the layout of the pool, the rank's share, every byte of the weights,
    and the programs that computed the block.
    """

    def __init__(self, secrets: Sequence[bytes], scope: bytes, block_nbytes: int) -> None:
        self._keys = [_Key(secret, scope) for secret in secrets]
        self.block_nbytes = block_nbytes
        self.sealed_nbytes = block_nbytes + OVERHEAD_NBYTES

    def names(self, content: bytes) -> list[str]:
        """Returns the names that a content may have. The first is the name under which new blocks are sealed."""
        return [key.name(content) for key in self._keys]

    def content_of(self, name: str) -> bytes | None:
        """Returns the content of a name; None if it was made with none of these secrets."""
        return next((found for key in self._keys if (found := key.content(name)) is not None), None)

    def seal(self, content: bytes, block: memoryview) -> bytearray:
        """Returns a block's header, ciphertext and tag, `sealed_nbytes` bytes in total."""
        nonce, sealed = os.urandom(NONCE_NBYTES), bytearray(self.sealed_nbytes)
        sealed[:HEADER_NBYTES] = MAGIC + nonce
        with memoryview(sealed) as whole:
            self._keys[0].cipher(content).encrypt_into(nonce, block, MAGIC + content, whole[HEADER_NBYTES:])
        return sealed

    def open(self, content: bytes, name: str, sealed: bytes | bytearray | memoryview, into: memoryview) -> bool:
        """Writes the block to `into`. Returns False if `sealed` is not what was sealed under this name."""
        with memoryview(sealed) as whole:
            if len(whole) != self.sealed_nbytes or whole[: len(MAGIC)] != MAGIC:
                return False
            nonce = bytes(whole[len(MAGIC) : HEADER_NBYTES])
            for key in self._keys:
                if key.name(content) == name:
                    try:
                        key.cipher(content).decrypt_into(nonce, whole[HEADER_NBYTES:], MAGIC + content, into)
                    except InvalidTag:
                        return False
                    return True
        return False
