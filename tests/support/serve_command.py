"""The command `pd-cluster serve` without main(), made once per process for tests that parse many command lines."""

from __future__ import annotations

import functools
from typing import Any

import typer.core
import typer.main

from pd_cluster.commands import cli


@functools.cache
def serve_command() -> typer.core.TyperCommand:
    """Returns the command. Parsing does not change it; each parse makes a context with the values."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands["serve"]
    assert isinstance(command, typer.core.TyperCommand)
    return command


def settings_in(context: Any) -> dict[str, Any]:
    """Returns the parsed values of settings; --help-all is not a setting."""
    return {name: value for name, value in context.params.items() if name != "help_all"}
