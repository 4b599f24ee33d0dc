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


def whole() -> str:
    """Returns a session of an A2 machine whose eight cards all answer as card 4 of `a2_network` does."""
    told = [recorded("a2"), "$ npu-smi info\n" + answer("a2", "npu-smi info -m")]
    addresses = [f"192.0.2.{20 + card}" for card in range(8)]
    for card, address in enumerate(addresses):
        for query in ("-link -g", "-net_health -g", "-tls -g"):
            text = answer("a2_network", f"hccn_tool -i 4 {query}").replace("dev_id:4", f"dev_id:{card}")
            told.append(f"$ hccn_tool -i {card} {query}\n{text}")
        for other in addresses:
            if other != address:
                text = answer("a2_network", "hccn_tool -i 4 -ping -g address 192.0.2.25")
                text = text.replace("device 4", f"device {card}").replace("192.0.2.25", other)
                told.append(f"$ hccn_tool -i {card} -ping -g address {other}\n{text}")
    return "\n".join(each.rstrip("\n") for each in told) + "\n"


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
