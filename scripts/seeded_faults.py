"""Puts one fault at a time into the package, at places chosen with a fixed seed, and shows which the tests detect.

    python scripts/seeded_faults.py choose                 # rewrites tests/data/seeded_faults.json
    python scripts/seeded_faults.py map FOLDER [COMMIT]    # which unit and model tests run each place
    python scripts/seeded_faults.py run FOLDER RESULT      # tests each fault until the first failure
    python scripts/seeded_faults.py compare BEFORE AFTER   # exit status 1 if a fault is no longer detected

`map` clones COMMIT (default: HEAD) into FOLDER. It and `run` take tens of minutes and continue where they were stopped.
A place is a function and the text of one or two of its lines, so it is still found after lines have shifted or the
function has moved. Leaves out slow tests, and code that only runs on an accelerator.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import changed_tests
import typer

ROOT = Path(__file__).resolve().parents[1]
PLACES = ROOT / "tests" / "data" / "seeded_faults.json"
SEED, NUM_PLACES, ENOUGH_TESTS = 49, 40, 30
KINDS = ("sign", "bound", "release", "order", "condition")
LEFT_OUT = re.compile(r"lab/|bench|cuda|npu|nccl|hcc[ln]|nixl|flashinfer|symmetric|/ipc|graphs|captur")
SKIPPED = re.compile(r"^elif\b|\b(_?log|logger|logging|warnings|console|print|echo|graphs|TYPE_CHECKING)\b")
QUICK_TEST = re.compile(r"tests/(unit|model)/test_\w+\.py")
RELEASE = re.compile("release|free|close|unlink|discard|pop|popleft|remove|cancel|clear|kill|unregister")
PAIRS = ((ast.Lt, ast.Gt), (ast.LtE, ast.GtE), (ast.Eq, ast.NotEq), (ast.Add, ast.Sub))
FLIPPED: dict[Any, Any] = {**dict(PAIRS), **{other: one for one, other in PAIRS}}
ONE_OFF = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
# NUM_FILES: test files in one process of `map`
NUM_FILES, MAP_LIMIT_S, RUN_LIMIT_S, TESTS_LIMIT_S = 6, 1500.0, 300.0, 100.0
RECORDER = """
import os
seen = set()
def hit(place):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (place, test) not in seen:
        seen.add((place, test))
        with open({hits!r}, "a") as file:
            file.write(f"{{place}}\\t{{test}}\\n")
def pytest_runtest_logreport(report):
    with open({reports!r}, "a") as file:
        file.write(f"{{report.outcome}}\\t{{report.duration}}\\t{{report.nodeid}}\\n")
"""
app = typer.Typer(add_completion=False)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    number: int
    kind: str
    file: str
    function: str  # qualified name
    before: list[str]  # one or two lines, without their indentation
    after: list[str]


def functions(node: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        inner = (*names, child.name) if isinstance(child, Function | ast.ClassDef) else names
        if isinstance(child, Function):
            yield ".".join(inner), child
        yield from functions(child, inner)


def own_nodes(node: ast.AST) -> Iterator[Any]:
    """Walks a function's own code, without nested functions, assertions and the texts of errors."""
    for child in node.body if isinstance(node, Function) else ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef | ast.JoinedStr | ast.Raise | ast.Assert | ast.AnnAssign):
            yield child
            yield from own_nodes(child)


def changes(node: Any) -> Iterator[tuple[str, Any, ast.expr]]:
    """Yields (kind, expression, its replacement)."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for kind, table in (("sign", FLIPPED), ("bound", ONE_OFF)):
            if type(node.ops[0]) in table:
                yield kind, node, ast.Compare(node.left, [table[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield "bound", node, node.left
        elif not any(isinstance(each, ast.JoinedStr | ast.List | ast.Tuple) for each in ast.walk(node)):
            yield "sign", node, ast.BinOp(node.left, FLIPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.Slice) and node.upper is not None:
        yield "bound", node.upper, ast.BinOp(node.upper, ast.Add(), ast.Constant(1))
    for test in [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", ()):
        is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        yield "condition", test, getattr(test, "operand", test) if is_not else ast.UnaryOp(ast.Not(), test)


def called(node: ast.AST) -> ast.Call | None:
    """Returns the call if the statement is only a call."""
    value = node.value if isinstance(node, ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    return value if isinstance(value, ast.Call) else None


def swappable(first: ast.stmt, second: ast.stmt) -> bool:
    """Returns whether both are calls, except of one method on two objects, because their order would hardly matter."""
    one, other = (ast.unparse(call.func) if call else "" for call in (called(first), called(second)))
    return bool(one and other) and (one == other or one.rpartition(".")[2] != other.rpartition(".")[2])


def faults(lines: list[str], function: Function) -> Iterator[tuple[str, int, list[str]]]:
    """Yields (kind, index of the first line, the new lines)."""
    for node in (function, *own_nodes(function)):
        for kind, old, new in changes(node):
            if old.lineno == old.end_lineno:
                line = lines[old.lineno - 1].encode()
                changed = line[: old.col_offset] + ast.unparse(new).encode() + line[old.end_col_offset :]
                yield kind, old.lineno - 1, [changed.decode()]
        call = called(node)
        if call and RELEASE.fullmatch(getattr(call.func, "attr", "")) and node.lineno == node.end_lineno:
            yield "release", node.lineno - 1, ["pass"]
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for first, second in pairwise(block if isinstance(block, list) else ()):
                if first.lineno + 1 == second.lineno == second.end_lineno and swappable(first, second):
                    yield "order", first.lineno - 1, [lines[second.lineno - 1], lines[first.lineno - 1]]


def matches(source: str, name: str, before: list[str]) -> list[int]:
    """Returns the indices, from 0, at which functions of that name have these lines."""
    lines = [line.strip() for line in source.split("\n")]
    there = functions(ast.parse(source if before[0] in source else ""))
    spans = [range(function.lineno - 1, function.end_lineno or 0) for named, function in there if named == name]
    return [at for span in spans for at in span if lines[at : at + len(before)] == before]


def locate(root: Path, place: Place) -> tuple[Path, int]:
    """Returns the file and the line's index, also if the function has moved to another file. Raises LookupError."""
    for files in (root.glob(place.file), sorted((root / "pd_cluster").rglob("*.py"))):
        found = [(file, at) for file in files for at in matches(file.read_text("utf-8"), place.function, place.before)]
        if len(found) == 1:
            return found[0]
    raise LookupError(f"place {place.number}: {place.function} ({place.file}) has {len(found)} times {place.before}")


