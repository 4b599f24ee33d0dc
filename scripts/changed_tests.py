"""Prints the test files that a change affects, the nearest by imports first, as many as run in a minute or two.

    python scripts/changed_tests.py [BASE]

A change is any difference from BASE (default: the last commit), including untracked files. A change affects the test
files that import the changed module, directly or through other modules. Tests of real processes depend on everything,
so they are printed only if they have changed themselves. Each file's duration comes from pytest's caches of earlier
runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pd_cluster", "ranktable_tools", "benchmarks", "tests")
QUICK = ("tests/unit", "tests/model")
CACHES = (".", "one-process", "clusters", "given")  # in .pytest_cache: pytest's own, and those of scripts/test.sh
DURATIONS = Path("v") / "pd_cluster" / "durations"  # file -> seconds
UNKNOWN_S, BUDGET_S = 4.0, 150.0  # seconds of tests; two files run at a time
# A regex, because parsing all files would take ten seconds. Groups: in `from` lines the module, and its names with or
# without brackets; in `import` lines the module.
IMPORTS = re.compile(r"^[ ]*(?:from ([\w.]+) import (?:\(([^)]*)\)|(.*))|import ([\w.]+))", re.MULTILINE)
NAMES = re.compile(r"(\w+)(?: as \w+)?")
ALWAYS = ("tests/unit/test_layering.py",)


def changed_files(base: str) -> list[str]:
    """Returns the changed files. Raises CalledProcessError if there is no such commit."""
    lists = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    found = [subprocess.run(each, cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in lists]
    return sorted({*"".join(found).split("\n")} - {""})


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> set[str]:
    """Returns the names of imported modules, and MODULE.NAME for names from them; includes imports within strings."""
    found: set[str] = set()
    for module, names, more, name in IMPORTS.findall(file.read_text("utf-8")):
        imported = NAMES.findall(names or more)
        found |= {module, *(f"{module}.{each}" for each in imported)} if module else {name}
    return found


def importers() -> dict[str, set[str]]:
    """Maps each module to those that import it."""
    files = {module_of(file): file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for imported in imports_of(file) & files.keys():
            found[imported].add(name)
    return found


def distances(changed: list[str], graph: dict[str, set[str]]) -> dict[str, int]:
    """Maps each module to the number of imports between it and a change."""
    start = {module_of(ROOT / name) for name in changed if name.endswith(".py")} & graph.keys()
    found = dict.fromkeys(sorted(start), 0)
    queue = deque(found)
    while queue:
        name = queue.popleft()
        for other in sorted(graph[name]):
            if other not in found:
                found[other] = found[name] + 1
                queue.append(other)
    return found


def choose(away: dict[str, int], durations: dict[str, float], budget_s: float = BUDGET_S) -> list[str]:
    """Returns test files, the nearest first; always includes those that have changed themselves."""
    files = {f"{name.replace('.', '/')}.py": distance for name, distance in away.items() if ".test_" in name}
    chosen = [name for name, distance in files.items() if not distance]
    left_s = budget_s
    for name, distance in sorted(files.items(), key=lambda item: (item[1], durations.get(item[0], UNKNOWN_S))):
        took_s = durations.get(name, UNKNOWN_S)
        if distance and name.startswith(QUICK) and took_s <= left_s:
            chosen.append(name)
            left_s -= took_s
    return [*chosen, *(name for name in ALWAYS if name not in chosen)]


def durations_of(folder: Path) -> dict[str, float]:
    """Maps each file to its duration in the newest cache in `folder` that has it."""
    files = [file for name in CACHES if (file := folder / name / DURATIONS).exists()]
    found: dict[str, float] = {}
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        found |= json.loads(file.read_text())
    return found


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    try:
        changed = changed_files(base)
    except subprocess.CalledProcessError as error:
        sys.exit(f"changed_tests: {base}: {error.stderr.strip()}")
    away = distances(changed, importers())
    chosen = choose(away, durations_of(ROOT / ".pytest_cache"))
    touched = [name for name in away if ".test_" in name]
    print(f"changed_tests: {len(changed)} files changed; {len(chosen)} of {len(touched)} test files", file=sys.stderr)
    print("\n".join(chosen))


if __name__ == "__main__":
    main()
