"""Makes command lines from the declarations of settings."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from pd_cluster.errors import ConfigError, flag_of
from pd_cluster.settings.setting import CHOICES, DeclaredSetting, Panel

Command = Callable[..., None]
EMPTY_MODEL = "--model: empty; give a model's folder, or leave it out for the small model that the project ships"
SHOWS_ALL = "pd_cluster.help_all"  # a key in a click context's `meta`
CLAUSE_END = re.compile(r"[.;:] |, which ")
LEAST_NUM_CHARS = {".": 12, ";": 20, ",": 20, ":": 24}
MOST_NUM_CHARS = 80  # maximum length of a flag's brief help, which fills two lines next to a flag of usual length
WIDER = {
    Panel.KV.value: Panel.ENGINE.value,
    Panel.REQUESTS.value: Panel.SCHEDULER.value,
    Panel.HTTP.value: Panel.SCHEDULER.value,
}


def given_model(context: Any, model: str) -> str:
    """Returns the value of --model. Raises ConfigError for an empty value, which an unset shell variable may give."""
    check_model(context.get_parameter_source("model"), model)
    return model


def check_model(source: Enum | None, model: str) -> None:
    """Checks a model. `source`: the origin of the value. Raises ConfigError, like `given_model`."""
    if not model and source is not None and source.name == "COMMANDLINE":
        raise ConfigError(EMPTY_MODEL)


def takes(
    settings: Iterable[DeclaredSetting],
    after: str,
    show_envvar: bool,
    choices: Mapping[str, str] | None = None,
    usual: Collection[str] | None = None,
) -> Callable[[Command], Command]:
    """Returns a decorator that makes a function's `**given`, for typer, an option for each setting, after the parameter
    `after`.

    `show_envvar`: whether the help shows the variables. `choices`: the choices in words, for settings whose
    declarations do not list them. `usual`: names of the settings that --help shows (HELP_ALL shows all); None: all.
    With `usual`, the command's class is `BriefHelp`.
    """

    def decorate(command: Command) -> Command:
        options = [
            _parameter(
                each, show_envvar, (choices or {}).get(each.name, ""), usual is not None and each.name not in usual
            )
            for each in settings
        ]
        return with_options(command, options, after)

    return decorate


def with_options(command: Command, options: Iterable[inspect.Parameter], after: str) -> Command:
    """Gives a function these options in place of its `**given`, after the parameter `after`."""
    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "given"]
    at = next(at for at, each in enumerate(own, 1) if each.name == after)
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own[:at], *options, *own[at:])]
    command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _show_all(context: typer.Context, value: bool) -> None:
    """Shows every option and ends."""
    if not value:
        return
    context.meta[SHOWS_ALL] = True
    for parameter in context.command.params:
        if isinstance(parameter, typer.core.TyperOption):
            parameter.hidden = False
    typer.echo(context.get_help())
    raise typer.Exit


class BriefHelp(typer.core.TyperCommand):
    """Shows the first words of each flag's text in --help, so that it fits a screen, and the whole texts in --help-all.

    Every switch also has a --no- form, as in vLLM. If a switch is given several times, the last one counts.
    """

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for each in self.params:
            if isinstance(each, typer.core.TyperOption) and each.is_flag and not each.is_eager:
                names = [] if each.secondary_opts else [f"--no-{name[2:]}" for name in each.opts]
                parser.add_option(obj=each, opts=names, dest=each.name, action="store_const", const=False)
        return parser

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if SHOWS_ALL in ctx.meta:
            return super().format_help(ctx, formatter)
        brief = copy.copy(self)
        brief.params = [_brief(each) for each in self.params if not getattr(each, "hidden", False)]
        helping = self.get_help_option(ctx)
        brief.get_help_option = lambda ctx: _brief(helping) if helping is not None else None  # type: ignore[method-assign]
        return super(BriefHelp, brief).format_help(ctx, formatter)


def shorten_help(command: Any) -> None:
    """Shortens the help of a command and its subcommands.

    Leaves out types, and variables, which the epilog explains. Lists of commands show only the first words of each
    text.
    """
    for parameter in command.params:
        if isinstance(parameter, typer.core.TyperOption):
            parameter.show_envvar = False
            parameter.metavar = parameter.metavar or ""
    for each in getattr(command, "commands", {}).values():
        each.short_help = first_words((each.help or "").partition("\n\n")[0])
        shorten_help(each)


def _brief(parameter: Any) -> Any:
    """Returns a copy of an option for the brief help, with its first name and its first words, in a wider group."""
    if not isinstance(parameter, typer.core.TyperOption):
        return parameter
    each = copy.copy(parameter)
    each.help, each.show_default, each.metavar = first_words(each.help or ""), False, ""
    each.opts = [name for at, name in enumerate(each.opts) if not at or not name.startswith("--")]
    if each.rich_help_panel:
        each.rich_help_panel = WIDER.get(each.rich_help_panel, each.rich_help_panel)
    return each


def first_words(text: str) -> str:
    """Returns the first sentence of a help text, or its first clause that can stand alone."""
    ends = [found.start() for found in CLAUSE_END.finditer(text) if found.start() >= LEAST_NUM_CHARS[found[0][0]]]
    first = (text[: ends[0]] if ends else text).rstrip(".")
    return first if len(first) <= MOST_NUM_CHARS else f"{first[:MOST_NUM_CHARS].rpartition(' ')[0]} …"


HELP_ALL = typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every flag, with its whole text.")


def _parameter(each: DeclaredSetting, show_envvar: bool, choices: str, hidden: bool) -> inspect.Parameter:
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
