"""Reads and writes the files of node keys: a node's own private keys, and the list of the nodes that a cluster trusts.

A node is a host, under a name that an operator gives it. `NODE.key` stays on that host; the list has only public keys
and revoked keys with their nodes' names. Every error is one line that names the node, the file and the remedy, and
never shows a private key. Knows nothing of connections.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from pd_cluster import wire
from pd_cluster.errors import ConfigError
from pd_cluster.settings.expiry_dates import EXPECTED, time_of
from ranktable_tools.public_keys import KEY_NBYTES, public_key
from ranktable_tools.table_files import write_private

MAX_NBYTES = 4 << 20
MAX_NODES = 4096
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME_EXPECTED = "1 to 64 letters, digits and . _ -, beginning with a letter or digit"
NEW = "`pd-cluster keys node new NODE --folder FOLDER` makes a key"
TRUST = "`pd-cluster keys node trust NODE.pub --file FILE` adds a node to the list"
KEY_TEXT = r"[0-9a-f]{64}"
NodeName = Annotated[str, msgspec.Meta(pattern=f"^{NAME}$")]
KeyText = Annotated[str, msgspec.Meta(pattern=f"^{KEY_TEXT}$")]


class PublicPart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A public key, in hexadecimal. `until`: when it expires, as `expiry_dates.time_of` reads it; "": never."""

    public: KeyText
    until: str = ""

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.public)

    @property
    def id(self) -> str:
        """Returns the short form by which people refer to the key."""
        return self.public[:12]

    def is_over(self, now_s: float) -> bool:
        return bool(self.until) and (time_of(self.until) or 0.0) <= now_s


