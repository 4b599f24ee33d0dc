"""Every torch-npu version that the dependencies allow declares the operators of model/npu with the same schemas.

Only one version fits the installed torch and can be imported (test_npu.py). The other wheels are unpacked, and
their libraries' bytes are searched for the schemas that they register.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import npu_wheel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "pd_cluster" / "model" / "kernels" / "npu").glob("*.py"))
RUN_IN_TESTS = "2.13.0"
OTHERS = ("2.11.0.post3", "2.12.0.post3", "2.14.0")


def used() -> set[str]:
    """Returns the names of the operators that model/npu calls."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES)
    return set(re.findall(r"\btorch\.ops\.npu\.(npu_\w+)", text))


def declared(version: str) -> dict[str, set[str]]:
    """Maps the name of each used operator to its schemas (overloads) in that wheel's library."""
    library = npu_wheel.unpacked(version) / "torch_npu" / "lib" / "libtorch_npu.so"
    found: dict[str, set[str]] = {name: set() for name in used()}
    pattern = re.compile(rb"(?<=\0)(npu_[a-z0-9_]+)(?:\.\w+)?\([^\0]*\) *-> ?[^\0]+(?=\0)")
    for match in pattern.finditer(library.read_bytes()):
        if (name := match[1].decode()) in found:
            found[name].add(match[0].decode())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_another_wheel_declares_the_same_operators(version: str) -> None:
    ours, other = declared(RUN_IN_TESTS), declared(version)
    assert len(ours) == 13
    assert all(ours.values()), [name for name, schemas in ours.items() if not schemas]
    assert other == ours