def edited(source: str, at: int, num_lines: int, new: list[str]) -> str:
    """Replaces lines by others of the same indentation."""
    lines = source.split("\n")
    lines[at : at + num_lines] = [lines[at][: -len(lines[at].lstrip())] + line for line in new]
    return "\n".join(lines)


def probed(source: str, at: int, number: int) -> str:
    """Inserts a call of the recorder before the statement that contains the line."""
    statements = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.stmt)]
    first = max(each.lineno - 1 for each in statements if each.lineno - 1 <= at < (each.end_lineno or 0))
    return edited(source, first, 0, [f'__import__("pd_cluster.seeded_probe", fromlist=["hit"]).hit({number})'])


def candidates(file: Path, kind: str) -> Iterator[Place]:
    """Yields places whose lines occur only once in their function and can be preceded by a statement."""
    source = file.read_text("utf-8")
    lines = source.split("\n")
    for name, function in functions(ast.parse(source)):
        for its_kind, at, after in faults(lines, function):
            before = [line.strip() for line in lines[at : at + len(after)]]
            if kind == its_kind and not SKIPPED.search(" ".join(before)) and len(matches(source, name, before)) == 1:
                yield Place(0, kind, str(file.relative_to(ROOT)), name, before, [line.strip() for line in after])


@app.command()
def choose() -> None:
    """Chooses new places: spread over the package's lines, evenly over the kinds, at most one per file."""
    dice = random.Random(SEED)
    files = [f for f in sorted((ROOT / "pd_cluster").rglob("*.py")) if not LEFT_OUT.search(str(f.relative_to(ROOT)))]
    at_lines = [i for i, file in enumerate(files) for _ in file.read_text("utf-8").split("\n")]
    kinds = [KINDS[i % len(KINDS)] for i in range(NUM_PLACES)]
    dice.shuffle(kinds)
    chosen: list[Place] = []
    for i, kind in enumerate(kinds):
        start = at_lines[int((i + dice.random()) / NUM_PLACES * len(at_lines))]
        free = [f for f in files[start:] + files[:start] if all(f != ROOT / place.file for place in chosen)]
        fit = next(fit for fit in (list(candidates(file, kind)) for file in free) if fit)
        chosen.append(dice.choice(fit)._replace(number=i + 1))
    PLACES.write_text(json.dumps([place._asdict() for place in chosen], indent=1, ensure_ascii=False) + "\n", "utf-8")


def places() -> list[Place]:
    return [Place(**each) for each in json.loads(PLACES.read_text("utf-8"))]


def git(tree: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(tree), *arguments], check=True)


def pytest(folder: Path, arguments: list[str], limit_s: float) -> tuple[int, str]:
    """Returns the exit status, negative after the limit, and the output."""
    tree, log = folder / "tree", folder / "output.txt"
    env = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = ["timeout", "-s", "KILL", str(limit_s), sys.executable, "-m", "pytest", "-m", "not slow", "--timeout=90"]
    command += ["-p", "no:cacheprovider", *arguments]
    with log.open("w") as file:  # not a pipe, since children that outlive pytest would keep it open
        return subprocess.call(command, cwd=tree, env=env, stdout=file, stderr=file), log.read_text("utf-8", "replace")


