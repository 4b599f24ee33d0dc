"""Every command line of pd-cluster and pd-ranktable in the documents parses, so its flags and values exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.__main__ import app as benchmarks_app
from pd_cluster.commands.cli import main, whole_command
from pd_cluster.settings.vllm_flags import judge, normalize
from ranktable_tools import cli as ranktable_cli
from tests.support.page_commands import PAGES, ROOT, commands_of
from tests.support.serve_command import serve_command

COMMAND = whole_command()
NAMES = "|".join(COMMAND.commands)
SPAN = re.compile(rf"`((?:pd-cluster|pd-ranktable|{NAMES}) [^`\n]+)`")
COMMAND_LINE = re.compile(r"^ *(pd-cluster|pd-ranktable|sh|curl|python|docker|kubectl|helm) ", re.MULTILINE)
OPEN = re.compile(r"…|\||\[|\.\.\.|\{| / |\bN\b")  # marks of spans that are patterns, not commands


def lines(page: Path) -> Iterator[tuple[str, bool]]:
    """Yields each command line of a page, and whether it is complete: an inline span may omit arguments."""
    text = page.read_text("utf-8")
    for command in commands_of(text):
        yield command, True
    for span in SPAN.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)):
        if not OPEN.search(span):
            yield span if span.startswith("pd-") else f"pd-cluster {span}", False


def parse(words: list[str], is_whole: bool) -> None:
    """Parses a command line; raises its error."""
    command: Any = COMMAND
    path = []
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words[0])
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        raise LookupError(f"no such command: {words[0]}")
    if path == ["serve"]:
        context = serve_command().make_context("serve", normalize(["serve", *words])[1:])
        judge(context.args, [name for each in serve_command().params for name in each.opts])
        return
    flags = words[words.index("--") + 1 :] if path == ["up"] and "--" in words else []
    missing = [] if is_whole else [each for each in command.params if each.required]
    if not missing and not (hasattr(command, "commands") and not words):
        command.make_context(" ".join(path), words)
    if flags:
        parse(["serve", *flags], is_whole)


def parse_ranktable(words: list[str], is_whole: bool) -> None:
    """Parses a command line; raises its error, or AssertionError instead of exiting."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            assert ranktable_cli.main(words) == 0
    except SystemExit:
        left_out = not is_whole and re.search("are required|expected .*argument", said.getvalue())
        assert left_out, said.getvalue()


def words_of(line: str) -> list[str]:
    """Returns a command line's words, without leading variables and a trailing redirection."""
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    return words[: next((at for at, word in enumerate(words) if word in ("|", ">", "&", "&&", "<")), len(words))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranktable_cli, "_run", lambda parser, args: 0)  # parses without running
    for line, is_whole in lines(page):
        words = words_of(line)
        program = Path(words[0]).name if words else ""
        try:
            if program == "pd-cluster":
                parse(words[1:], is_whole)
            elif program == "pd-ranktable":
                parse_ranktable(words[1:], is_whole)
        except (Exception, SystemExit) as error:
            if is_whole or "requires an argument" not in str(error):  # an inline span may name a flag without its value
                raise AssertionError(f"{line}: {error}") from error


def test_command_lines_of_benchmarks_parse() -> None:
    command: Any = typer.main.get_command(benchmarks_app)
    for page in PAGES:
        text = " ".join(page.read_text("utf-8").split())
        for line in re.findall(r"`python -m benchmarks ([^`…]+)`", text):
            name, *words = shlex.split(line)
            try:
                command.commands[name].make_context(name, words)
            except Exception as error:
                raise AssertionError(f"{page}: python -m benchmarks {line}: {error}") from error


def test_up_says_where_flags_of_instances_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*argv: str) -> str:
        monkeypatch.setattr("sys.argv", ["pd-cluster", "up", *argv])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 1
        return capsys.readouterr().err

    for flag in ("--quantization=int8", "--kv_cache_dtype", "--nnodes=2"):
        name = flag.partition("=")[0].replace("_", "-")
        expected = f"{name} is a flag of `pd-cluster serve`; give it after --, as in `pd-cluster up -- {flag}`\n"
        assert said("--model", "m", flag, "int8") == f"pd-cluster: {expected}"
    for flag in ("--api-key", "--metrics-key", "--hf-token"):
        assert "sk-1" not in (shown := said(f"{flag}=sk-1"))
        assert shown.endswith(f"`pd-cluster up -- {flag}`\n")
    for short in (["-tp", "9999"], ["-tp=9999"]):
        shown = said(*short, "--", "--nnodes", "2")
        assert shown.startswith("pd-cluster: --nnodes 2: not supported"), "-tp must be accepted before it"


def test_no_command_is_where_no_test_would_read_it() -> None:
    """No command is in a block without a language, or in an indented one, which no test reads."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
            assert language or not COMMAND_LINE.search(block), (page, block)
        plain = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        blocks = re.findall(r"(?<=\n\n)((?: {4}.*\n)+)", plain)
        assert not [(page, block) for block in blocks if COMMAND_LINE.search(block)]
