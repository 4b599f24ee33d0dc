"""The places where scripts/seeded_faults.py inserts faults."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_fault_can_still_be_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    faults = importlib.import_module("seeded_faults")
    gone = []
    for place in faults.places():
        try:
            file, at = faults.locate(ROOT, place)
            ast.parse(faults.edited(file.read_text("utf-8"), at, len(place.before), place.after))
        except LookupError as error:
            gone.append(str(error))
    assert not gone, "update tests/data/seeded_faults.json:\n" + "\n".join(gone)
