"""Functions fit on a screen and have few parameters, except Triton's kernels, which cannot be divided."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "pd_cluster"
MAX_LINES = 60
MAX_PARAMETERS = 6
# Modules that use other projects' names, and a benchmark that describes them.
FOREIGN = ("extras.fastdeploy", "extras.lmdeploy", "bench")
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Functions whose parameters are a command's flags, or those of other projects' functions.
GIVEN = {
    "commands.bench_command": {"serve"},
    "commands.bench_load_command": {"load"},
    "commands.bench_quality_command": {"quality"},
    "commands.cli": {"trace", "up"},
    "commands.instances_command": {"add", "drain", "remove", "role"},
    "commands.plan_command": {"plan"},
    "commands.quickstart": {"quickstart"},
    "commands.simulate_command": {"simulate"},
    "commands.view_commands": {"chat"},
    "extras.gateway.endpoint_picker_command": {"endpoint_picker"},
    "extras.key_file.keys_command": {"new"},
    "extras.lmdeploy.async_engine": {
        f"AsyncEngine.{name}" for name in ("__call__", "__init__", "generate", "stream_infer")
    },
    "extras.lmdeploy.pipeline": {"pipeline"},
    "extras.quantize.quantize_command": {"quantize"},
    "model.layers.attention.sdpa": {"forward"},
    "offline.async_llm": {"AsyncLLMEngine.generate"},
    "offline.offline_llm": {"LLM.__init__", "LLM.chat", "LLM.generate"},
}


def functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Yields all nested functions with their qualified names, except those compiled by Triton."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # it contains only lambdas
        name = within
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}.{child.name}".lstrip(".")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("jit" in ast.unparse(each) for each in child.decorator_list):
                continue
            yield name, child
        yield from functions(child, name)


def num_parameters(function: Function, name: str) -> int:
    """Counts parameters without self or cls."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - ("." in name and names[:1] in (["self"], ["cls"]))


class Found(NamedTuple):
    long: list[str]
    wide: set[str]
    classes: dict[str, list[str]]


@functools.cache
def found() -> Found:
    """Parses each module once."""
    long, wide, classes = list[str](), set[str](), defaultdict[str, list[str]](list)
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(file.read_text("utf-8"))
        for name, function in functions(tree):
            assert function.end_lineno is not None
            if function.end_lineno - function.lineno + 1 > MAX_LINES:
                long.append(f"{module}.{name}")
            if num_parameters(function, name) > MAX_PARAMETERS:
                wide.add(f"{module}.{name}")
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not module.startswith(FOREIGN):
                classes[node.name].append(module)
    return Found(long, wide, classes)


def test_functions_are_short_and_take_few_parameters() -> None:
    assert not found().long
    assert found().wide == {f"{module}.{name}" for module, names in GIVEN.items() for name in names}


def test_a_class_name_means_one_thing() -> None:
    """Class names are unique, so a name in an error, log or page leads to one definition."""
    assert {name: modules for name, modules in found().classes.items() if len(modules) > 1} == {}
