"""The signatures of commands that show a running cluster or chat with its model. Imports nothing heavy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.commands.instances_command import ADMIN, TOKEN_FILE

if TYPE_CHECKING:
    from pd_cluster.client.admin_client import Admin

JSON = typer.Option("--json", help="Print JSON.")


def status(
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    json: Annotated[bool, JSON] = False,
) -> None:
    """Show problems, current figures, and the instances. Exit code 1 if requests suffer."""
    from pd_cluster.commands.status_command import run

    raise typer.Exit(run(_admin(admin, admin_token_file), json))


def top(
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    period: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between samples.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Samples to show; default: until Ctrl-C.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print each sample as a line of JSON.")] = False,
) -> None:
    """Show the cluster live: problems, rates, latencies, events. Without a terminal, a line per sample."""
    from pd_cluster.commands.top_command import run

    try:
        run(_admin(admin, admin_token_file), period, json, count)
    except KeyboardInterrupt:
        return


def logs(
    instance: Annotated[str, typer.Argument(help="A process, such as decode-0 or scheduler; default: all.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=5000, help="Last lines of each log.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until Ctrl-C.")] = False,
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    json: Annotated[bool, typer.Option("--json", help="Print each line as an object.")] = False,
) -> None:
    """Show the logs of processes of `pd-cluster up`. Includes dead processes; keys are hidden."""
    from pd_cluster.commands.logs_command import run

    try:
        run(_admin(admin, admin_token_file), instance, lines, follow, json)
    except KeyboardInterrupt:
        return


def chat(
    question: Annotated[
        str, typer.Argument(help="A single question; default: a conversation, or each line of stdin.")
    ] = "",
    url: Annotated[str, typer.Option(help="The public address; default: that of `up` here, or port 9000.")] = "",
    model: Annotated[str, typer.Option(help="A served model or adapter; default: the first.")] = "",
    image: Annotated[list[str] | None, typer.Option(help="An image file for the first question.")] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Default: the model's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens per answer; default: as many as fit.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the answers repeatable.")] = None,
) -> None:
    """Chat with the served model. Answers are streamed, with timings. OPENAI_API_KEY gives the key."""
    from pd_cluster.client.admin_client import public_url
    from pd_cluster.commands.chat_command import run

    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}
    try:
        run(url or public_url(os.environ), model, question, image or [], system, options)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def collect_env(json: Annotated[bool, JSON] = False) -> None:
    """Print facts for a problem report, without keys: versions, machine, devices and variables."""
    from pd_cluster.commands.collect_env import run

    run(os.environ, json)


def _admin(url: str, token_file: str) -> Admin:
    from pd_cluster.client.admin_client import Admin

    return Admin.find(url, token_file, os.environ)


LOOKING = (status, top, logs, chat, collect_env)
