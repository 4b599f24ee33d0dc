"""`pd-cluster dashboard`: its signature. Imports nothing heavy."""

from __future__ import annotations

import asyncio
import os
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.commands.instances_command import ADMIN, TOKEN_FILE
from pd_cluster.commands.view_commands import JSON

if TYPE_CHECKING:
    from pd_cluster.client.admin_client import Admin


def dashboard(
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    public: Annotated[
        bool, typer.Option("--public", help="Link to the public port's dashboard, which --public-dashboard enables.")
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the link in this machine's browser.")] = False,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Print a link to the dashboard that works once, within a minute. It begins a browser session of 12 hours."""
    from pd_cluster.client.admin_client import Admin

    link, works_s = asyncio.run(fetch_link(Admin.find(admin, admin_token_file, os.environ), public))
    if json:
        typer.echo(dumps({"link": link, "expires_after_s": works_s}))
        return
    typer.echo(link)
    typer.echo(f"works once, within {works_s:.0f} s", err=True)
    if open_it:
        typer.launch(link)


async def fetch_link(admin: Admin, public: bool = False) -> tuple[str, float]:
    """Returns a link to the dashboard, and the seconds for which it is valid. Raises PdClusterError.

    `public`: a link to the dashboard at the public port.
    """
    from pd_cluster.client.admin_client import not_an_admin, raise_unauthorized
    from pd_cluster.errors import PdClusterError

    response = await admin.ask("/dashboard/public-codes" if public else "/dashboard/codes", {})
    raise_unauthorized(response)
    try:
        made = response.json()
        if response.status_code != 200:
            raise PdClusterError(str(made["error"]["message"]))
        base = "" if public else admin.url.rstrip("/")
        return f"{base}{made['path']}", float(made["expires_after_s"])
    except (ValueError, KeyError, TypeError):
        raise not_an_admin(response) from None
