"""Makes a process's proofs of its own node, and checks those of its peers.

The tables are in docs/protocol/pairs.md, "Keys of nodes". A proof is a MAC under the secret that a node's key and the
other process's key share (X25519). So only the owner of the node's private key can make the proof, and the proof is
valid only for this connection. Files are reread when they change. Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pd_cluster import wire
from pd_cluster.errors import ConfigError, called
from pd_cluster.extras.node_keys.node_key_files import (
    NEW,
    NodeKeys,
    TrustedNodes,
    read_node_keys,
    read_trusted_nodes,
    stamp_of,
)
from pd_cluster.net.node_trust import End, ProvenNode, plain
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.process_settings import KeyFiles

log = logging.getLogger(__name__)

T = TypeVar("T")


class Claim(NamedTuple):
    """The content of the proof that one end of a connection sends. It covers both processes' names, epochs and keys."""

    end: End
    prover: str
    prover_key: bytes
    peer: str
    peer_key: bytes
    node: str
    public: bytes

    def mac(self, secret: bytes) -> bytes:
        key = hashlib.sha256(b"pd-cluster node 1" + secret).digest()
        of = "\n".join(each.hex() if isinstance(each, bytes) else each for each in self)
        return hmac.digest(key, of.encode(), "sha256")


class ReloadedFile(Generic[T]):
    """A file that is reread when it changes. If reading fails, the last content stays, and every `look` tries again."""

    def __init__(self, file: Path, read: Callable[[Path], T]) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self.file, self._read = file, read
        self._stamp = stamp_of(file)  # before the content, so that a change in between is read again
        self.content = read(file)
        self._problem = ""

    def look(self) -> bool:
        """Rereads the file if it has changed; returns whether the content is new. Logs a problem only once while it
        lasts.
        """
        if (stamp := stamp_of(self.file)) == self._stamp:
            self._problem = ""
            return False
        try:
            self.content = self._read(self.file)
        except ConfigError as error:
            if str(error) != self._problem:
                log.error("the last valid content applies: %s", error)
            self._problem = str(error)
            return False
        self._stamp, self._problem = stamp, ""
        return True


