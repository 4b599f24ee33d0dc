#!/bin/sh
# Counts lines of the package's core, its extras, the benchmarks and the tests; in the tests, private accesses and calls
# that build an engine, an LLM or a cluster. Counts the pages' words and lists the largest pages, the package's repeated
# file names and its folders with the most entries.
#
#   sh scripts/weight.sh [--by-file]
#
# A private access is an attribute with one leading underscore on something other than self, cls, super() or a module
# of tests/, and not of a class in the same file. --by-file lists them by file, the most first.

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" - "$root" "$@" <<'END'
import ast
import sys
from collections import Counter
from pathlib import Path

root = Path(sys.argv[1])
BENCHMARKS = [folder for folder in (root / "benchmarks", root / "pd_cluster/lab") if folder.exists()]
SITES = ("make_core", "LLM", "LiveCluster")
PUBLIC = ("_replace", "_asdict", "_fields", "_make")  # methods of named tuples


def files(*folders):
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def num_lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def own_names(tree):
    """Names that belong to the test itself: self, cls, modules of tests/, and objects of classes in the same file."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    names = {"self", "cls", *classes}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and called.id in classes:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def is_own(value, names):
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in names


def measure(path, private, sites):
    tree = ast.parse(path.read_text())
    names = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr in PUBLIC:
                continue
            private[path.relative_to(root)] += not is_own(node.value, names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            sites[node.func.id if isinstance(node.func, ast.Name) else node.func.attr] += 1


tests = files(root / "tests")
benchmarks = files(*BENCHMARKS)
package = [path for path in files(root / "pd_cluster", root / "ranktable_tools") if path not in benchmarks]
private, sites = Counter(), Counter()
for path in tests:
    measure(path, private, sites)
extras = files(root / "pd_cluster/extras")
core = [path for path in package if path not in extras]
for name, paths in (("core", core), ("extras", extras), ("benchmarks", benchmarks), ("tests", tests)):
    print(f"{name:<12}{num_lines(paths):>8} lines {len(paths):>5} files")
for folder in sorted(each for each in (root / "tests").iterdir() if each.is_dir() and files(each)):
    print(f"  {folder.name:<10}{num_lines(files(folder)):>8} lines {len(files(folder)):>5} files")
print(f"private accesses in tests {private.total():>6}")
for name in SITES:
    print(f"sites of {name + '(':<17}{sites[name]:>6}")
pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
words = {page.relative_to(root): len(page.read_text("utf-8").split()) for page in pages}
print(f"pages{sum(words.values()):>15} words {len(words):>5} files")
for page, count in sorted(words.items(), key=lambda each: -each[1])[:10]:
    print(f"{count:>20} words {page}")
names = Counter(path.name for path in package if path.name != "__init__.py")
repeated = {name: count for name, count in names.items() if count > 1}
print("repeated file names:", ", ".join(f"{name} {count}" for name, count in sorted(repeated.items())) or "none")
entries = Counter(path.parent for path in package if path.name != "__init__.py")
entries += Counter(folder.parent for folder in {path.parent for path in package if path.name == "__init__.py"})
for folder, count in entries.most_common(10):
    print(f"{count:>20} entries {folder.relative_to(root)}")
if "--by-file" in sys.argv:
    for path, count in private.most_common():
        if count:
            print(f"{count:>5}  {path}")
END
