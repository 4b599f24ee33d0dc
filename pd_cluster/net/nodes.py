"""Proofs of nodes' keys: what a process shows of its own node, and what it believes of others'.

The tables are in docs/protocol.md, "Keys of nodes". A proof is a MAC under the secret that a node's key and the other
process's key share (X25519), so only the owner of the node's private key can make it, for this connection alone. Reads
the files again when they change. Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pd_cluster import wire
from pd_cluster.errors import ConfigError, called
from pd_cluster.net.node_files import (
    NodeKeys,
    TrustedNodes,
    read_node_keys,
    read_trusted_nodes,
    stamp_of,
)
from pd_cluster.settings.config import Credentials
from ranktable_tools.curve import shared_secret

log = logging.getLogger(__name__)

End = Literal["client", "server"]
READ_AGAIN_S = 1.0
NODE_REFUSED = "its node is not admitted: "  # the beginning of reasons that last until a file changes
MOST_SECRETS = 4096  # kept: one is a millisecond's work, and nobody may have the same one computed again and again


class Believed(NamedTuple):
    """The node that the other end of a connection has proved to be, and the keys with which it did."""

    node: str = ""
    keys: tuple[bytes, ...] = ()


class Nodes:
    """`own`: this process's name@epoch; `private` and `public`: its CURVE key pair. Used on the mailbox's thread.

    Without files it proves nothing, and asks nobody for a proof.
    """

    def __init__(
        self,
        credentials: Credentials,
        own: str,
        private: bytes,
        public: bytes,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._own, self._private, self._public, self._now_s = own, private, public, now_s
        self._key_file, self._list_file = (
            Path(file) if file else None for file in (credentials.node_key_file, credentials.trusted_nodes)
        )
        self._stamps = self._stamped()
        self._keys = read_node_keys(self._key_file) if self._key_file is not None else None
        self._trusted = read_trusted_nodes(self._list_file) if self._list_file is not None else None
        self._secrets: dict[tuple[bytes, bytes], bytes] = {}

    @property
    def asks(self) -> bool:
        """Whether workers must prove their nodes."""
        return self._list_file is not None

    @property
    def has_files(self) -> bool:
        return self._key_file is not None or self._list_file is not None

    def read_again(self) -> bool:
        """Reads files that have changed. If one has a fault, its last good content stays; one line says so.

        Returns whether the list was read.
        """
        if (stamps := self._stamped()) == self._stamps:
            return False
        before, self._stamps = self._stamps, stamps
        try:
            if self._key_file is not None and stamps[0] != before[0]:
                self._keys = read_node_keys(self._key_file)
                log.info("%s was read again: node %s", self._key_file, self._keys.node)
            if self._list_file is not None and stamps[1] != before[1]:
                self._trusted = read_trusted_nodes(self._list_file)
                log.info("%s was read again: %d nodes", self._list_file, len(self._trusted.nodes))
                return True
        except ConfigError as error:
            log.error("nothing has changed: %s", error)
        return False

    def proofs_to(self, peer: str, peer_key: bytes, end: End) -> tuple[str, tuple[wire.NodeProof, ...]]:
        """Returns this process's node and its proofs to a peer (name@epoch). `end`: this process's own."""
        keys = self._keys
        if keys is None:
            return "", ()
        found: list[wire.NodeProof] = []
        for private, public in zip(keys.private, keys.public, strict=True):
            try:
                secret = self._secret(private, peer_key)
            except ValueError:  # no key that an honest peer has
                continue
            found.append(wire.NodeProof(public, self._mac(secret, peer, peer_key, end, keys.node, public)))
        return keys.node, tuple(found)

    def believe(
        self, node: str, proofs: Sequence[wire.NodeProof], peer: str, peer_key: bytes, end: End, host: str = ""
    ) -> Believed:
        """Checks a peer's proofs of its node. `end`: the peer's. `host`: where this process reached it.

        Raises ConfigError with the reason against it, in one line.
        """
        trusted = self._trusted
        if trusted is None:
            return Believed()
        if not node or not proofs:
            raise ConfigError(
                f"{peer} proves no node, and {self._list_file} asks for one; start it with {called('node_key_file')} "
                f"NODE.key (`pd-cluster keys node new NODE` makes it)"
            )
        if not all(self._is_right(each, node, peer, peer_key, end) for each in proofs):
            raise ConfigError(f"{peer} claims to be node {node}, and has not its key: not admitted")
        proved = tuple(each.public_key for each in proofs)
        if problem := self.problem(node, proved):
            raise ConfigError(f"{peer}: {problem}")
        own = trusted.find(node)
        assert own is not None
        standing = {each.key for each in own.keys if not each.is_over(self._now_s())}
        if not standing.intersection(proved):
            ids = ", ".join(key.hex()[:12] for key in proved)
            raise ConfigError(
                f"{peer}: node {node} has another key ({ids}) than {self._list_file} names for it; "
                f"`pd-cluster keys node trust {node}.pub --file {self._list_file}` adds it"
            )
        if host and not own.may_be_at(host):
            raise ConfigError(
                f"{peer}: node {node} answers at {host}, and {self._list_file} has it at {', '.join(own.hosts)}; "
                f"`pd-cluster keys node trust {node}.pub --host {host} --file {self._list_file}` allows it"
            )
        return Believed(node, proved)

    def problem(self, node: str, keys: Sequence[bytes]) -> str:
        """Returns why a node that has proved these keys may have no connection now; "" if it may.

        A key that is in the list no longer opens no new connection; it ends none, so that keys can be rotated.
        """
        trusted = self._trusted
        if trusted is None:
            return ""
        own = trusted.find(node)
        revocations = [each for key in keys if (each := trusted.revocation_of(node, [key])) is not None]
        revoked = revocations[0] if len(revocations) == len(keys) else None
        if revoked is None and own is None:
            revoked = trusted.revocation_of(node)
        if revoked is not None:
            return (
                f"key {revoked.public[:12]} of node {node} was revoked at {revoked.at} ({self._list_file}); "
                f"`pd-cluster keys node rotate {node}` makes another"
            )
        if own is None:
            return (
                f"node {node} is not trusted: it is not in {self._list_file}; "
                f"`pd-cluster keys node trust {node}.pub --file {self._list_file}` adds it"
            )
        if all(each.is_over(self._now_s()) for each in own.keys):
            last = own.keys[0]
            return (
                f"key {last.id} of node {node} has expired at {last.until} ({self._list_file}); "
                f"`pd-cluster keys node rotate {node}` makes another"
            )
        return ""

    def trusts_key(self, public: bytes) -> bool:
        """Returns whether the list has this key, of any node, and it has not expired."""
        nodes = self._trusted.nodes if self._trusted is not None else []
        return any(each.key == public and not each.is_over(self._now_s()) for node in nodes for each in node.keys)

    def _is_right(self, proof: wire.NodeProof, node: str, peer: str, peer_key: bytes, end: End) -> bool:
        try:
            secret = self._secret(self._private, proof.public_key)
        except ValueError:
            return False
        mac = _mac(secret, end, peer, peer_key, self._own, self._public, node, proof.public_key)
        return hmac.compare_digest(proof.mac, mac)

    def _mac(self, secret: bytes, peer: str, peer_key: bytes, end: End, node: str, public: bytes) -> bytes:
        return _mac(secret, end, self._own, self._public, peer, peer_key, node, public)

    def _secret(self, private: bytes, public: bytes) -> bytes:
        if (known := self._secrets.get((private, public))) is None:
            if len(self._secrets) >= MOST_SECRETS:
                self._secrets.pop(next(iter(self._secrets)))
            known = self._secrets[private, public] = shared_secret(private, public)
        return known

    def _stamped(self) -> list[tuple[int, ...] | None]:
        return [stamp_of(file) if file is not None else None for file in (self._key_file, self._list_file)]


def check_own(keys: NodeKeys, key_file: Path, trusted: TrustedNodes, list_file: Path, now_s: float) -> None:
    """Raises ConfigError for a process whose node its own list does not trust."""
    trust = f"`pd-cluster keys node trust {keys.node}.pub --file {list_file}`"
    own = trusted.find(keys.node)
    known = [each for each in own.keys if each.key in keys.public] if own is not None else []
    if not known and (revoked := trusted.revocation_of(keys.node, keys.public)) is not None:
        raise ConfigError(
            f"{key_file}: key {revoked.public[:12]} of node {keys.node} was revoked at {revoked.at} ({list_file}); "
            f"`pd-cluster keys node rotate {keys.node}` makes another"
        )
    if own is None:
        raise ConfigError(f"{key_file}: node {keys.node} is not in {list_file}; {trust} adds it")
    if not known:
        raise ConfigError(f"{key_file}: {list_file} has another key of node {keys.node}; {trust} adds this one")
    if all(each.is_over(now_s) for each in known):
        raise ConfigError(
            f"{key_file}: key {known[0].id} of node {keys.node} has expired at {known[0].until} ({list_file}); "
            f"`pd-cluster keys node rotate {keys.node}` makes another"
        )


def _mac(
    secret: bytes, end: End, prover: str, prover_key: bytes, peer: str, peer_key: bytes, node: str, public: bytes
) -> bytes:
    """The proof of one end of one connection. Both processes' names, epochs and keys are in it."""
    key = hashlib.sha256(b"pd-cluster node 1" + secret).digest()
    of = "\n".join((end, prover, prover_key.hex(), peer, peer_key.hex(), node, public.hex()))
    return hmac.digest(key, of.encode(), "sha256")
