"""Documents are consistent: links lead somewhere, pictures match their texts, the map has every package."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.unit.test_layering import LAYERS, PACKAGE

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.puml"))
CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"^\[[^\]]+\]: (\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r'<a id="([^"]+)">')


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Anchors of a page: those that it names, and its headings', as GitHub makes them, numbered where they repeat."""
    found = set(NAMED.findall(text))
    for heading in HEADING.findall(CODE_BLOCK.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        plain = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        of_copies = (plain, *(f"{plain}-{number}" for number in range(1, len(found) + 1)))
        found.add(next(anchor for anchor in of_copies if anchor not in found))
    return found


def dead_links(page: Path) -> list[str]:
    """The page's relative links that lead to no file, or to no heading of the page that they name."""
    text = page.read_text("utf-8")
    plain = CODE_SPAN.sub("``", CODE_BLOCK.sub("", text))
    dead = []
    for link in (*LINK.findall(plain), *REFERENCE.findall(plain)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            dead.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text("utf-8")):
            dead.append(f"{link}: no such heading")
    return dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page)


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    good = "[a](#one), [b](#one-1), [c](page.md#two-words-by-codepy), [d](https://example.org/#x), `[e](gone.md)`"
    page.write_text(f"# One\n# One\n## Two words, by `code.py`\n{good}\n```\n[f](gone.md)\n```\n", "utf-8")
    assert not dead_links(page)
    page.write_text("# One\n[a](#two) [b](gone.md) [c](page.md#one-1)\n[d]: gone.png\n", "utf-8")
    assert [link.split(":")[0] for link in dead_links(page)] == ["#two", "gone.md", "page.md#one-1", "gone.png"]


@pytest.mark.parametrize("text", PICTURES, ids=name_of)
def test_a_picture_matches_its_text(text: Path) -> None:
    stamp = f"{text.name}, sha256 {hashlib.sha256(text.read_bytes()).hexdigest()} "
    assert stamp in text.with_suffix(".svg").read_text("utf-8"), f"{text.name} has changed: run scripts/draw.sh"


def test_every_picture_has_a_text() -> None:
    assert PICTURES
    assert {file.stem for file in (ROOT / "docs" / "pictures").glob("*.svg")} == {text.stem for text in PICTURES}


def test_the_table_of_layers_matches_the_code() -> None:
    """Row by row: the first cell of a row under "Layers" names one layer of LAYERS, in order."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ") and "`" in line.split("|")[1]]
    assert [tuple(sorted(re.findall(r"`(\w+)`", row))) for row in rows] == [tuple(sorted(layer)) for layer in LAYERS]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TOP], ids=name_of)
def test_a_page_names_modules_that_exist(page: Path) -> None:
    """A path in backticks such as `engine/step/core` or `kv/layout.lanes` is a module or package of pd_cluster."""
    top = {path.stem for path in PACKAGE.iterdir() if path.is_dir()}
    found = re.findall(r"`(?:pd_cluster/)?(\w+(?:/\w+)+)(?:\.\w+)?/?`", page.read_text("utf-8"))
    paths = [PACKAGE / name for name in found if name.split("/")[0] in top]
    assert [path for path in paths if not path.is_dir() and not path.with_suffix(".py").exists()] == []
