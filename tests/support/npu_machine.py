"""Programs of an Atlas machine that replay a recorded session (tests/data/npu)."""

from __future__ import annotations

import sys
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "npu"
PROGRAM = """#!{python} -S
import pathlib, sys
wanted = " ".join(["$", pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
answers = pathlib.Path({session!r}).read_text().split("\\n$ ")
for answer in answers:
    command, _, printed = answer.removeprefix("$ ").partition("\\n")
    if "$ " + command == wanted:
        text, _, code = printed.partition("[exit ")
        sys.stdout.write(text if text.endswith("\\n") else text + "\\n")
        sys.exit(int(code.strip().rstrip("]") or 0))
sys.exit(1)
"""


def recorded(machine: str) -> str:
    return (DATA / f"{machine}.txt").read_text("utf-8")


def answer(machine: str, command: str) -> str:
    """Returns the command's recorded output."""
    parts = ("\n" + recorded(machine)).split(f"\n$ {command}\n")
    assert len(parts) == 2, f"{machine} has {len(parts) - 1} answers to {command}"
    return parts[1].partition("\n$ ")[0] + "\n"


def install(folder: Path, session: str, programs: tuple[str, ...] = ("npu-smi", "hccn_tool")) -> Path:
    """Returns a folder for PATH with those programs."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (folder / "session.txt").write_text(session, "utf-8")
    for name in programs:
        file = bin_folder / name
        file.write_text(PROGRAM.format(python=sys.executable, session=str(folder / "session.txt")), "utf-8")
        file.chmod(0o755)
    return bin_folder
