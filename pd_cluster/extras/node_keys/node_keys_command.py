"""`pd-cluster keys node`: makes, rotates and revokes the key pairs of nodes. Imports nothing heavy, like cli.py."""

from __future__ import annotations

import os
import sys
import time
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.commands.file_lock import file_lock
from pd_cluster.errors import ConfigError

if TYPE_CHECKING:
    from pd_cluster.extras.node_keys.node_key_files import Node, NodeKeys, PublicPart, TrustedNodes

NODE = typer.Argument(metavar="NODE", help="The node's name: its host name, or any other unique name.")
FOLDER = typer.Option("--folder", help="Folder of NODE.key and NODE.pub; created with mode 0700.")
FILE = typer.Option("--file", help="The list that --trusted-nodes of schedulers and workers names.")
HOST = typer.Option("--host", help="An address or network that the node may use; repeatable. Default: any.")
EXPIRES = typer.Option("--expires", help="A date (UTC), or a time with its zone. Default: never.")
AGAIN = "processes that read it notice within a second"

app = typer.Typer(help="Make, rotate and revoke the key pair of each node (host).", no_args_is_help=True)


@app.command()
def new(
    node: Annotated[str, NODE],
    folder: Annotated[Path, FOLDER],
    host: Annotated[list[str] | None, HOST] = None,
    expires: Annotated[str, EXPIRES] = "",
) -> None:
    """Make a node's key pair: NODE.key for that host alone, NODE.pub for the list of trusted nodes."""
    from pd_cluster.extras.node_keys.node_key_files import Node, check_host, check_name, new_keys

    hosts = [check_host(each, "--") for each in host or []]
    key_file, public_file = _files(folder, check_name(node))
    _make(folder)
    with file_lock(key_file):
        for file in (key_file, public_file):
            if os.path.lexists(file):
                raise ConfigError(f"{file}: already exists; `pd-cluster keys node rotate {node}` makes another key")
        keys = new_keys(node)
        _write_pair(key_file, public_file, keys, Node(node, [_part(keys.public[0], expires)], hosts))
    typer.echo(f"{key_file}: for the host of {node} alone, --node-key-file names it", err=True)
    typer.echo(f"{public_file}: `pd-cluster keys node trust {public_file} --file FILE` adds it to a list", err=True)


@app.command()
def trust(
    public: Annotated[list[Path], typer.Argument(metavar="NODE.pub...", help="Public keys, as `new` writes them.")],
    file: Annotated[Path, FILE],
    host: Annotated[list[str] | None, HOST] = None,
) -> None:
    """Add nodes, or new keys of known nodes, to the list of trusted nodes; earlier keys stay valid."""
    from msgspec.structs import replace

    from pd_cluster.extras.node_keys.node_key_files import (
        TrustedNodes,
        check_host,
        read_public_part,
        trusting,
        write_public,
    )

    hosts = [check_host(each, "--") for each in host or []]
    with file_lock(file) as real:
        known = _read(real) if os.path.lexists(real) else TrustedNodes()
        for each in public:
            part = read_public_part(each)
            known = trusting(known, replace(part, hosts=hosts) if hosts else part, file)
        write_public(real, known)
    for name in dict.fromkeys(read_public_part(each).node for each in public):
        found = known.find(name)
        assert found is not None
        where, ids = ", ".join(found.hosts) or "any address", ", ".join(key.id for key in found.keys)
        typer.echo(f"{file}: {name} is trusted at {where}, keys {ids}; {AGAIN}", err=True)


@app.command()
def rotate(
    node: Annotated[str, NODE],
    folder: Annotated[Path, FOLDER],
    expires: Annotated[str, EXPIRES] = "",
) -> None:
    """Add a new key to the current key; both are used until `retire`. Completes an interrupted rotation."""
    from pd_cluster.extras.node_keys.node_key_files import Node, check_name, new_keys, read_node_keys, read_public_part
    from pd_cluster.wire import MOST_NODE_KEYS

    key_file, public_file = _files(folder, check_name(node))
    with file_lock(key_file):
        before, part = read_node_keys(key_file), read_public_part(public_file)
        is_begun = _is_begun(before, part)
        if len(before.private) >= MOST_NODE_KEYS and not is_begun:
            raise ConfigError(
                f"{key_file}: node {node} is being rotated: it has two keys; first complete that with "
                f"`pd-cluster keys node retire {node} --folder {folder}`"
            )
        keys = before if is_begun else new_keys(node, before)
        public = Node(node, [_part(keys.public[0], expires), *part.keys[:1]], part.hosts)
        _write_pair(key_file, public_file, keys, public)
    typer.echo(
        f"{key_file}: {node} also has key {keys.public[0].hex()[:12]}; {AGAIN}. Now run `pd-cluster keys node trust "
        f"{public_file} --file FILE` for each copy of the list, then `pd-cluster keys node retire {node}`",
        err=True,
    )


