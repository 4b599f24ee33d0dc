"""Keeps docs/requirements.md true: its form, its ids, the tests that it names, its summary.

Reads tests as source and never imports them, so it knows that a test exists, not that it passes.
`python tests/unit/test_requirements.py --fix` rewrites the summary; everything else is mended by hand.
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

ROW = re.compile(r"\| `(?P<prefix>[A-Z]{2})-(?P<number>\d{3})` \| (?P<ask>\S.*) \| (?P<proof>\S.*) \|")
PROOF_TESTS = re.compile(r"`[^`]+`(?:, `[^`]+`)*")
PROOF_NOT_APPLICABLE = re.compile(r"not applicable: \S.*")
UNESCAPED_PIPE = re.compile(r"(?<!\\)\|")


class Row(NamedTuple):
    title: str
    prefix: str
    number: int
    proof: str

    def state(self) -> str:
        """proven | not yet | not applicable | malformed"""
        if self.proof == "not yet":
            return "not yet"
        if PROOF_NOT_APPLICABLE.fullmatch(self.proof):
            return "not applicable"
        return "proven" if PROOF_TESTS.fullmatch(self.proof) else "malformed"

    def node_ids(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.proof) if self.state() == "proven" else []

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
    """Every row that has the right form. What hasn't is `form_complaints`' business."""
    for title, lines in sections(page).items():
        for line in lines:
            if match := ROW.fullmatch(line):
                yield Row(title, match["prefix"], int(match["number"]), match["proof"])


def form_complaints(page: str) -> list[str]:
    """Lines that mean to be a table and aren't one, and proofs of none of the three forms."""
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
def names_of_tests(path: Path) -> frozenset[str]:
    """`test_a`, `TestB::test_c` of a file as pytest would collect them, without parameters.

    A test that is always skipped proves nothing and isn't in it.
    """
    return frozenset(collect(ast.parse(path.read_text(encoding="utf-8")).body))


