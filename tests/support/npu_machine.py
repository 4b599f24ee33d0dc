"""Replacements of an Atlas machine's programs that replay a recorded session (tests/data/npu)."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from ranktable_tools import npu

CAT = shutil.which("cat")
DATA = Path(__file__).parents[1] / "data" / "npu"


def recorded(machine: str) -> str:
    return (DATA / f"{machine}.txt").read_text("utf-8")


def answer(machine: str, command: str) -> str:
    """Returns the command's recorded output."""
    parts = ("\n" + recorded(machine)).split(f"\n$ {command}\n")
    assert len(parts) == 2, f"{machine} has {len(parts) - 1} answers to {command}"
    return parts[1].partition("\n$ ")[0] + "\n"


def whole() -> str:
    """Returns a session of an A2 machine on which each of eight cards reports what card 4 of `a2_network` does."""
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
    """Writes the programs to a folder for PATH and returns it. Shell scripts, because they start faster than Python."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name in programs:
        cases = []
        for at, part in enumerate(f"\n{session}".split(f"\n$ {name} ")[1:]):
            command, _, rest = part.partition("\n")
            text, _, code = rest.partition("\n$ ")[0].partition("[exit ")
            answer_file = bin_folder / f"{name}.{at}"
            answer_file.write_text(text if text.endswith("\n") else f"{text}\n", "utf-8")
            status = int(code.strip().rstrip("]") or 0)
            cases.append(f"{shlex.quote(command)}) {CAT} {answer_file}; exit {status};;")
        file = bin_folder / name
        file.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *cases, "esac", "exit 1", ""]), "utf-8")
        file.chmod(0o755)
    return bin_folder


def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, session: str, programs: tuple[str, ...] = ("npu-smi", "hccn_tool")
) -> None:
    """Makes this machine look like a session's: its programs come first on PATH, /etc/hccn.conf is in `folder`."""
    monkeypatch.setenv("PATH", str(install(folder, session, programs)))
    monkeypatch.setattr(npu, "HCCN_CONF", folder / "hccn.conf")
    for name in ("_HCCN_TOOL", "_NPU_SMI"):
        monkeypatch.setattr(npu, name, str(folder / "no" / name))
