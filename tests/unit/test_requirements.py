"""Checks docs/requirements.md: its form, ids, named tests and summary, and README's line about it.

Reads tests as source without importing them, so it checks that they exist, their marks and their imports, but not that
they pass. `python tests/unit/test_requirements.py --fix` rewrites the summary and README's line; other faults must be
fixed by hand.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "requirements.md"
README = ROOT / "README.md"

# id prefix -> (section title, initial number of rows; rows are only added, as the documents are fixed)
DOCUMENTS = {
    "PD": ("Split deployment on Ascend (vLLM 0.6.0)", 176),
    "LE": ("LMDeploy pipeline (early)", 111),
    "LP": ("LMDeploy pipeline", 63),
    "TL": ("TACO-LLM offline API", 68),
    "FD": ("FastDeploy offline API", 73),
}
TABLE_HEAD = ["id | asks | proof", "---|---|---"]
SUMMARY_START = "<!-- summary: written by tests/unit/test_requirements.py --fix -->"
SUMMARY_END = "<!-- end of summary -->"
LINE_START = "<!-- requirements: written by tests/unit/test_requirements.py --fix -->"
LINE_END = "<!-- end of requirements -->"
STATES = ("proven", "refused", "not yet", "not applicable")

ROW = re.compile(r"`(?P<prefix>[A-Z]{2})-(?P<number>\d{3})` \| (?P<ask>\S.*) \| (?P<proof>\S.*)")
TESTS = r"`[^`]+`(?:, `[^`]+`)*"
PROOFS = [  # of STATES
    *(re.compile(rf"{TESTS}(?: \(slow\))?"), re.compile(rf"refused: [^`\s][^`]*, {TESTS}")),
    *(re.compile("not yet"), re.compile(r"not applicable \((?:operator|vendor)\): \S.*")),
]
# Modules with a fake engine: tests that use them show what reaches an engine, not what it does.
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
        """Returns one of STATES, or "" if the proof has none of their forms."""
        return next((state for state, form in zip(STATES, PROOFS, strict=True) if form.fullmatch(self.proof)), "")

    def node_ids(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.proof) if self.state() in ("proven", "refused") else []

    def __str__(self) -> str:
        return f"{self.prefix}-{self.number:03d}"


def sections(page: str) -> dict[str, list[str]]:
    """Returns section title -> lines. Raises ValueError if the sections differ from DOCUMENTS."""
    _, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    found = [(part.partition("\n")[0].strip(), part.splitlines()[1:]) for part in parts]
    wanted = [title for title, _ in DOCUMENTS.values()]
    if (titles := [title for title, _ in found if title != "Summary"]) != wanted:
        raise ValueError(f"sections are {titles}, not {wanted}")
    return {title: lines for title, lines in found if title != "Summary"}


def rows(page: str) -> Iterator[Row]:
    """Yields every well-formed row; `form_complaints` reports the others."""
    for title, lines in sections(page).items():
        for line in lines:
            if match := ROW.fullmatch(line):
                yield Row(title, match["prefix"], int(match["number"]), match["proof"])


def form_complaints(page: str) -> list[str]:
    """Returns malformed table lines, and proofs in none of the four forms."""
    lines = [line for lines in sections(page).values() for line in lines if "|" in line and line not in TABLE_HEAD]
    complaints = [f"not a row `id | ask | proof`: {line}" for line in lines if not is_row(line)]
    return complaints + [f"{row}: no known form of proof: {row.proof}" for row in rows(page) if not row.state()]


def is_row(line: str) -> bool:
    return ROW.fullmatch(line) is not None and len(UNESCAPED_PIPE.findall(line)) == 2


def id_complaints(page: str) -> list[str]:
    """Reports ids that do not count 1, 2, 3… under their document's prefix, and removed rows."""
    complaints = []
    for prefix, (title, num_rows_at_least) in DOCUMENTS.items():
        mine = [str(row) for row in rows(page) if row.title == title]
        expected = [f"{prefix}-{number:03d}" for number in range(1, max(len(mine), num_rows_at_least) + 1)]
        wrong = next((f"found {a}, expected {b}" for a, b in zip_longest(mine, expected) if a != b), None)
        complaints += [f"{title}: {wrong}; rows aren't removed"] if wrong else []
    return complaints


