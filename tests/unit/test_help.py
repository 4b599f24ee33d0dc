"""`--help` of every command fits a screen; `--help-all` lists the other flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from pd_cluster.commands.cli import whole_command
from pd_cluster.commands.settings_flags import first_words
from pd_cluster.settings.serve_options import USUAL, settings
from pd_cluster.settings.setting import CHOICES

NUM_LINES, NUM_COLUMNS = 50, 80
TERMINAL = {"COLUMNS": str(NUM_COLUMNS), "TERM": "dumb"}


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    command = command or whole_command()
    yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


def screen(*path: str) -> str:
    shown = CliRunner(env=TERMINAL).invoke(whole_command(), list(path))
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize("path", [*commands()], ids=lambda path: " ".join(path) or "pd-cluster")
def test_help_fits_a_screen(path: tuple[str, ...]) -> None:
    lines = screen(*path, "--help").splitlines()
    assert len(lines) <= NUM_LINES
    assert all(len(line) <= NUM_COLUMNS for line in lines)


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_help_all_has_more_and_help_names_it(command: str) -> None:
    brief, whole = screen(command, "--help"), screen(command, "--help-all")
    assert "--help-all" in brief
    for flag in ("--chat-template", "--block-size"):
        assert f" {flag} " not in brief
        assert f" {flag} " in whole


def test_no_flag_loses_its_meaning_in_its_first_words() -> None:
    for name in USUAL:
        text = settings()[name].setting.help.replace(CHOICES, "one, or another")
        assert text.startswith(first_words(text).removesuffix(" …"))
        assert len(first_words(text)) >= 12
    assert first_words("auto, cpu, cuda or npu. auto: what there is.") == "auto, cpu, cuda or npu"
    assert first_words("TLS: the certificate, in PEM.") == "TLS: the certificate, in PEM"
    assert (
        first_words("Format in which the model writes tool calls: a, b.")
        == "Format in which the model writes tool calls"
    )
