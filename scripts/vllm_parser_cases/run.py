#!/usr/bin/env python3
"""Runs vLLM's own parser tests with this project's parsers, and counts the results.

    tar xf vllm-0.33.0.tar.gz    # the source distribution, from PyPI's file list, because pip would build it
    python scripts/vllm_parser_cases/run.py vllm-0.33.0

excluded.toml lists the cases that are not counted, each with its reason. The command fails if any other case does not
pass, or if a pattern matches no case.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from plugin import TABLE, read_table

HERE = Path(__file__).resolve().parent
FOLDERS = ("tool_parsers", "reasoning", "parser", "tool_use", "entrypoints/tool_parsers")
MOST_S = 500


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder of vLLM's unpacked source distribution")
    parser.add_argument("-k", default="", help="only the cases that pytest's -k selects")
    parser.add_argument("--all", action="store_true", help="also run the excluded cases, and name those that pass")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    tests = asked.source / "tests"
    if not (tests / "tool_parsers").is_dir():
        raise SystemExit(f"run.py: {tests} has no folder tool_parsers; give the unpacked source distribution of vLLM")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tests"
        for name in FOLDERS:
            shutil.copytree(tests / name, copy / name)
        (copy / "__init__.py").touch()
        report = Path(folder) / "report.json"
        _run(copy, report, asked)
        found = json.loads(report.read_text())
    return _told(found, asked)


def _run(tests: Path, report: Path, asked: argparse.Namespace) -> None:
    """Runs pytest in a separate process, without either project's settings."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "plugin", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "-c", os.devnull, f"--rootdir={tests.parent}"]
    command += [*(["-k", asked.k] if asked.k else []), str(tests)]
    paths = [str(HERE), str(HERE.parents[1]), str(tests.parent)]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_CASES_REPORT": str(report), "HF_HUB_OFFLINE": "1"}
    if asked.all:
        settings["VLLM_CASES_ALL"] = "1"
    subprocess.run(
        command, cwd=tests.parent, env=os.environ | settings, timeout=MOST_S, check=False, stdout=subprocess.DEVNULL
    )


def _told(found: dict[str, Any], asked: argparse.Namespace) -> int:
    """Prints the counts and the problems; returns the exit status."""
    outcomes, excluded = found["outcomes"], found["reasons"]
    passed = Counter(outcome for case, outcome in outcomes.items() if case not in excluded)
    failed = [case for case, outcome in outcomes.items() if outcome == "failed" and case not in excluded]
    print(f"passed {passed['passed']}, failed {len(failed)}, excluded {len(excluded)}")
    print(f"vLLM itself skips {passed['skipped']} and fails {passed['xfailed']} more")
    for case in failed:
        print(f"failed: {case}: {found['errors'].get(case, '')!r}")
    reasons = read_table()[0]
    for reason, times in Counter(excluded.values()).most_common():
        print(f"{times:6}  {reason}: {reasons[reason]}")
    print(f"compared without the blanks at their ends: {found['loose']['blanks']} texts")
    unused = [] if asked.k else found["unused"]
    for pattern in unused:
        print(f"{TABLE.name}: no case is {pattern}")
    if asked.all:
        for case in (case for case in excluded if outcomes.get(case) == "passed"):
            print(f"excluded, but passes: {case}")
    return 1 if failed or unused else 0


if __name__ == "__main__":
    sys.exit(main())