class Nodes:
    """A process's own node and the nodes that it trusts. Either file may be missing.

    `own`: this process's name@epoch; `private` and `public`: its CURVE key pair.
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
        key_file, list_file = credentials.node_key_file, credentials.trusted_nodes
        self._keys = ReloadedFile(Path(key_file), read_node_keys) if key_file else None
        self._trusted = ReloadedFile(Path(list_file), read_trusted_nodes) if list_file else None
        self._list_file = list_file

    @property
    def has_files(self) -> bool:
        return self._keys is not None or self._trusted is not None

    @property
    def private_key(self) -> bytes:
        return self._keys.content.private[0] if self._keys is not None else b""

    def read_again(self) -> bool:
        """Reads each file that has changed, even if the other is faulty. Returns whether the list was read."""
        if self._keys is not None and self._keys.look():
            log.info("%s was read again: node %s", self._keys.file, self._keys.content.node)
        if self._trusted is None or not self._trusted.look():
            return False
        log.info("%s was read again: %d nodes", self._trusted.file, len(self._trusted.content.nodes))
        return True

    def proofs_to(self, peer: str, peer_key: bytes, end: End) -> tuple[str, tuple[wire.NodeProof, ...]]:
        """Returns this process's node and its proofs to a peer (name@epoch). `end`: this process's end."""
        if self._keys is None:
            return "", ()
        keys = self._keys.content
        found: list[wire.NodeProof] = []
        for private, public in zip(keys.private, keys.public, strict=True):
            try:
                secret = shared_secret(private, peer_key)
            except ValueError:  # an invalid key, which no honest peer has
                continue
            claim = Claim(end, self._own, self._public, peer, peer_key, keys.node, public)
            found.append(wire.NodeProof(public, claim.mac(secret)))
        return keys.node, tuple(found)

    def believe(
        self, node: str, proofs: Sequence[wire.NodeProof], peer: str, peer_key: bytes, end: End, host: str = ""
    ) -> ProvenNode:
        """Checks a peer's proofs of its node. `end`: the peer's end. `host`: where this process reached it.

        Only proofs whose key is in the list are computed and counted. Raises ConfigError with the reason for refusal,
        in one line.
        """
        if self._trusted is None:
            return ProvenNode()
        shown = plain(peer)
        if not node or not proofs:
            raise ConfigError(
                f"{shown} proves no node, and {self._list_file} requires one; start it with {called('node_key_file')} "
                f"NODE.key (`pd-cluster keys node new NODE` makes it)"
            )
        if problem := self.problem(node, [each.public_key for each in proofs]):
            raise ConfigError(f"{shown}: {problem}")
        own = self._trusted.content.find(node)
        assert own is not None
        standing = {each.key for each in self._trusted.content.standing(own, self._now_s())}
        counted = [each for each in proofs if each.public_key in standing]
        if not counted:
            ids = ", ".join(each.public_key.hex()[:12] for each in proofs)
            raise ConfigError(
                f"{shown}: node {node} has another key ({ids}) than {self._list_file} names for it; "
                f"`pd-cluster keys node trust {node}.pub --file {self._list_file}` adds it"
            )
        if not all(self._is_right(each, node, peer, peer_key, end) for each in counted):
            raise ConfigError(f"{shown} claims to be node {node}, but does not have its key: not admitted")
        if host and not own.may_be_at(host):
            raise ConfigError(
                f"{shown}: node {node} answers at {host}, but {self._list_file} allows it at {', '.join(own.hosts)}; "
                f"`pd-cluster keys node trust {node}.pub --host {host} --file {self._list_file}` allows it"
            )
        return ProvenNode(node, tuple(each.public_key for each in counted))

    def problem(self, node: str, keys: Sequence[bytes]) -> str:
        """Returns why a node that has proved these keys must not be connected now; "" if it may be.

        A key that was removed from the list opens no new connections, but keeps those that are open, so that keys can
        be rotated.
        """
        if self._trusted is None:
            return ""
        trusted = self._trusted.content
        own = trusted.find(node)
        revocations = [each for key in keys if (each := trusted.revocation_of(node, [key])) is not None]
        revoked = revocations[0] if len(revocations) == len(keys) else None
        is_dead = own is not None and not trusted.standing(own, self._now_s())
        if revoked is None and (own is None or is_dead):
            revoked = trusted.revocation_of(node, [each.key for each in own.keys] if own is not None else ())
        if revoked is not None:
            return (
                f"key {revoked.public[:12]} of node {node} was revoked at {revoked.at} ({self._list_file}); "
                f"`pd-cluster keys node rotate {node}` makes another"
            )
        if own is None:
            return (
                f"node {plain(node)} is not trusted: it is not in {self._list_file}; "
                f"`pd-cluster keys node trust {plain(node)}.pub --file {self._list_file}` adds it"
            )
        if is_dead:
            last = own.keys[0]
            return (
                f"key {last.id} of node {node} expired at {last.until} ({self._list_file}); "
                f"`pd-cluster keys node rotate {node}` makes another"
            )
        return ""

    def trusts_key(self, public: bytes) -> bool:
        """Returns whether the list has this key for any node, and it is neither revoked nor expired."""
        if self._trusted is None:
            return False
        trusted, now_s = self._trusted.content, self._now_s()
        holders = (node for node in trusted.nodes if any(each.key == public for each in node.keys))
        return any(each.key == public for node in holders for each in trusted.standing(node, now_s))

    def _is_right(self, proof: wire.NodeProof, node: str, peer: str, peer_key: bytes, end: End) -> bool:
        try:
            secret = shared_secret(self._private, proof.public_key)
        except ValueError:
            return False
        claim = Claim(end, peer, peer_key, self._own, self._public, node, proof.public_key)
        return hmac.compare_digest(proof.mac, claim.mac(secret))


def shared_secret(private: bytes, public: bytes) -> bytes:
    """Returns the secret of X25519 that the owners of two key pairs share.

    Raises ValueError for a key of a wrong length, and for a public key with which every private key gives the same
    secret.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def check_node_files(files: KeyFiles, is_worker: bool) -> None:
    """Raises ConfigError if the node files cannot be used, or a worker's own list does not trust its node."""
    if importlib.util.find_spec("cryptography") is None:
        flag = "--node-key-file" if files.node_key else "--trusted-nodes"
        raise ConfigError(f"{flag}: cryptography is not installed; pip install 'pd-cluster[node-keys]'")
    trusted = read_trusted_nodes(Path(files.trusted_nodes)) if files.trusted_nodes else None
    if not files.node_key:
        if is_worker:
            raise ConfigError(
                f"--trusted-nodes {files.trusted_nodes}: a worker also needs its own key, named by --node-key-file; "
                f"{NEW}"
            )
        return
    keys = read_node_keys(Path(files.node_key))
    if trusted is not None and is_worker:
        check_own(keys, Path(files.node_key), trusted, Path(files.trusted_nodes), time.time())


def check_own(keys: NodeKeys, key_file: Path, trusted: TrustedNodes, list_file: Path, now_s: float) -> None:
    """Raises ConfigError for a process whose node its own list does not trust."""
    trust = f"`pd-cluster keys node trust {keys.node}.pub --file {list_file}`"
    own = trusted.find(keys.node)
    shown = [each for each in own.keys if each.key in keys.public] if own is not None else []
    known = [each for each in shown if trusted.revocation_of(keys.node, [each.key]) is None]
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
            f"{key_file}: key {known[0].id} of node {keys.node} expired at {known[0].until} ({list_file}); "
            f"`pd-cluster keys node rotate {keys.node}` makes another"
        )
