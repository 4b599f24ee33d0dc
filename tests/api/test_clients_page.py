"""The Python code of docs/clients.md runs unchanged; tests/cluster/test_guided.py runs the client with tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cluster import LiveCluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
ALL = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
BLOCKS = [block for block in ALL if "tools=tools" not in block]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split()[1] for block in BLOCKS])
def test_a_block(cluster: LiveCluster, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block.replace("http://127.0.0.1:9000", cluster.url).replace("MODEL", "tiny"), {})
    assert capsys.readouterr().out.strip()


def test_the_page_has_a_block_for_each_kind_of_client() -> None:
    assert [block.split()[1] for block in BLOCKS] == ["openai", "anthropic", "httpx"]
