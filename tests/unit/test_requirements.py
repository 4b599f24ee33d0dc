"""Keeps docs/requirements.md true: its form, its ids, the tests that it names, its summary, and README's line of it.

Reads tests as source and never imports them, so it knows that a test exists, what it is marked with and what its file
imports, not that it passes. `python tests/unit/test_requirements.py --fix` rewrites the summary and README's line;
everything else is mended by hand.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "requirements.md"
README = ROOT / "README.md"

# id prefix -> (title of the section, rows on the first day: the documents are fixed, so rows are only added)
DOCUMENTS = {
    "PD": ("Split deployment on Ascend (vLLM 0.6.0)", 176),
    "LE": ("LMDeploy pipeline (early)", 111),
    "LP": ("LMDeploy pipeline", 63),
    "TL": ("TACO-LLM offline API", 68),
    "FD": ("FastDeploy offline API", 73),
}
TABLE_HEAD = ["| id | what the document asks | proof |", "|---|---|---|"]
SUMMARY_START = "<!-- summary: written by tests/unit/test_requirements.py --fix -->"
SUMMARY_END = "<!-- end of summary -->"
LINE_START = "<!-- requirements: written by tests/unit/test_requirements.py --fix -->"
LINE_END = "<!-- end of requirements -->"
STATES = ("proven", "refused", "not yet", "not applicable")

ROW = re.compile(r"\| `(?P<prefix>[A-Z]{2})-(?P<number>\d{3})` \| (?P<ask>\S.*) \| (?P<proof>\S.*) \|")
PROOF_TESTS = re.compile(r"`[^`]+`(?:, `[^`]+`)*(?P<slow> \(slow\))?")
PROOF_REFUSED = re.compile(r"refused: [^`\s][^`]*, `[^`]+`(?:, `[^`]+`)*")
PROOF_NOT_APPLICABLE = re.compile(r"not applicable \((?:operator|vendor)\): \S.*")
# Modules with a stand-in for the engine: tests of what they make show what reaches an engine, not what it does.
STAND_INS = (
    *("tests.support.playback", "tests.support.playback_offline", "tests.support.offline", "tests.support.toy_model"),
    "tests.support.lmdeploy_engine",
    *("tests.support.router_world", "tests.support.elastic_world", "tests.support.handoff_world"),
)
UNESCAPED_PIPE = re.compile(r"(?<!\\)\|")


class Row(NamedTuple):
    title: str
    prefix: str
    number: int
    proof: str

    def state(self) -> str:
        """Returns one of STATES, or malformed."""
        if self.proof == "not yet":
            return "not yet"
        if PROOF_NOT_APPLICABLE.fullmatch(self.proof):
            return "not applicable"
        if PROOF_REFUSED.fullmatch(self.proof):
            return "refused"
        return "proven" if PROOF_TESTS.fullmatch(self.proof) else "malformed"

    def node_ids(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.proof) if self.state() in ("proven", "refused") else []

    def says_slow(self) -> bool:
        return self.proof.endswith(" (slow)")

    def __str__(self) -> str:
        return f"{self.prefix}-{self.number:03d}"


def sections(page: str) -> dict[str, list[str]]:
    """Title of each document's section -> its lines. Raises ValueError when the sections aren't DOCUMENTS."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in page.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ").strip()
            if title in found:
                raise ValueError(f"section {title!r} is there twice")
            lines = found[title] = []
        else:
            lines.append(line)
    wanted = [title for title, _ in DOCUMENTS.values()]
    found.pop("Summary", None)
    if list(found) != wanted:
        raise ValueError(f"sections are {list(found)}, not {wanted}")
    return found


def rows(page: str) -> Iterator[Row]:
    """Yields every row of the right form; `form_complaints` handles the others."""
    for title, lines in sections(page).items():
        for line in lines:
            if match := ROW.fullmatch(line):
                yield Row(title, match["prefix"], int(match["number"]), match["proof"])


