"""A function fits on a screen, and a call of it can be read. Triton's kernels apart: a kernel cannot be cut."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pd_cluster"
MAX_LINES = 60
MAX_PARAMETERS = 10
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Functions whose parameters are given from outside: flags, and names that users call.
GIVEN = {
    "commands.bench": {"serve"},
    "commands.cli": {"up"},
    "commands.endpoint_picker": {"endpoint_picker"},
    "offline.llm": {"LLM.__init__", "LLM.chat"},
    "offline.lmdeploy.async_engine": {"AsyncEngine.generate"},
}


def functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Each with its name inside the module, however deep, but for those that Triton compiles."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # it has no functions but lambdas
        name = within
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}.{child.name}".lstrip(".")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("jit" in ast.unparse(each) for each in child.decorator_list):
                continue
            yield name, child
        yield from functions(child, name)


def num_parameters(function: Function, name: str) -> int:
    """Without the one that is a method's own."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - ("." in name and names[:1] in (["self"], ["cls"]))


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {
        file.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(file.read_text("utf-8"))
        for file in sorted(PACKAGE.rglob("*.py"))
    }


def test_functions_are_short_and_take_few_parameters() -> None:
    long, wide = set(), set()
    for module, tree in modules().items():
        for name, function in functions(tree):
            assert function.end_lineno is not None
            if function.end_lineno - function.lineno + 1 > MAX_LINES:
                long.add(f"{module}.{name}")
            if num_parameters(function, name) > MAX_PARAMETERS:
                wide.add(f"{module.replace('/', '.')}.{name}")
    assert not long
    assert wide == {f"{module}.{name}" for module, names in GIVEN.items() for name in names}


# Modules with the names of other projects, and a benchmark, which describes them.
FOREIGN = ("fastdeploy", "offline/lmdeploy", "bench")


def test_a_class_name_means_one_thing() -> None:
    """So a name in an error, a log or a page leads to one definition."""
    found: dict[str, list[str]] = {}
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not module.startswith(FOREIGN):
                found.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
