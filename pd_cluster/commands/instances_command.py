"""`pd-cluster instances`: lists the instances, and changes them while the cluster serves.

This module has the commands' signatures; instance_commands.py executes them. Imports nothing heavy, like cli.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.errors import ConfigError

if TYPE_CHECKING:
    from pd_cluster.client.instance_commands import Command

TOKEN_FILE = typer.Option(
    "--admin-token-file",
    envvar=["PD_CLUSTER_ADMIN_TOKEN_FILE", "PD_CLUSTER_SERVE_ADMIN_TOKEN_FILE"],
    help="File of the admin token; default: that of `up`, or admin.token next to the global rank table.",
)


def _refuse_secret_file(value: str) -> str:
    if value:
        raise ConfigError(
            "--secret-file: the admin token is in a separate file; give --admin-token-file FILE (admin.token next to "
            "the scheduler's global rank table), or GLOBAL_RANK_TABLE_FILE_PATH"
        )
    return value


NO_SECRET_FILE = typer.Option("--secret-file", hidden=True, callback=_refuse_secret_file)
ADMIN = typer.Option("--admin", help="The scheduler's admin address; default: that of `up` here, or port 9001.")
FORCE = typer.Option("--force", help="Allow this for the last instance of its role that takes requests.")
TIMEOUT = typer.Option(
    min=0.0, help="Seconds for its requests to end; then they continue elsewhere. Default: the scheduler's."
)
NO_WAIT = typer.Option("--no-wait", help="Return before the change is complete.")

app = typer.Typer(help="Show and change the instances of a running cluster.", invoke_without_command=True)


@app.callback()
def instances(
    context: typer.Context,
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, NO_SECRET_FILE] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Show the instances of a running cluster; the commands below change them while it serves."""
    from pd_cluster.client.admin_client import Admin
    from pd_cluster.client.instance_list import show_instances

    context.obj = (admin, admin_token_file)
    if context.invoked_subcommand is None:
        show_instances(Admin.find(admin, admin_token_file, os.environ), json)


@app.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Its name in the global rank table, such as prefill-1.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its HTTP port.")],
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, NO_SECRET_FILE] = "",
    no_wait: Annotated[bool, NO_WAIT] = False,
) -> None:
    """Let an instance of the global rank table join; the scheduler reads the table again."""
    from pd_cluster.client.instance_commands import JOIN_TIMEOUT_S, is_here

    asked = _command(context, name, admin, admin_token_file)
    asked.send("", {"name": name, "port": port})
    asked.finish(no_wait, is_here, "is here", JOIN_TIMEOUT_S)


@app.command()
def remove(
    context: typer.Context,
    name: str,
    force: Annotated[bool, FORCE] = False,
    timeout: Annotated[float | None, TIMEOUT] = None,
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, NO_SECRET_FILE] = "",
    no_wait: Annotated[bool, NO_WAIT] = False,
) -> None:
    """Drain an instance and remove it; `add` brings it back. Its process keeps running."""
    from pd_cluster.client.instance_commands import is_gone

    asked = _command(context, name, admin, admin_token_file)
    asked.send("remove", {"force": force, "timeout_s": timeout})
    asked.finish(no_wait, is_gone, "has left; you can end its process now")


@app.command()
def drain(
    context: typer.Context,
    name: str,
    undo: Annotated[bool, typer.Option("--undo", help="Put it back in service.")] = False,
    force: Annotated[bool, FORCE] = False,
    timeout: Annotated[float | None, TIMEOUT] = None,
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, NO_SECRET_FILE] = "",
    no_wait: Annotated[bool, NO_WAIT] = False,
) -> None:
    """Take an instance out of service: it gets no new requests, and finishes those that run there."""
    from pd_cluster.client.instance_commands import is_drained

    asked = _command(context, name, admin, admin_token_file)
    if undo:
        if force or timeout is not None:
            raise ConfigError("--undo: not with --force or --timeout; leave these out")
        entry = asked.send("undrain", {})
        asked.say("is in service" + (f" as soon as it is {entry['next_role']}" if entry["next_role"] else ""))
        return
    asked.send("drain", {"force": force, "timeout_s": timeout})
    asked.finish(no_wait, is_drained, "is drained; `drain --undo` puts it back in service")


@app.command()
def role(
    context: typer.Context,
    name: str,
    role: Annotated[str, typer.Argument(metavar="prefill|decode")],
    force: Annotated[bool, FORCE] = False,
    timeout: Annotated[float | None, TIMEOUT] = None,
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, NO_SECRET_FILE] = "",
    no_wait: Annotated[bool, NO_WAIT] = False,
) -> None:
    """Drain an instance and give it the other role; it keeps its process, its name and its caches."""
    from pd_cluster.client.instance_commands import has_role

    asked = _command(context, name, admin, admin_token_file)
    asked.send("role", {"role": role, "force": force, "timeout_s": timeout})
    asked.finish(no_wait, has_role(role), f"is {role}")


def _command(context: typer.Context, name: str, url: str, token_file: str) -> Command:
    """Options after the command take precedence over those before it."""
    from pd_cluster.client.admin_client import Admin
    from pd_cluster.client.instance_commands import Command

    outer_url, outer_file = context.obj
    return Command(Admin.find(url or outer_url, token_file or outer_file, os.environ), name)
