"""Whom a process takes for whom: which key may connect to it, as what, and how the end that listens proves itself.

The tables are in docs/protocol.md, "Who may connect to whom". Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Literal

from pd_cluster import wire
from pd_cluster.config import Credentials

SCHEDULER = ""  # in place of a worker's name@epoch


def peer_key(name: str, epoch: int) -> str:
    """How a life of a process is named everywhere: a restarted one is somebody else."""
    return f"{name}@{epoch:x}"


class Admission:
    """`own` is this process's name@epoch, `public_key` its key."""

    def __init__(self, credentials: Credentials, own: str, public_key: bytes) -> None:
        self._secret = hashlib.sha256(b"pd-cluster welcome 1" + credentials.secret).digest()
        self._own, self._public_key = own, public_key
        self._schedulers: Mapping[bytes, str] = dict.fromkeys(credentials.schedulers, SCHEDULER)
        self._admitted = self._schedulers  # public key -> name@epoch; replaced, never changed

    def may_connect(self, key: bytes) -> bool:
        """ZAP's question, on a thread of its own: may a client with this public key connect at all?"""
        return key in self._admitted

    def hear(self, peers: Sequence[wire.PeerInfo]) -> None:
        """From now on those whom a scheduler names may connect, and the schedulers; nobody else."""
        named = {each.public_key: peer_key(each.name, each.epoch) for each in peers}
        self._admitted = {**named, **self._schedulers}

    def admits(self, key: bytes, peer: str, kind: Literal["scheduler", "worker"]) -> bool:
        """Whether the owner of this key may call itself so."""
        return self._admitted.get(key) == (SCHEDULER if kind == "scheduler" else peer)

    def proof_to(self, client: str, client_key: bytes) -> bytes:
        """Returns what this process answers to a Hello."""
        return self._proof(self._own, self._public_key, client, client_key)

    def is_proof(self, proof: bytes, server: str, server_key: bytes) -> bool:
        """Whether the end that this process has connected to has the cluster's secret."""
        return hmac.compare_digest(proof, self._proof(server, server_key, self._own, self._public_key))

    def _proof(self, server: str, server_key: bytes, client: str, client_key: bytes) -> bytes:
        of = "\n".join((server, server_key.hex(), client, client_key.hex()))
        return hmac.digest(self._secret, of.encode(), "sha256")
