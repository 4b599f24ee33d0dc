"""Documents are consistent: links resolve, pictures match their sources, the map lists every package."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from pathlib import Path

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


OF_OTHERS = re.compile(r"npu_fusion_attention|ip_forward|(?:UCX|OTEL)_[A-Z_]+")  # other software's names


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Returns a page's anchors: explicit ones, and those that GitHub makes of headings, numbered if repeated."""
    found = set(NAMED.findall(text))
    for heading in HEADING.findall(CODE_BLOCK.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        plain = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        of_copies = (plain, *(f"{plain}-{number}" for number in range(1, len(found) + 1)))
        found.add(next(anchor for anchor in of_copies if anchor not in found))
    return found


def dead_links(page: Path) -> list[str]:
    """Returns the page's relative links to missing files or headings."""
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


def test_links_lead_somewhere() -> None:
    assert {name_of(page): dead for page in PAGES if (dead := dead_links(page))} == {}


def test_every_picture_has_a_text_and_matches_it() -> None:
    assert PICTURES
    for text in PICTURES:
        stamp = f"{text.name}, sha256 {hashlib.sha256(text.read_bytes()).hexdigest()} "
        assert stamp in text.with_suffix(".svg").read_text("utf-8"), f"{text.name} has changed: run scripts/draw.sh"
    assert {file.stem for file in (ROOT / "docs" / "pictures").glob("*.svg")} == {text.stem for text in PICTURES}


def test_the_table_of_layers_matches_the_code() -> None:
    """The first cells of the rows under "Layers" are the layers of LAYERS, in order."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ") and "`" in line.split("|")[1]]
    assert [tuple(sorted(re.findall(r"`(\w+)`", row))) for row in rows] == [tuple(sorted(layer)) for layer in LAYERS]


def test_a_page_names_modules_that_exist() -> None:
    """Paths in backticks such as `engine/step/core` or `kv/layout.lanes` are modules or packages of pd_cluster."""
    top = {path.stem for path in PACKAGE.iterdir() if path.is_dir()}
    for page in (page for page in PAGES if page not in TOP):
        found = re.findall(r"`(?:pd_cluster/)?(\w+(?:/\w+)+)(?:\.\w+)?/?`", page.read_text("utf-8"))
        paths = [PACKAGE / name for name in found if name.split("/")[0] in top]
        missing = [path for path in paths if not path.is_dir() and not path.with_suffix(".py").exists()]
        assert missing == [], page


def spans(page: Path) -> set[str]:
    """Returns the page's spans in backticks, outside code blocks."""
    return set(re.findall(r"`([^`\n]+)`", CODE_BLOCK.sub("", page.read_text("utf-8"))))


@functools.cache
def sources() -> dict[Path, str]:
    """Returns the text of all files except pages: code, scripts, deployment settings."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds, own = re.compile(r"\.(py|sh|c|h|js|css|html|ya?ml|tpl|toml)$"), Path(__file__).name
    files = [ROOT / name for name in listed.split("\0") if kinds.search(name) and not name.endswith(own)]
    return {file: file.read_text("utf-8") for file in files if file.is_file()}


@functools.cache
def words() -> set[str]:
    return {word for text in sources().values() for word in re.findall(r"[A-Za-z]\w+", text)}


@functools.cache
def members(name: str) -> set[str] | None:
    """Returns a pd_cluster class's methods and fields, inherited ones included; None if there is no such class."""
    found: set[str] = set()
    head = re.compile(rf"^class {name}\b(?:\[.*?\])?(?:\((.*?)\))?:\n((?:(?: .*)?\n)*)", re.MULTILINE)
    for file, text in sources().items():
        if f"class {name}" in text and PACKAGE in file.parents and (match := head.search(text)) is not None:
            found |= set(re.findall(r"(?:^    (?:async )?(?:def )?|self\.)(\w+)", match[2], re.MULTILINE))
            bases = re.findall(r"\b[A-Z]\w+", match[1] or "")
            found |= {each for base in bases if base != name for each in members(base) or ()}
    return found or None


def unknown_names(page: Path) -> list[str]:
    """Returns the page's paths, class members and code names that the repository lacks."""
    unknown = []
    for span in sorted(spans(page)):
        path = re.fullmatch(r"((?:tests|scripts|deploy|ranktable_tools)/[\w./-]+?)(?:::\w+)?/?", span)
        member = re.fullmatch(r"([A-Z]\w+)\.([a-z_]\w+)(?:\(.*\))?", span)
        name = re.fullmatch(r"([A-Z][a-z]+(?:[A-Z][a-z]+)+|[a-z]+(?:_[a-z0-9]+)+|[A-Z]+(?:_[A-Z]+)+)(?:\(.*\))?", span)
        if (
            (path and not ((ROOT / path[1]).exists() or (ROOT / f"{path[1]}.py").exists()))
            or (member and (known := members(member[1])) is not None and member[2] not in known)
            or (name and name[1] not in words() and not OF_OTHERS.fullmatch(name[1]))
        ):
            unknown.append(span)
    return unknown


PATCHED = {"EngineConfig.max_prefill_seqs"}  # added by a patch in docs/extending.md


def test_a_page_names_what_the_code_has() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        assert page.name == "CHANGELOG.md" or not {*unknown_names(page)} - PATCHED, page
