"""Reads the command lines in the shell blocks of documentation pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy" / "README.md"]
BLOCK = re.compile(r"^( *)```(?:sh|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> Iterator[str]:
    """Yields each command of a page in order, joined if it spans several lines."""
    for _, block in BLOCK.findall(page):
        command: list[str] = []
        for line in block.splitlines():
            command.append(line)
            if line.endswith("\\") or _is_open("\n".join(command)):
                continue
            if (whole := "\n".join(command).strip()) and not whole.startswith("#"):
                yield whole
            command = []


def _is_open(command: str) -> bool:
    """Whether the command so far has an unclosed quote."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
