"""Authenticates peers: decides which key may connect under which name, and makes the listening end's proof.

The tables are in docs/protocol/pairs.md, "Opening a connection". Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pd_cluster import wire
from pd_cluster.settings.process_configs import Credentials
from ranktable_tools import public_keys

JOIN_PORT, JOIN_EPOCH = "join", 0  # a worker cannot know the epoch of a scheduler that it has never met
SCHEDULER = ""  # takes the place of a worker's name@epoch


class Life(NamedTuple):
    """One life of a process: after a restart, the process counts as another peer."""

    name: str
    epoch: int


def peer_key(name: str, epoch: int) -> str:
    """Returns the name of one life of a process."""
    return f"{name}@{epoch:x}"


def join_key(secret: bytes) -> bytes:
    """Returns the private key with which every worker of this secret opens a scheduler's join port."""
    return hmac.digest(secret, b"pd-cluster join key 1", "sha256")


class Fence:
    """Distinguishes orders of the present owner of membership from orders of earlier owners, by fencing numbers."""

    def __init__(self) -> None:
        self.term = 0  # the highest term that this process has received
        self.num_stale = 0

    def note(self, term: int) -> None:
        """Records that a scheduler knows this term, even if its owner has given no order yet."""
        self.term = max(self.term, term)

    def admits(self, term: int) -> bool:
        """Returns whether an order of this term is valid; outdated orders are counted, and never become valid again."""
        if term < self.term:
            self.num_stale += 1
            return False
        self.term = term
        return True


class Admission:
    """Decides which peers are admitted. `own` is this process's name@epoch, `public_key` its key."""

    def __init__(self, credentials: Credentials, own: str, public_key: bytes) -> None:
        self._secret = hashlib.sha256(b"pd-cluster welcome 1" + credentials.secret).digest()
        self._own, self._public_key = own, public_key
        self._schedulers: Mapping[bytes, str] = dict.fromkeys(credentials.schedulers, SCHEDULER)
        self._admitted = self._schedulers  # public key -> name@epoch; replaced, never mutated
        self.fence = Fence()

    def may_connect(self, key: bytes) -> bool:
        """Whether a client with this public key may connect at all. ZAP calls it, on its own thread."""
        return key in self._admitted

    def set_peers(self, peers: Sequence[wire.PeerInfo]) -> None:
        """From now on, admits only schedulers and these peers, which a scheduler's valid order has named."""
        named = {each.public_key: peer_key(each.name, each.epoch) for each in peers}
        self._admitted = {**named, **self._schedulers}

    def admits(self, key: bytes, peer: str, kind: Literal["scheduler", "worker"]) -> bool:
        """Returns whether the owner of this key may use this name."""
        return self._admitted.get(key) == (SCHEDULER if kind == "scheduler" else peer)

    def is_worker(self, key: bytes) -> bool:
        """Returns whether the owner of this key, to which this process has connected, is a worker."""
        return key not in self._schedulers

    def proof_to(self, client: str, client_key: bytes) -> bytes:
        """Returns this process's answer to a Hello."""
        return self._proof(self._own, self._public_key, client, client_key)

    def is_proof(self, proof: bytes, server: str, server_key: bytes) -> bool:
        """Checks that the listening end has the cluster's secret."""
        return hmac.compare_digest(proof, self._proof(server, server_key, self._own, self._public_key))

    def _proof(self, server: str, server_key: bytes, client: str, client_key: bytes) -> bytes:
        of = "\n".join((server, server_key.hex(), client, client_key.hex()))
        return hmac.digest(self._secret, of.encode(), "sha256")


class JoinAdmission(Admission):
    """The admission of a join port: admits only the join key, as a worker, under any name."""

    def __init__(self, credentials: Credentials, own: str, own_key: bytes) -> None:
        super().__init__(credentials, own, own_key)
        self._joining = public_keys.public_key(join_key(credentials.secret))

    def may_connect(self, key: bytes) -> bool:
        return key == self._joining

    def admits(self, key: bytes, peer: str, kind: Literal["scheduler", "worker"]) -> bool:
        return key == self._joining and kind == "worker"
