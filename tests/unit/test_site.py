"""The documentation site: its menu has every page, and it builds in strict mode."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def pages(menu: Any) -> list[str]:
    if isinstance(menu, str):
        return [menu]
    parts = menu.values() if isinstance(menu, dict) else menu
    return [page for part in parts for page in pages(part)]


def test_the_menu_has_every_page_once() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    found = sorted(page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(pages(menu)) == found


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "scripts/docs.sh", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "tour.html").read_text("utf-8")
    assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://(?!127)', page), "a page has external resources"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_released_works_in_an_empty_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "scripts/release.sh", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("answer '7', status 0") == 2
