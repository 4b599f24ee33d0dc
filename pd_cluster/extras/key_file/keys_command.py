"""`pd-cluster keys new`, `list` and `remove`, for the file of --api-key-file. Imports nothing heavy, like cli.py."""

from __future__ import annotations

import os
import secrets
import sys
import time
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from pd_cluster.commands.file_lock import file_lock
from pd_cluster.errors import ConfigError

FILE = typer.Option("--file", help="The file that --api-key-file of the scheduler names.")
AGAIN = "SIGHUP makes the scheduler read the file again"


def new(
    file: Annotated[Path, FILE],
    tenant: Annotated[str, typer.Option(help="The key's owner. Keys of one tenant share cached prompts.")],
    key_id: Annotated[str, typer.Option("--id", help="The key's name; default: a random name.")] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="A served name that the key may use; repeatable. Default: all.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Maximum requests; default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Maximum prompt and output tokens; default: no limit.")
    ] = None,
    expires: Annotated[str, typer.Option(help="A date (UTC), or a time with its zone. Default: never.")] = "",
) -> None:
    """Make a key, print it once, and keep its hash in the file, which is created if missing."""
    from pd_cluster.extras.key_file.key_file import (
        KEY_NBYTES,
        KEY_PREFIX,
        KeyFile,
        checked,
        digest_of,
        read_key_file,
        write_key_file,
    )
    from pd_cluster.extras.key_file.shared_rate_limits import MAX_KEYS
    from pd_cluster.process_messages import ApiKey
    from pd_cluster.settings.expiry_dates import time_of

    key = KEY_PREFIX + secrets.token_urlsafe(KEY_NBYTES)
    name = checked("id", key_id or f"key-{secrets.token_hex(4)}", "--id ")
    given = {
        "tenant": ("--tenant", tenant),
        "models": ("--model", model or None),
        "requests_per_minute": ("--requests-per-minute", requests_per_minute),
        "tokens_per_minute": ("--tokens-per-minute", tokens_per_minute),
        "expires": ("--expires", expires or None),
    }
    values = {field: checked(field, value, f"{flag} ") for field, (flag, value) in given.items() if value is not None}
    expires_s = time_of(expires) if expires else None
    if expires_s is not None and expires_s <= time.time():
        raise ConfigError(f"--expires {expires!r}: is in the past; give a future time")
    with file_lock(file) as real:
        known = read_key_file(file) if os.path.lexists(real) else KeyFile.empty()
        if any(each.id == name for each in known.keys):
            raise ConfigError(f"--id {name!r}: {file} already has this id; give another, or remove that key first")
        if len(known.keys) >= MAX_KEYS:
            raise ConfigError(f"{file}: has {len(known.keys)} keys, the most that it may have; remove some")
        made = ApiKey(
            id=name,
            digest=digest_of(known.salt, key.encode()),
            tenant=values["tenant"],
            models=values.get("models"),
            requests_per_minute=values.get("requests_per_minute", 0),
            tokens_per_minute=values.get("tokens_per_minute", 0),
            expires_s=expires_s,
        )
        write_key_file(real, KeyFile(known.salt, (*known.keys, made)))
    typer.echo(f"{file}: {name} of tenant {tenant}; the key below is shown only once. {AGAIN}", err=True)
    typer.echo(key)


def list_keys(
    file: Annotated[Path, FILE], json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the keys of a file, without their hashes."""
    from msgspec.structs import asdict
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from pd_cluster.extras.key_file.key_file import read_key_file
    from pd_cluster.settings.expiry_dates import text_of

    if json:
        keys = [asdict(key) for key in read_key_file(file).keys]
        typer.echo(dumps([{name: key[name] for name in key if name != "digest"} for key in keys], indent=2))
        return
    table = Table("id", "tenant", "models", "requests/min", "tokens/min", "expires", box=box.SIMPLE)
    for key in read_key_file(file).keys:
        expires = "never" if key.expires_s is None else text_of(key.expires_s)
        is_over = key.expires_s is not None and key.expires_s <= time.time()
        table.add_row(
            key.id,
            key.tenant,
            "all" if key.models is None else ", ".join(key.models),
            *(f"{limit:,}" if limit else "no limit" for limit in (key.requests_per_minute, key.tokens_per_minute)),
            f"{expires} (over)" if is_over else expires,
        )
    is_terminal = sys.stdout.isatty()
    Console(width=None if is_terminal else 240).print(table)


def remove(
    file: Annotated[Path, FILE], key_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")]
) -> None:
    """Take a key out of the file."""
    from pd_cluster.extras.key_file.key_file import KeyFile, read_key_file, write_key_file

    with file_lock(file) as real:
        known = read_key_file(file)
        left = tuple(key for key in known.keys if key.id != key_id)
        if len(left) == len(known.keys):
            there = ", ".join(key.id for key in known.keys[:20]) or "none"
            raise ConfigError(f"{file}: has no key {key_id!r}; keys in it: {there}")
        write_key_file(real, KeyFile(known.salt, left))
    typer.echo(f"{file}: {key_id} is removed. {AGAIN}", err=True)