class Node(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A trusted node. `hosts`: addresses and networks where it may be; empty: anywhere. `keys`: the newest first."""

    node: NodeName
    keys: Annotated[list[PublicPart], msgspec.Meta(min_length=1, max_length=wire.MOST_NODE_KEYS)]
    hosts: list[str] = []

    def may_be_at(self, host: str) -> bool:
        if not self.hosts:
            return True
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return any(address in ipaddress.ip_network(each, strict=False) for each in self.hosts)


class Revoked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A revoked key of a node. `at`: when it was revoked."""

    node: NodeName
    public: KeyText
    at: str


class TrustedNodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    nodes: Annotated[list[Node], msgspec.Meta(max_length=MAX_NODES)] = []
    revoked: list[Revoked] = []

    def find(self, name: str) -> Node | None:
        return next((each for each in self.nodes if each.node == name), None)

    def standing(self, node: Node, now_s: float) -> list[PublicPart]:
        """Returns the valid keys of a listed node: neither expired nor revoked under any name."""
        revoked = {each.public for each in self.revoked}
        return [each for each in node.keys if each.public not in revoked and not each.is_over(now_s)]

    def revocation_of(self, name: str, keys: Sequence[bytes] = ()) -> Revoked | None:
        """Returns the revocation of one of `keys`, under any node's name; without `keys`, of any key of this node."""
        shown = {key.hex() for key in keys}
        found = (each for each in self.revoked if (each.public in shown if shown else each.node == name))
        return next(found, None)


T = TypeVar("T", Node, TrustedNodes)


class NodeKeys(msgspec.Struct, frozen=True, dict=True):
    """A node's own private keys, the newest first. A `dict` caches the public keys, which take a millisecond each."""

    node: str
    private: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"NodeKeys({self.node!r}, …)"

    @functools.cached_property
    def public(self) -> tuple[bytes, ...]:
        return tuple(map(public_key, self.private))


def check_name(node: str) -> str:
    """Returns the name unchanged. Raises ConfigError for an invalid one."""
    if not re.fullmatch(NAME, node):
        raise ConfigError(f"node {node[:80]!r}: expected {NAME_EXPECTED}")
    return node


# ---- a node's private keys


def new_keys(node: str, before: NodeKeys | None = None) -> NodeKeys:
    """Creates a key; the newest key of `before` is kept as the second one."""
    kept = before.private[: wire.MOST_NODE_KEYS - 1] if before is not None else ()
    return NodeKeys(node, (secrets.token_bytes(KEY_NBYTES), *kept))


def write_node_keys(file: Path, keys: NodeKeys) -> None:
    """Replaces the file atomically, mode 0600. Raises ConfigError."""
    lines = [f"# Private key of the node {keys.node}: for this host, and for nobody else.", f"node {keys.node}"]
    _write(file, "\n".join([*lines, *(f"key {each.hex()}" for each in keys.private), ""]))


def read_node_keys(file: Path) -> NodeKeys:
    """Reads a node's private keys. Raises ConfigError, also for a file that others can read."""
    text = _read(file, 0o037, NEW)
    nodes: list[str] = []
    keys: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        match line.split():
            case [] | ["#", *_]:
                continue
            case ["node", name] if re.fullmatch(NAME, name):
                nodes.append(name)
            case ["key", key] if re.fullmatch(KEY_TEXT, key):
                keys.append(bytes.fromhex(key))
            case _:
                raise ConfigError(
                    f"{file}: line {number}: expected `node NAME`, or `key` and 64 hexadecimal digits; {NEW}"
                )
    if len(nodes) != 1 or not 1 <= len(keys) <= wire.MOST_NODE_KEYS:
        raise ConfigError(f"{file}: {len(nodes)} nodes and {len(keys)} keys; expected one node and 1 or 2 keys; {NEW}")
    return NodeKeys(nodes[0], tuple(keys))


# ---- the list


def read_trusted_nodes(file: Path) -> TrustedNodes:
    """Reads the list of trusted nodes. Raises ConfigError, also for a file that others can write."""
    return _decoded(file, TrustedNodes, TRUST)


def read_public_part(file: Path) -> Node:
    """Reads a NODE.pub file. Raises ConfigError."""
    return _decoded(file, Node, NEW)


def write_public(file: Path, content: Node | TrustedNodes) -> None:
    """Replaces the file atomically, mode 0600. Raises ConfigError."""
    _write(file, json.dumps(msgspec.to_builtins(content), indent=2) + "\n")


def trusting(known: TrustedNodes, given: Node, file: Path) -> TrustedNodes:
    """Returns the list with a node's public part added: new keys come before the node's existing keys, and revoked keys
    are left out.

    Raises ConfigError if no key is left.
    """
    fresh = [each for each in given.keys if known.revocation_of(given.node, [each.key]) is None]
    if not fresh:
        revoked = known.revocation_of(given.node, [each.key for each in given.keys])
        assert revoked is not None
        raise ConfigError(
            f"{file}: key {revoked.public[:12]} of node {given.node} was revoked at {revoked.at}, and cannot be "
            f"trusted again; `pd-cluster keys node rotate {given.node} --folder FOLDER` makes another"
        )
    before = known.find(given.node)
    own = {each.public for each in fresh}
    kept = [each for each in before.keys if each.public not in own] if before is not None else []
    hosts = given.hosts or (before.hosts if before is not None else [])
    node = Node(given.node, [*fresh, *kept][: wire.MOST_NODE_KEYS], hosts)
    nodes = [node if each.node == given.node else each for each in known.nodes]
    return TrustedNodes(1, nodes if before is not None else [*nodes, node], known.revoked)


def revoking(known: TrustedNodes, name: str, key_id: str, file: Path, at: str) -> TrustedNodes:
    """Returns the list without a node, or without the node's key whose hexadecimal digits begin with `key_id`.

    Raises ConfigError.
    """
    node = known.find(name)
    if node is None:
        there = ", ".join(each.node for each in known.nodes[:20]) or "none"
        raise ConfigError(f"{file}: has no node {name!r}; it has {there}")
    gone = [each for each in node.keys if each.public.startswith(key_id)]
    if not gone:
        raise ConfigError(f"{file}: node {name} has no key {key_id!r}; it has {', '.join(e.id for e in node.keys)}")
    left = [each for each in node.keys if each not in gone]
    others = [
        each if each.node != name else Node(name, left, each.hosts) for each in known.nodes if each.node != name or left
    ]
    return TrustedNodes(1, others, [*known.revoked, *(Revoked(name, each.public, at) for each in gone)])


def _decoded(file: Path, kind: type[T], way_out: str) -> T:
    text = _read(file, 0o022, way_out)
    try:
        found = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}; {way_out}") from None
    nodes = found.nodes if isinstance(found, TrustedNodes) else [found]
    names: set[str] = set()
    for node in nodes:
        place = f"{file}: node {node.node}"
        if node.node in names:
            raise ConfigError(f"{place}: listed twice; remove one of the entries")
        names.add(node.node)
        for part in node.keys:
            if part.until and time_of(part.until) is None:
                raise ConfigError(f"{place}: until {part.until[:40]!r}: expected {EXPECTED}")
        for host in node.hosts:
            check_host(host, f"{place}: ")
    return found


def check_host(host: str, place: str) -> str:
    """Returns an address or a network unchanged. Raises ConfigError that begins with `place`."""
    try:
        ipaddress.ip_network(host, strict=False)
    except ValueError:
        raise ConfigError(f"{place}host {host[:80]!r}: expected an address or a network, such as 10.0.0.0/24") from None
    return host


# ---- files


def stamp_of(file: Path) -> tuple[int, ...] | None:
    """Returns numbers that change with the file, its owner or its mode; None if the file cannot be inspected."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid


def now_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _read(file: Path, forbidden: int, way_out: str) -> str:
    """Reads a text file. Raises ConfigError for every fault, including those of the file system."""
    try:
        with open(file, "rb", opener=_opened) as stream:
            _check_status(file, os.fstat(stream.fileno()), forbidden, way_out)
            data = stream.read(MAX_NBYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; {way_out}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: is a folder; {way_out}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"{file}: more than {MAX_NBYTES >> 20} MiB; {way_out}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8 text; {way_out}") from None


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO would block


def _check_status(file: Path, status: os.stat_result, forbidden: int, way_out: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{file}: is a pipe or a device, not a file; {way_out}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{file}: owned by user {status.st_uid}, this process is user {os.geteuid()}: chown {os.geteuid()} {file}"
        )
    if mode & forbidden:
        can = "read" if forbidden & 0o044 else "write"
        raise ConfigError(f"{file}: mode {mode:04o}, so others can {can} it; expected 0600: chmod 600 {file}")


def _write(file: Path, text: str) -> None:
    try:
        write_private(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror or error}") from None
