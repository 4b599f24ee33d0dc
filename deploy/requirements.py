"""Prints what `pip install` must install for pd-cluster with the given extras, one requirement a line.

If the installed torch fits pyproject.toml, torch is left out, so that pip keeps it: to pip, the 2.11.0a0+… of a
vendor's image is older than 2.11. Otherwise torch is exactly TORCH. Needs only the standard library.

    python3 deploy/requirements.py cuda otel
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TORCH = "torch==2.13.0"
PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def _numbers(text: str) -> list[int]:
    """`2.11.0a0+git` -> [2, 11]"""
    return [int(part) for part in re.findall(r"\d+", text)[:2]]


def fits(found: str, wanted: str) -> bool:
    """`wanted`: torch>=2.11,<2.16"""
    least, below = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", wanted).groups()
    return _numbers(least) <= _numbers(found) < _numbers(below)


def requirements(*extras: str) -> list[str]:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    (torch,) = (each for each in named if re.match(r"torch\b(?!-)", each))
    others = [each for each in named if each != torch]
    try:
        return others if fits(version("torch"), torch) else [TORCH, *others]
    except PackageNotFoundError:
        return [TORCH, *others]


if __name__ == "__main__":
    print("\n".join(requirements(*sys.argv[1:])))