@app.command("map")
def make_map(folder: Path, commit: str = typer.Argument("HEAD")) -> None:
    """Writes `hits` (place, test), `reports` (outcome, seconds, test) and `mapped` (finished files) into the folder."""
    folder = folder.absolute()
    tree, mapped = folder / "tree", folder / "mapped"
    if not tree.exists():
        git(ROOT, "clone", "-q", str(ROOT), str(tree))
        git(tree, "checkout", "-q", "--detach", commit)
    git(tree, "checkout", "-q", "--", ".")
    near: dict[int, list[str]] = {}  # number of a place -> test files, the nearest by imports first
    graph = changed_tests.importers()
    for place in places():
        file, at = locate(tree, place)
        file.write_text(probed(file.read_text("utf-8"), at, place.number), "utf-8")
        names = (f"{m.replace('.', '/')}.py" for m in changed_tests.distances([str(file.relative_to(tree))], graph))
        near[place.number] = [name for name in names if QUICK_TEST.match(name) and not LEFT_OUT.search(name)]
    probe = tree / "pd_cluster" / "seeded_probe.py"
    probe.write_text(RECORDER.format(hits=str(folder / "hits"), reports=str(folder / "reports")))
    done = mapped.read_text().split() if mapped.exists() else []
    while True:
        counts = Counter(line.split("\t")[0] for line in {*(folder / "hits").open()}) if done else Counter()
        wanting = [tests for number, tests in near.items() if counts[str(number)] < ENOUGH_TESTS]
        part = [test for tests in zip_longest(*wanting) for test in dict.fromkeys(tests) if test and test not in done]
        part = [*dict.fromkeys(part)][:NUM_FILES]
        if not part:
            return probe.unlink()
        _, output = pytest(folder, ["-p", "pd_cluster.seeded_probe", *part], MAP_LIMIT_S)
        done += part
        mapped.write_text("\n".join(done))
        print(f"{len(wanting)} places need tests; {len(done)} files; {output.strip().split(chr(10))[-1]}", flush=True)


def tests_of(folder: Path) -> dict[int, list[str]]:
    """Maps each place to the tests that run it and pass; only to the quickest, if all would take too long."""
    took_s: Counter[str] = Counter()
    for outcome, duration_s, test in (line.split("\t", 2) for line in (folder / "reports").open()):
        took_s[test] += float(duration_s if outcome == "passed" else "inf")  # type: ignore[assignment]
    found: dict[int, list[str]] = defaultdict(list)
    for number, test in (line.split("\t", 1) for line in dict.fromkeys((folder / "hits").open())):
        found[int(number)].append(test)
    for tests in found.values():
        while sum(took_s[test] for test in tests) > TESTS_LIMIT_S:
            tests.remove(max(tests, key=lambda test: took_s[test]))
    return found


@app.command()
def run(folder: Path, result: Path) -> None:
    """Tests one fault at a time in the clone. Repeats undetected faults for which `map` has found more tests since."""
    folder = folder.absolute()
    tests, tree = tests_of(folder), folder / "tree"
    rows = {row["number"]: row for row in json.loads(result.read_text("utf-8"))} if result.exists() else {}
    for place in places():
        old = rows.get(place.number, {"noticed_by": None, "num_tests": None})
        if old["noticed_by"] or old["num_tests"] == len(tests[place.number]):
            continue
        git(tree, "checkout", "-q", "--", ".")
        file, at = locate(tree, place)
        file.write_text(edited(file.read_text("utf-8"), at, len(place.before), place.after), "utf-8")
        (folder / "tests.txt").write_text("".join(tests[place.number]), "utf-8")
        arguments = ["-x", f"@{folder / 'tests.txt'}"]
        status, output = pytest(folder, arguments, RUN_LIMIT_S) if tests[place.number] else (0, "")
        if status == 5 or "ERROR: not found" in output:
            sys.exit(f"pytest could not run the tests of place {place.number}:\n{output}")
        first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
        noticed_by = None if status == 0 else first[1] if first else "hang" if status < 0 else "crash"
        rows[place.number] = {**place._asdict(), "num_tests": len(tests[place.number]), "noticed_by": noticed_by}
        result.write_text(json.dumps([*rows.values()], indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(line_of(rows[place.number]), flush=True)


def line_of(row: dict[str, Any]) -> str:
    change = f"{' / '.join(row['before'])} -> {' / '.join(row['after'])}"
    noticed = row["noticed_by"] or f"NOT NOTICED by {row['num_tests']} tests"
    return f"{row['number']:2} {row['kind']:9} {row['file']} {row['function']}: {change}: {noticed}"


@app.command()
def compare(before: Path, after: Path) -> None:
    """Prints how many faults were detected, by kind, and which no longer are; exits with 1 if there are any."""
    results = [json.loads(path.read_text("utf-8")) for path in (before, after)]
    for kind in KINDS:
        counts = [[bool(row["noticed_by"]) for row in rows if row["kind"] == kind] for rows in results]
        print(f"{kind:9} noticed " + ", then ".join(f"{sum(each)} of {len(each)}" for each in counts))
    still = {row["number"] for row in results[1] if row["noticed_by"]}
    lost = [line_of(row) for row in results[0] if row["noticed_by"] and row["number"] not in still]
    sys.exit("\n".join(["no longer noticed:", *lost]) if lost else 0)


if __name__ == "__main__":
    app()