def form_complaints(page: str) -> list[str]:
    """Lines that mean to be a table and aren't one, and proofs of none of the four forms."""
    complaints = []
    for lines in sections(page).values():
        for position, line in enumerate(lines):
            if line in TABLE_HEAD:
                at = TABLE_HEAD.index(line)
                if lines[position - at : position - at + 2] != TABLE_HEAD:
                    complaints.append(f"half a table head: {line}")
            elif line.lstrip().startswith("|"):
                num_cells = len(UNESCAPED_PIPE.findall(line)) - 1
                if num_cells != 3 or not ROW.fullmatch(line):
                    complaints.append(f"not a row `| id | ask | proof |`: {line}")
                elif not lines[position - 1].startswith("|"):
                    complaints.append(f"a row outside of a table: {line}")
            elif "|" in line:
                complaints.append(f"a row that doesn't begin with a bar: {line}")
    complaints += [f"{row}: no known form of proof: {row.proof}" for row in rows(page) if row.state() == "malformed"]
    return complaints


def id_complaints(page: str) -> list[str]:
    """Ids count 1, 2, 3… within their document, under its prefix, and none has gone."""
    complaints = []
    for prefix, (title, num_rows_at_least) in DOCUMENTS.items():
        mine = [row for row in rows(page) if row.title == title]
        for number, row in enumerate(mine, start=1):
            if (row.prefix, row.number) != (prefix, number):
                complaints.append(f"{title}: found {row} where {prefix}-{number:03d} belongs")
                break
        if len(mine) < num_rows_at_least:
            complaints.append(f"{title}: {len(mine)} rows, at least {num_rows_at_least} wanted: rows aren't removed")
    return complaints


@cache
def collected(path: Path) -> dict[str, bool]:
    """Returns a file's tests as pytest would collect them (`test_a`, `TestB::test_c`) -> whether each is slow.

    A test that is always skipped proves nothing and isn't in it. Marks of single parameters aren't seen.
    """
    return dict(collect(ast.parse(path.read_text(encoding="utf-8")).body))


