"""The command lines in the documents' blocks of shell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy" / "README.md"]
BLOCK = re.compile(r"^( *)```(?:sh|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> Iterator[str]:
    """Yields each command of a page, in order; one that goes on over several lines comes whole."""
    for _, block in BLOCK.findall(page):
        command = ""
        for line in block.splitlines():
            command += line if not command or _is_open(command) else f"\n{line}"
            if command.endswith("\\"):
                command = command[:-1].rstrip() + " "
                continue
            if _is_open(command):
                command += "\n"
                continue
            if (whole := command.strip()) and not whole.startswith("#"):
                yield whole
            command = ""


def _is_open(command: str) -> bool:
    """Whether a quote has not been closed yet."""
    return re.sub(r"""'[^']*'|"[^"]*"|#.*""", "", command).count("'") % 2 == 1
