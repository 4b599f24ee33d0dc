"""A pytest plugin that installs the stand-ins, leaves out the excluded cases and counts the others."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import tomllib
from collections import Counter
from collections.abc import Generator
from itertools import chain
from pathlib import Path
from typing import Any

import char_tokenizer
import messages
import modules
import pytest

TABLE = Path(__file__).with_name("excluded.toml")
MOST_S = 15  # time limit of a case


class Counting:
    """Counts cases by outcome, and excluded cases by reason."""

    def __init__(self, excluded: dict[str, list[str]], runs_all: bool) -> None:
        self.excluded, self.runs_all = excluded, runs_all
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.unused = {pattern for patterns in excluded.values() for pattern in patterns}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept = []
        for item in items:
            reason = self._reason(item.nodeid.removeprefix("tests/"))
            if reason:
                self.reasons[item.nodeid.removeprefix("tests/")] = reason
            if not reason or self.runs_all:
                kept.append(item)
        items[:] = kept
        modules.tests_begin()

    def _reason(self, case: str) -> str:
        for reason, patterns in self.excluded.items():
            for pattern in patterns:
                if fnmatch.fnmatchcase(case, pattern.replace("[", "[[]")):
                    self.unused.discard(pattern)
                    return reason
        return ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None]:
        signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, MOST_S)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        case = report.nodeid.removeprefix("tests/")
        if report.failed:
            self.errors[case] = _error_of(report)
        if report.failed and "[XPASS(strict)]" in str(report.longrepr):
            self.outcomes[case] = "passed"  # vLLM expects a failure, but this project does not have that fault
        elif report.failed or report.when == "call" or report.skipped:
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            self.outcomes[case] = "failed" if self.outcomes.get(case) == "failed" else outcome

    def pytest_collectreport(self, report: Any) -> None:
        """Counts a file that can't be imported as one case."""
        if report.failed:
            case = report.nodeid.removeprefix("tests/")
            self.outcomes[case], self.errors[case] = "failed", _error_of(report)
            if reason := self._reason(case):
                self.reasons[case] = reason

    def pytest_sessionfinish(self) -> None:
        found = {
            "outcomes": self.outcomes,
            "errors": self.errors,
            "reasons": self.reasons,
            "unused": sorted(self.unused),
            "loose": messages.loose,
        }
        Path(os.environ["VLLM_CASES_REPORT"]).write_text(json.dumps(found))


def _error_of(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:400]


def _too_long(*given: Any) -> None:
    raise TimeoutError(f"the case takes longer than {MOST_S} s")


def read_table(path: Path = TABLE) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Returns the reasons and, for each, its patterns of cases. Raises ValueError for an incomplete table."""
    table = tomllib.loads(path.read_text())
    reasons, cases = table["reasons"], table["cases"]
    if set(reasons) != set(cases):
        raise ValueError(f"{path.name}: reasons and cases differ: {sorted(set(reasons) ^ set(cases))}")
    twice = [pattern for pattern, times in Counter(chain(*cases.values())).items() if times > 1]
    if twice:
        raise ValueError(f"{path.name}: listed twice: {twice}")
    return reasons, cases


def pytest_configure(config: Any) -> None:
    char_tokenizer.learn(Path(config.rootpath))
    modules.install()
    runs_all = bool(os.environ.get("VLLM_CASES_ALL"))
    excluded = read_table()[1] if TABLE.exists() else {}
    config.pluginmanager.register(Counting(excluded, runs_all))
    config.addinivalue_line("filterwarnings", "ignore")