def collect(body: list[ast.stmt], is_slow: bool = False) -> Iterator[tuple[str, bool]]:
    classes: dict[str, list[tuple[str, bool]]] = {}
    is_slow = is_slow or any(is_slow_module(node) for node in body)
    for node in flatten(body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name.startswith("test") and not has_mark(node.decorator_list, "skip"):
                    yield name, is_slow or has_mark(node.decorator_list, "slow")
            case ast.ClassDef(name=name) if not has_mark(node.decorator_list, "skip"):
                inherited = [n for base in node.bases if isinstance(base, ast.Name) for n in classes.get(base.id, [])]
                slow = is_slow or has_mark(node.decorator_list, "slow")
                classes[name] = [*collect(node.body, slow), *((each, slow or its) for each, its in inherited)]
                if name.startswith("Test"):
                    yield from ((f"{name}::{member}", its) for member, its in classes[name])
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                yield f"{name}::runTest", is_slow  # hypothesis: TestPool = PoolMachine.TestCase


def flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for inner in ("body", "orelse", "finalbody"):
                yield from flatten(getattr(node, inner, []))


def is_slow_module(node: ast.stmt) -> bool:
    """Returns whether this is `pytestmark = …` with the mark in it."""
    match node:
        case ast.Assign(targets=[ast.Name(id="pytestmark")], value=ast.List(elts=marks) | ast.Tuple(elts=marks)):
            return has_mark(marks, "slow")
        case ast.Assign(targets=[ast.Name(id="pytestmark")], value=mark):
            return has_mark([mark], "slow")
    return False


def has_mark(marks: list[ast.expr], name: str) -> bool:
    plain = [mark.func if isinstance(mark, ast.Call) else mark for mark in marks]
    return any(isinstance(mark, ast.Attribute) and mark.attr == name for mark in plain)


@cache
def has_stand_in(path: Path) -> bool:
    """Returns whether the file's tests may have a stand-in for the engine."""
    return any(
        isinstance(node, ast.ImportFrom) and node.module in STAND_INS
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


def proof_complaints(page: str, root: Path = ROOT) -> list[str]:
    """Named tests that aren't there."""
    return [f"{row}: {why}" for row in rows(page) for node_id in row.node_ids() if (why := why_no_test(node_id, root))]


def why_no_test(node_id: str, root: Path) -> str:
    file_name, name = split(node_id)
    if not re.fullmatch(r"tests/(?:\w+/)*test_\w+\.py", file_name) or not name:
        return f"{node_id!r} isn't tests/…/test_….py::name"
    if not (root / file_name).is_file():
        return f"no file {file_name}"
    if name not in collected(root / file_name):
        return f"no test {name!r} in {file_name}"
    return ""


def split(node_id: str) -> tuple[str, str]:
    """Returns the file, and the test without its parameters."""
    file_name, _, name = node_id.partition("::")
    return file_name, name.partition("[")[0]


def strength_complaints(page: str, root: Path = ROOT) -> list[str]:
    """Returns complaints about proven rows that no quick test or no real engine shows."""
    complaints = []
    for row in rows(page):
        tests = [split(node_id) for node_id in row.node_ids() if not why_no_test(node_id, root)]
        if row.state() != "proven" or not tests:
            continue
        if row.says_slow() != all(collected(root / file_name)[name] for file_name, name in tests):
            what = (
                "has a quick test: take (slow) away" if row.says_slow() else "has slow tests only: say so, with (slow)"
            )
            complaints.append(f"{row}: {what}")
        if all(has_stand_in(root / file_name) for file_name, _ in tests):
            complaints.append(f"{row}: only tests with a stand-in for the engine; name one with a real engine")
    return complaints


def counts(page: str, title: str = "all") -> list[int]:
    """Counts the rows of a section, all and then those in each of STATES."""
    states = [row.state() for row in rows(page) if title in (row.title, "all")]
    return [len(states), *(states.count(state) for state in STATES)]


def summary(page: str) -> str:
    """The summary table that the rows call for."""
    head = f"| document | rows | {' | '.join(STATES)} |\n|---|{'---:|' * (1 + len(STATES))}"
    sums = [f"| {title} | {' | '.join(map(str, counts(page, title)))} |" for title in [*sections(page), "all"]]
    return "\n".join([head, *sums])


def summary_complaints(page: str) -> list[str]:
    if with_summary(page) == page:
        return []
    return [
        f"the summary is out of date: run `python tests/unit/test_requirements.py --fix`, or paste\n\n{summary(page)}\n"
    ]


def with_summary(page: str) -> str:
    """The page with the summary that its rows call for. Raises ValueError when its place isn't there once."""
    return between(page, SUMMARY_START, SUMMARY_END, f"\n\n{summary(page)}\n\n")


def with_line(readme: str, page: str) -> str:
    """Returns README with the page's sums in it. Raises ValueError when their place isn't there once."""
    num_rows, *sums = counts(page)
    told = ", ".join(f"{count} {state}" for count, state in zip(sums, STATES, strict=True))
    return between(readme, LINE_START, LINE_END, f"\n{num_rows} rows: {told}.\n")


def between(text: str, start: str, end: str, what: str) -> str:
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"wanted {start!r} and {end!r} once each")
    before, _, rest = text.partition(start)
    return f"{before}{start}{what}{end}{rest.partition(end)[2]}"


CHECKS = [form_complaints, id_complaints, proof_complaints, strength_complaints, summary_complaints]


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("check", CHECKS)
def test_page_is_true(page: str, check: Callable[[str], list[str]]) -> None:
    complaints = check(page)
    assert not complaints, "docs/requirements.md\n" + "\n".join(complaints)


def test_readme_has_the_pages_sums(page: str) -> None:
    readme = README.read_text(encoding="utf-8")
    assert readme == with_line(readme, page), "run `python tests/unit/test_requirements.py --fix`"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--fix"]):
        print("usage: python tests/unit/test_requirements.py [--fix]", file=sys.stderr)
        return 2
    text = PAGE.read_text(encoding="utf-8")
    if arguments:
        text = with_summary(text)
        PAGE.write_text(text, encoding="utf-8")
        README.write_text(with_line(README.read_text(encoding="utf-8"), text), encoding="utf-8")
    complaints = [complaint for check in CHECKS for complaint in check(text)]
    print("\n".join(complaints) or summary(text))
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
