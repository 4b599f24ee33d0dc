"""The rank table tools run on Python 3.8: they use nothing newer in syntax, library, or evaluated annotations.

The test does not run Python 3.8: vermin checks names and arguments, and the rest is checked in the syntax tree.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pd_ranktable_tools.py"
FILES = [*sorted((ROOT / "ranktable_tools").glob("*.py")), SCRIPT]
# Classes that cannot be subscripted before 3.9.
PLAIN = {"tuple", "list", "dict", "set", "frozenset", "type", "Callable", "Sequence", "Mapping", "Iterator", "Iterable"}
PLAIN |= {"Collection", "defaultdict", "deque", "Pattern", "Match", "PathLike", "Popen", "CompletedProcess"}


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yields evaluated nodes; annotations are not, because each file has `from __future__ import annotations`."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from evaluated(child)


def test_the_syntax_is_that_of_3_8() -> None:
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 8))
        nodes = list(evaluated(tree))
        has_annotations = any(isinstance(node, ast.AnnAssign | ast.arg) for node in ast.walk(tree))
        imported = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
        assert "annotations" in imported or not has_annotations, file
        for node in nodes:
            if isinstance(node, ast.Subscript):
                name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                assert name not in PLAIN, f"{file} line {node.lineno}: {ast.unparse(node)} is evaluated"
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                sides = {getattr(side, "id", "") for side in (node.left, node.right)}
                assert not sides & {"str", "int", "None", "float", "bytes", "dict", "Path"}, (file, ast.unparse(node))


def test_the_libraries_are_those_of_3_8() -> None:
    command = [Path(sys.executable).with_name("vermin"), "-t=3.8-", "--violations", "--no-tips", *FILES]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Minimum required versions: 3.8" in done.stdout


def test_an_older_python_is_told_so() -> None:
    older = "sys.version_info, sys.version = (3, 7, 9), '3.7.9 (default)'"
    command = [sys.executable, "-c", f"import runpy, sys; {older}; runpy.run_path(sys.argv[1])", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    line = "pd_ranktable_tools.py: needs Python 3.8 or newer, and this is 3.7.9\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 4))
