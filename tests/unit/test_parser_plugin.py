"""An operator's file adds tool call formats; its faults are reported in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.parsers.parser_plugin import formats_of
from pd_cluster.parsers.reply_format import ReplyFormat, Tool
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


def documented() -> str:
    text = DOCUMENT.read_text("utf-8")
    (found,) = re.findall(r"```python\n(from pd_cluster\.parsers.*?)```", text, re.DOTALL)
    assert isinstance(found, str)
    return found


def test_the_documents_example(tmp_path: Path) -> None:
    file = tmp_path / "my_formats.py"
    file.write_text(documented())
    form = ReplyFormat("mine", "", formats_of(str(file)))
    reader = form.reader("auto", "")
    parts = [*reader.feed('So <call>{"name": "f", "arguments": {}}</call>'), *reader.finish()]
    assert parts == [Content("So "), CallBegin(0, "f"), CallArguments(0, "{}")]
    guide = form.guide([Tool("f", {})], "required", "")
    assert guide is not None
    assert "<call>" in guide.text
    assert form.markers == {"<call>", "</call>"}
    with pytest.raises(ConfigError, match="did you mean mine"):
        ReplyFormat("min", "", formats_of(str(file)))
    with pytest.raises(ConfigError, match="mine: not known"):
        ReplyFormat("mine")


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    for text, problem in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("FORMATS = {}", "must define FORMATS"),
        ("x = 1", "must define FORMATS"),
        ("FORMATS = {'hermes': 1}", "FORMATS has 'hermes'; a name must be a text that no built-in parser has"),
        ("FORMATS = {'mine': 1}", r"FORMATS\['mine'\] lacks read, calls, perhaps"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"--tool-parser-plugin .*bad\.py: .*{problem}"):
            formats_of(str(file))
    with pytest.raises(ConfigError, match="there is no such file"):
        formats_of(str(tmp_path / "none.py"))
    assert formats_of("") == {}
