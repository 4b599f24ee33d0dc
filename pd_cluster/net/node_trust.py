"""The protocol by which processes prove on which node they run; the extra `node_keys` implements it.

Without node keys, a process proves no node and accepts every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from pd_cluster import extra_table, wire
from pd_cluster.errors import called
from pd_cluster.settings.process_configs import Credentials

End = Literal["client", "server"]
READ_AGAIN_S = 1.0
NODE_REFUSED = "its node is not admitted: "  # the prefix of reasons that last until a file changes
MOST_SHOWN = 200  # characters


class ProvenNode(NamedTuple):
    """The node that a peer has proved to be, and the listed keys that it proved."""

    node: str = ""
    keys: tuple[bytes, ...] = ()


class NodeTrust(Protocol):
    """Makes a process's proofs of its own node, and checks those of its peers. Used on the mailbox's thread."""

    @property
    def has_files(self) -> bool:
        """Whether proofs are made or required."""

    @property
    def private_key(self) -> bytes:
        """The newest private key of this process's own node."""

    def read_again(self) -> bool:
        """Reads each file that has changed, even if the other is faulty. Returns whether the list was read."""

    def proofs_to(self, peer: str, peer_key: bytes, end: End) -> tuple[str, tuple[wire.NodeProof, ...]]:
        """Returns this process's node and its proofs to a peer (name@epoch). `end`: this process's end."""

    def believe(
        self, node: str, proofs: Sequence[wire.NodeProof], peer: str, peer_key: bytes, end: End, host: str = ""
    ) -> ProvenNode:
        """Checks a peer's proofs of its node. `end`: the peer's end. `host`: where this process reached it.

        Raises ConfigError with the reason for refusal, in one line.
        """

    def problem(self, node: str, keys: Sequence[bytes]) -> str:
        """Returns why a node that has proved these keys may not be connected now; "" if it may."""

    def trusts_key(self, public: bytes) -> bool:
        """Returns whether a trusted node has this key, and it is neither revoked nor expired."""


class NoNodes:
    """Proves no node, and requires no proof."""

    has_files = False
    private_key = b""

    def read_again(self) -> bool:
        return False

    def proofs_to(self, peer: str, peer_key: bytes, end: End) -> tuple[str, tuple[wire.NodeProof, ...]]:
        return "", ()

    def believe(
        self, node: str, proofs: Sequence[wire.NodeProof], peer: str, peer_key: bytes, end: End, host: str = ""
    ) -> ProvenNode:
        return ProvenNode()

    def problem(self, node: str, keys: Sequence[bytes]) -> str:
        return ""

    def trusts_key(self, public: bytes) -> bool:
        return False


def node_trust(credentials: Credentials, own: str = "", private: bytes = b"", public: bytes = b"") -> NodeTrust:
    """Reads the files of node keys that the credentials name.

    `own`: this process's name@epoch; `private` and `public`: its CURVE key pair. Raises ConfigError for a file that
    cannot be used, and MissingExtra.
    """
    if not (credentials.node_key_file or credentials.trusted_nodes):
        return NoNodes()
    flag = called("node_key_file" if credentials.node_key_file else "trusted_nodes")
    found: NodeTrust = extra_table.load(extra_table.NODE_TRUST, flag)(credentials, own, private, public)
    return found


def plain(text: str) -> str:
    """Returns a peer's name for itself or its node, made safe for one line of a log."""
    return text if text.isprintable() and len(text) <= MOST_SHOWN else repr(text[:MOST_SHOWN])
