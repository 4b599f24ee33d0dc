"""The command `pd-cluster serve` without its main(): made once per process, for tests that parse many command lines."""

from __future__ import annotations

import functools

import typer.core
import typer.main

from pd_cluster.commands import cli


@functools.cache
def serve_command() -> typer.core.TyperCommand:
    """Returns the command. Parsing does not change it: the values are in the context that it makes."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands["serve"]
    assert isinstance(command, typer.core.TyperCommand)
    return command