def collect(body: list[ast.stmt]) -> Iterator[str]:
    classes: dict[str, list[str]] = {}
    for node in flatten(body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name.startswith("test") and not always_skipped(node):
                    yield name
            case ast.ClassDef(name=name) if not always_skipped(node):
                inherited = [n for base in node.bases if isinstance(base, ast.Name) for n in classes.get(base.id, [])]
                classes[name] = [*collect(node.body), *inherited]
                if name.startswith("Test"):
                    yield from (f"{name}::{member}" for member in classes[name])
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                yield f"{name}::runTest"  # hypothesis: TestPool = PoolMachine.TestCase


def flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for inner in ("body", "orelse", "finalbody"):
                yield from flatten(getattr(node, inner, []))


def always_skipped(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    marks = [mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list]
    return any(isinstance(mark, ast.Attribute) and mark.attr == "skip" for mark in marks)


def proof_complaints(page: str, root: Path = ROOT) -> list[str]:
    """Named tests that aren't there."""
    return [f"{row}: {why}" for row in rows(page) for node_id in row.node_ids() if (why := why_no_test(node_id, root))]


def why_no_test(node_id: str, root: Path) -> str:
    file_name, _, name = node_id.partition("::")
    if not re.fullmatch(r"tests/(?:\w+/)*test_\w+\.py", file_name) or not name:
        return f"{node_id!r} isn't tests/…/test_….py::name"
    if not (root / file_name).is_file():
        return f"no file {file_name}"
    name = name.partition("[")[0]
    if name not in names_of_tests(root / file_name):
        return f"no test {name!r} in {file_name}"
    return ""


def summary(page: str) -> str:
    """The summary table that the rows call for."""
    all_rows = list(rows(page))
    lines = ["| document | rows | proven | not yet | not applicable |", "|---|---:|---:|---:|---:|"]
    for title in [*sections(page), "all"]:
        states = [row.state() for row in all_rows if title in (row.title, "all")]
        counts = [len(states), *(states.count(state) for state in ("proven", "not yet", "not applicable"))]
        lines.append(f"| {title} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def summary_complaints(page: str) -> list[str]:
    if with_summary(page) == page:
        return []
    return [
        f"the summary is out of date: run `python tests/unit/test_requirements.py --fix`, or paste\n\n{summary(page)}\n"
    ]


def with_summary(page: str) -> str:
    """The page with the summary that its rows call for. Raises ValueError when its place isn't there once."""
    if page.count(SUMMARY_START) != 1 or page.count(SUMMARY_END) != 1:
        raise ValueError(f"wanted {SUMMARY_START!r} and {SUMMARY_END!r} once each")
    before, _, rest = page.partition(SUMMARY_START)
    _, _, after = rest.partition(SUMMARY_END)
    return f"{before}{SUMMARY_START}\n\n{summary(page)}\n\n{SUMMARY_END}{after}"


CHECKS = [form_complaints, id_complaints, proof_complaints, summary_complaints]


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("check", CHECKS)
def test_page_is_true(page: str, check: Callable[[str], list[str]]) -> None:
    complaints = check(page)
    assert not complaints, "docs/requirements.md\n" + "\n".join(complaints)


OWN_TEST = "`tests/unit/test_requirements.py::test_page_is_true`"


@pytest.mark.parametrize(
    ("check", "old", "new", "complaint"),
    [
        (form_complaints, "| proof |\n|---|---|---|\n", "| proof |\n", "half a table head"),
        (form_complaints, "| `PD-003` |", "| PD-003 |", "not a row"),
        (form_complaints, "| `PD-003` |", "`PD-003` |", "doesn't begin with a bar"),
        (form_complaints, "| `PD-003` |", "\n| `PD-003` |", "outside of a table"),
        (form_complaints, "| `PD-003` |", "| `PD-003` | one cell too many |", "not a row"),
        (form_complaints, "not yet |\n| `PD-004`", "not yet (soon) |\n| `PD-004`", "PD-003: no known form"),
        (form_complaints, "not yet |\n| `PD-004`", "not applicable |\n| `PD-004`", "PD-003: no known form"),
        (
            form_complaints,
            "not yet |\n| `PD-004`",
            "tests/a.py::test_a |\n| `PD-004`",
            "PD-003: no known form",
        ),
        (form_complaints, "not yet |\n| `PD-004`", "`a`, not yet |\n| `PD-004`", "PD-003: no known form"),
        (id_complaints, "| `PD-003` |", "| `PD-004` |", "found PD-004 where PD-003 belongs"),
        (id_complaints, "| `PD-003` |", "| `FD-003` |", "found FD-003 where PD-003 belongs"),
        (proof_complaints, "not yet |\n| `PD-004`", "`tests/test_none.py::test_a` |\n| `PD-004`", "no file"),
        (proof_complaints, "not yet |\n| `PD-004`", "`tests/unit` |\n| `PD-004`", "isn't tests/"),
        (
            proof_complaints,
            "not yet |\n| `PD-004`",
            f"{OWN_TEST[:-1]}x` |\n| `PD-004`",
            "no test 'test_page_is_truex'",
        ),
        (summary_complaints, "not yet |\n| `PD-004`", "not applicable: a |\n| `PD-004`", "out of date"),
        (summary_complaints, "not yet |\n| `PD-004`", f"{OWN_TEST} |\n| `PD-004`", "out of date"),
    ],
)
def test_a_fault_is_found(check: Callable[[str], list[str]], old: str, new: str, complaint: str) -> None:
    assert check(model_page()) == []
    broken = model_page().replace(old, new, 1)
    assert broken != model_page()
    assert any(complaint in found for found in check(broken)), check(broken)


def model_page() -> str:
    """A faultless page, so that the tests of the checks don't depend on how far the real one has come."""
    parts = ["# Requirements", SUMMARY_START, SUMMARY_END]
    for prefix, (title, num_rows) in DOCUMENTS.items():
        parts += [f"## {title}", "", *TABLE_HEAD]
        parts += [f"| `{prefix}-{number:03d}` | `a \\| b` | not yet |" for number in range(1, num_rows + 1)]
    return with_summary("\n".join(parts) + "\n")


def test_a_row_that_has_gone_is_missed() -> None:
    last = f"| `FD-{DOCUMENTS['FD'][1]:03d}` |"
    shorter = "".join(line for line in model_page().splitlines(keepends=True) if not line.startswith(last))
    assert id_complaints(shorter) == ["FastDeploy offline API: 72 rows, at least 73 wanted: rows aren't removed"]


@pytest.mark.parametrize("proof", [OWN_TEST, f"{OWN_TEST}, {OWN_TEST[:-1]}[form_complaints]`"])
def test_a_proof_is_counted(proof: str) -> None:
    proven = with_summary(model_page().replace("not yet |\n| `LE-002`", f"{proof} |\n| `LE-002`"))
    assert "| LMDeploy pipeline (early) | 111 | 1 | 110 | 0 |\n" in proven
    assert [complaint for check in CHECKS for complaint in check(proven)] == []


@pytest.mark.parametrize(
    ("old", "new"), [("## TACO-LLM", "## TACO"), ("## TACO-LLM", "### TACO-LLM"), (SUMMARY_END, "")]
)
def test_a_page_without_its_frame_is_refused(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=r"sections are|once each"):
        summary_complaints(model_page().replace(old, new))


def test_collects_what_pytest_would() -> None:
    source = """
import pytest
def helper(): ...
async def test_async(): ...
@pytest.mark.parametrize("x", [1])
def test_parametrised(x):
    def test_inner(): ...
if True:
    def test_conditional(): ...
@pytest.mark.skip(reason="never runs")
def test_skipped(): ...
@pytest.mark.skipif(True, reason="runs on another machine")
def test_elsewhere(): ...
class Contract:
    def test_shared(self): ...
class TestOne(Contract):
    def test_method(self): ...
    def helper(self): ...
    class TestInner:
        def test_deep(self): ...
@pytest.mark.skip
class TestSkipped:
    def test_never(self): ...
TestPool = PoolMachine.TestCase
"""
    assert sorted(collect(ast.parse(source).body)) == [
        "TestOne::TestInner::test_deep",
        "TestOne::test_method",
        "TestOne::test_shared",
        "TestPool::runTest",
        "test_async",
        "test_conditional",
        "test_elsewhere",
        "test_parametrised",
    ]


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--fix"]):
        print("usage: python tests/unit/test_requirements.py [--fix]", file=sys.stderr)
        return 2
    text = PAGE.read_text(encoding="utf-8")
    if arguments:
        text = with_summary(text)
        PAGE.write_text(text, encoding="utf-8")
    complaints = [complaint for check in CHECKS for complaint in check(text)]
    print("\n".join(complaints) or summary(text))
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
