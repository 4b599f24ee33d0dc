"""Command lines that are made from the settings' declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any

import typer

from pd_cluster.errors import flag_of
from pd_cluster.settings.setting import CHOICES, Declared

Command = Callable[..., None]


def takes(
    settings: Iterable[Declared],
    after: str,
    show_envvar: bool,
    choices: Mapping[str, str] | None = None,
    usual: Collection[str] | None = None,
) -> Callable[[Command], Command]:
    """Gives a function with `**given` a signature in which typer finds an option for each setting, following `after`.

    `show_envvar`: whether the help screen shows the variables. `choices`: in words, for settings whose declarations do
    not list them. `usual`: the settings that --help shows, by name; HELP_ALL shows the others, too. None: all.
    """

    def decorate(command: Command) -> Command:
        own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "given"]
        at = next(at for at, each in enumerate(own, 1) if each.name == after)
        options = [
            _parameter(
                each, show_envvar, (choices or {}).get(each.name, ""), usual is not None and each.name not in usual
            )
            for each in settings
        ]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own[:at], *options, *own[at:])]
        command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _show_all(context: typer.Context, value: bool) -> None:
    """Shows every option and ends."""
    if not value:
        return
    for parameter in context.command.params:
        if isinstance(parameter, typer.core.TyperOption):
            parameter.hidden = False
    typer.echo(context.get_help())
    raise typer.Exit


HELP_ALL = typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every flag, also the seldom ones.")


def _parameter(each: Declared, show_envvar: bool, choices: str, hidden: bool) -> inspect.Parameter:
    setting = each.setting
    names = [each.flag, *map(flag_of, setting.also)]
    is_plain = len(names) == 1 and (each.kind is not bool or setting.has_off)
    option: Any = typer.Option(
        *([] if is_plain else names),
        help=setting.help.replace(CHOICES, choices),
        rich_help_panel=setting.panel.value,
        show_envvar=show_envvar,
        metavar=setting.metavar,
        hidden=hidden,
    )
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=Annotated[each.kind, option]
    )