@app.command()
def retire(
    node: Annotated[str, NODE],
    folder: Annotated[Path | None, FOLDER] = None,
    file: Annotated[Path | None, FILE] = None,
) -> None:
    """Remove the older key from NODE.key (--folder) and from the list (--file). Connections stay open."""
    from msgspec.structs import replace

    from pd_cluster.extras.node_keys.node_key_files import (
        NodeKeys,
        TrustedNodes,
        check_name,
        read_node_keys,
        read_public_part,
        write_public,
    )

    if folder is None and file is None:
        raise ConfigError(f"--folder, --file: give the folder of {node}.key, the list of trusted nodes, or both")
    check_name(node)
    if folder is not None:
        key_file, public_file = _files(folder, node)
        with file_lock(key_file):
            part, keys = read_public_part(public_file), read_node_keys(key_file)
            if _is_begun(keys, part):
                raise ConfigError(
                    f"{public_file}: lacks the newest key of {key_file}: a rotation was interrupted; complete it with "
                    f"`pd-cluster keys node rotate {node} --folder {folder}`"
                )
            _write_pair(key_file, public_file, NodeKeys(node, keys.private[:1]), replace(part, keys=part.keys[:1]))
        typer.echo(f"{key_file}: {node} now has only its newest key; {AGAIN}", err=True)
    if file is not None:
        with file_lock(file) as real:
            known = _read(real)
            if known.find(node) is None:
                raise ConfigError(f"{file}: has no node {node!r}")
            nodes = [replace(each, keys=each.keys[:1]) if each.node == node else each for each in known.nodes]
            write_public(real, TrustedNodes(1, nodes, known.revoked))
        typer.echo(f"{file}: {node} is now trusted only with its newest key; {AGAIN}", err=True)


@app.command()
def revoke(
    node: Annotated[str, NODE],
    file: Annotated[Path, FILE],
    key: Annotated[str, typer.Option("--key", help="The first digits of one key of the node. Default: all keys.")] = "",
) -> None:
    """Remove a node, or one of its keys, from the list. Processes that read the list close its connections."""
    from pd_cluster.extras.node_keys.node_key_files import check_name, now_text, revoking, write_public

    check_name(node)
    with file_lock(file) as real:
        write_public(real, revoking(_read(real), node, key, file, now_text()))
    typer.echo(f"{file}: {node} is revoked; processes that read this file close its connections within 2 s", err=True)


@app.command("list")
def list_nodes(
    file: Annotated[Path, FILE], json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the trusted nodes, and the keys that were revoked."""
    from msgspec import to_builtins
    from rich import box
    from rich.console import Console
    from rich.table import Table

    known = _read(file)
    if json:
        typer.echo(dumps(to_builtins(known), indent=2))
        return
    table = Table("node", "key", "hosts", "until", box=box.SIMPLE)
    for node in known.nodes:
        for part in node.keys:
            until = f"{part.until} (over)" if part.is_over(time.time()) else part.until or "no end"
            table.add_row(node.node, part.id, ", ".join(node.hosts) or "any", until)
    for each in known.revoked:
        table.add_row(each.node, each.public[:12], "", f"revoked at {each.at}")
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def _read(file: Path) -> TrustedNodes:
    from pd_cluster.extras.node_keys.node_key_files import read_trusted_nodes

    return read_trusted_nodes(file)


def _files(folder: Path, node: str) -> tuple[Path, Path]:
    return folder / f"{node}.key", folder / f"{node}.pub"


def _is_begun(keys: NodeKeys, part: Node) -> bool:
    """Whether a rotation was interrupted between its two files: the public file then lacks the newest key."""
    return keys.public[0] not in [each.key for each in part.keys]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: {error.strerror}") from None
    if (mode := folder.stat().st_mode & 0o777) & 0o077:
        raise ConfigError(f"--folder {folder}: mode {mode:04o} lets other users read it: chmod 700 {folder}")


def _part(public: bytes, expires: str) -> PublicPart:
    from pd_cluster.extras.node_keys.node_key_files import PublicPart
    from pd_cluster.settings.expiry_dates import EXPECTED, time_of

    until_s = time_of(expires) if expires else None
    if expires and until_s is None:
        raise ConfigError(f"--expires {expires!r}: expected {EXPECTED}")
    if until_s is not None and until_s <= time.time():
        raise ConfigError(f"--expires {expires!r}: is in the past; give a future time")
    return PublicPart(public.hex(), expires)


def _write_pair(key_file: Path, public_file: Path, keys: NodeKeys, public: Node) -> None:
    """Writes the private file first, so that it never has fewer keys than the public file."""
    from pd_cluster.extras.node_keys.node_key_files import write_node_keys, write_public

    write_node_keys(key_file, keys)
    write_public(public_file, public)
