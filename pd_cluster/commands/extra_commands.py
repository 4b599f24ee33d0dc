"""Adds the commands of extras to a command line."""

from __future__ import annotations

import typer

from pd_cluster import extra_table
from pd_cluster.errors import MissingExtra


def add_extra(app: typer.Typer, name: str, panel: str | None = None) -> None:
    """Adds the command or group that `extra_table.COMMANDS` names.

    Its last word is its name in `app`. If the extra is not installed, the command is hidden, and its error names the
    extra.
    """
    last = name.rpartition(" ")[2]
    try:
        found = extra_table.command(name)
    except MissingExtra as error:
        line = error

        def missing(context: typer.Context) -> None:
            raise line

        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(last, hidden=True, context_settings=anything)(missing)
        return
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=last, rich_help_panel=panel)
    else:
        app.command(last, rich_help_panel=panel)(found)