@cache
def collected(path: Path) -> dict[str, bool]:
    """Returns test function -> whether it is slow, for a file.

    Omits tests that are always skipped. Ignores marks of single parameters.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
    of_module = [mark for value in values for mark in (value.elts if isinstance(value, ast.List) else [value])]
    marks = {
        node.name: [*of_module, *node.decorator_list]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }
    return {name: has_mark(each, "slow") for name, each in marks.items() if not has_mark(each, "skip")}


def has_mark(marks: list[ast.expr], name: str) -> bool:
    plain = [mark.func if isinstance(mark, ast.Call) else mark for mark in marks]
    return any(isinstance(mark, ast.Attribute) and mark.attr == name for mark in plain)


@cache
def has_stand_in(path: Path) -> bool:
    """Returns whether the file's tests may use a fake engine."""
    return any(
        isinstance(node, ast.ImportFrom) and node.module in STAND_INS
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


def proof_complaints(page: str) -> list[str]:
    """Returns complaints about named tests that do not exist."""
    named = [(row, node_id) for row in rows(page) for node_id in row.node_ids()]
    return [f"{row}: no test {node_id}" for row, node_id in named if find(node_id) is None]


def find(node_id: str) -> tuple[Path, bool] | None:
    """Returns the test's file and whether the test is slow; None if there is no such test."""
    found = re.fullmatch(r"(tests/(?:\w+/)*test_\w+\.py)::(\w+)(?:\[.*\])?", node_id)
    if found is None or not (ROOT / found[1]).is_file() or found[2] not in collected(ROOT / found[1]):
        return None
    return ROOT / found[1], collected(ROOT / found[1])[found[2]]


def strength_complaints(page: str) -> list[str]:
    """Returns complaints about proven rows without a quick test, or without one that uses a real engine."""
    complaints = []
    for row in rows(page):
        tests = [test for node_id in row.node_ids() if (test := find(node_id)) is not None]
        if row.state() != "proven" or not tests:
            continue
        if row.proof.endswith(" (slow)") != all(is_slow for _, is_slow in tests):
            complaints.append(f"{row}: a row has (slow) at its end where it has slow tests only")
        if all(has_stand_in(file) for file, _ in tests):
            complaints.append(f"{row}: only tests with a stand-in for the engine; name one with a real engine")
    return complaints


def counts(page: str, title: str = "all") -> list[int]:
    """Counts a section's rows: all, then by each of STATES."""
    states = [row.state() for row in rows(page) if title in (row.title, "all")]
    return [len(states), *(states.count(state) for state in STATES)]


def summary(page: str) -> str:
    """Returns the summary table computed from the rows."""
    head = f"| document | rows | {' | '.join(STATES)} |\n|---|{'---:|' * (1 + len(STATES))}"
    sums = [f"| {title} | {' | '.join(map(str, counts(page, title)))} |" for title in [*sections(page), "all"]]
    return "\n".join([head, *sums])


def summary_complaints(page: str) -> list[str]:
    return (
        []
        if with_summary(page) == page
        else [f"the summary is out of date: run with --fix, or paste\n\n{summary(page)}"]
    )


def with_summary(page: str) -> str:
    """Returns the page with its computed summary. Raises ValueError unless the summary's place occurs once."""
    return between(page, SUMMARY_START, SUMMARY_END, f"\n\n{summary(page)}\n\n")


def with_line(readme: str, page: str) -> str:
    """Returns README with the page's sums. Raises ValueError unless their place occurs once."""
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
