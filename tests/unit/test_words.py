"""Sentences of docstrings, comments and pages begin with a subject or a verb."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A statement that begins with one of these words has no clear subject; a question may.
WORDS = r"(?:Whoever|Who|What|Of)\b"
OPENING = re.compile(rf"(?:^|(?<=[.!?:]\s)|(?<=\n\n))\s*{WORDS}[^.!?]*(?P<end>[.!?]|$)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@functools.cache
def packages() -> dict[str, list[Path]]:
    """Maps each package to its own modules."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for folder in ("pd_cluster", "ranktable_tools", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            found[name_of(file.parent)].append(file)
    return found


def pages() -> dict[str, Path]:
    files = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md"]
    return {name_of(file): file for file in files}


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""


def comments(source: str) -> Iterator[str]:
    """Yields each comment; successive comment-only lines are one comment."""
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            if not is_alone or token.start[0] != last + 1:
                yield "\n".join(lines)
                lines = []
            lines.append(token.string.lstrip("# "))
            last = token.start[0] if is_alone else 0
    yield "\n".join(lines)


def prose(page: str) -> str:
    """Returns a page's text without code, tables, headings and list markers."""
    page = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^\|.*$|^#.*$", "", page, flags=re.MULTILINE)
    return re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "\n\n", page, flags=re.MULTILINE)


def faults_in(text: str) -> list[str]:
    return [" ".join(found[0].split()) for found in OPENING.finditer(text) if found["end"] != "?"]


@pytest.mark.parametrize("package", packages())
def test_docstrings_and_comments(package: str) -> None:
    for file in packages()[package]:
        source = file.read_text("utf-8")
        texts = [*docstrings(source)] if re.search(WORDS, source) else []
        texts += comments(source) if re.search(f"#.*{WORDS}", source) else []
        assert not [fault for text in texts for fault in faults_in(text)], file


@pytest.mark.parametrize("page", pages())
def test_pages(page: str) -> None:
    assert not faults_in(prose(pages()[page].read_text("utf-8")))
