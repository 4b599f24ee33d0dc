"""A kind of device is one table row; only devices/ compares kinds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pd_cluster.devices.device import KINDS, Device
from pd_cluster.devices.device_kinds import BY_KIND

PACKAGE = Path(__file__).parents[2] / "pd_cluster"


def test_every_kind_has_its_row() -> None:
    assert KINDS == ("cpu", "cuda", "npu")
    assert [Device(kind).dist_backend for kind in KINDS] == ["gloo", "nccl", "hccl"]
    assert [BY_KIND[kind].block_size for kind in KINDS] == [16, 16, 128]


@pytest.mark.parametrize("package", ["kv", "transport", "model", "engine"])
def test_nobody_asks_which_kind_a_device_is(package: str) -> None:
    """Code outside devices/ reads the row's fields instead of comparing the kind's name."""
    for file in (PACKAGE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            texts = {each.value for each in sides if isinstance(each, ast.Constant)}
            of_kind = any(isinstance(each, ast.Attribute) and each.attr == "kind" for each in sides)
            assert not (of_kind and texts & {*KINDS}), f"{file}:{node.lineno}"
