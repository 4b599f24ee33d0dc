"""Prints and writes the figures of `pd-cluster bench` and of benchmarks, with units, spread and goals.

The file of `--json FILE`:

    {"command": "pd-cluster bench serve …", "machine": "…", "commit": "…",
     "results": [{"name", "value", "unit", "better": "higher" | "lower", "samples", "spread", "goal", "met"}]}

`value` is null if nothing could be measured. `samples` is the number of measurements that `value` summarizes; `spread`
is their interquartile range divided by their median, null for fewer than two. `goal` and `met` are null if no goal was
set; a goal without a value is not met. Knows nothing of how figures are measured; imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pd_cluster import host
from pd_cluster.errors import ConfigError
from pd_cluster.output_files import write_output

Better = Literal["higher", "lower"]
GIT_TIMEOUT_S = 5.0
SOURCE_FILE = Path(__file__).with_name("__init__.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure."""

    name: str
    value: float | None
    unit: str
    better: Better
    samples: int = 1
    spread: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": _significant(self.value),
            "unit": self.unit,
            "better": self.better,
            "samples": self.samples,
            "spread": _significant(self.spread),
            "goal": self.goal,
            "met": self.met,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one `bench` command."""

    command: str
    results: list[Result]

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "machine": machine(),
            "commit": commit(),
            "results": [result.to_json() for result in self.results],
        }

    def write(self, file: str) -> None:
        """Writes the report. Raises ConfigError when the file cannot be written."""
        write_output(file, "--json", (json.dumps(self.to_json(), indent=2) + "\n").encode())

    def show(self, title: str) -> None:
        """Prints the table; the columns for goals appear only if there is a goal."""
        headers = ["", "value", "unit", "spread", "samples"]
        rows = [[r.name, _number(r.value), r.unit, _percent(r.spread), str(r.samples)] for r in self.results]
        if any(result.goal is not None for result in self.results):
            headers += ["goal", "met"]
            for row, result in zip(rows, self.results, strict=True):
                row += [_goal(result), {None: "", True: "yes", False: "NO"}[result.met]]
        print_table(title, headers, rows, right=("value", "spread", "samples", "goal"))


def counted(name: str, count: float, unit: str, goal: float | None = None) -> Result:
    """Returns a figure whose ideal is zero or as low as possible."""
    return Result(name=name, value=count, unit=unit, better="lower", goal=goal)


def check_writable(file: str, flag: str = "--json") -> None:
    """Checks `file` before a benchmark spends time on its contents. Raises ConfigError."""
    folder = Path(file).absolute().parent
    if file and (Path(file).is_dir() or not os.access(folder, os.W_OK)):
        raise ConfigError(f"{flag} {file}: cannot be written; give a file in an existing folder")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolates linearly between the two nearest ranks, as numpy does by default; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def spread(values: Sequence[float]) -> float | None:
    """Returns interquartile range / median; None for fewer than two values or for a median of 0."""
    q1, median, q3 = (percentile(values, percent) for percent in (25, 50, 75))
    if len(values) < 2 or not median or q1 is None or q3 is None:
        return None
    return (q3 - q1) / median


def percentiles(name: str, values: Sequence[float], unit: str, percents: Sequence[int] = (50, 90, 99)) -> list[Result]:
    """Returns `name`_p50 and so on; lower is better. Each result has the spread of all values."""
    return [
        Result(
            name=f"{name}_p{percent}",
            value=percentile(values, percent),
            unit=unit,
            better="lower",
            samples=len(values),
            spread=spread(values),
        )
        for percent in percents
    ]


# ---- the machine and the source


def machine() -> str:
    """Returns one line with this process's cores, CPU model, memory and versions."""
    cores, memory_gib = host.num_cores(), host.memory().limit / (1 << 30)
    versions = f"torch {_version('torch')}, python {platform.python_version()}"
    return f"{cores} cores, {_cpu_model()}, {memory_gib:.0f} GiB, {platform.system()}, {versions}"


def commit() -> str:
    """Returns the commit of the running source tree, with -dirty if changed, or "unknown". Never fails."""
    if _git("ls-files", "--error-unmatch", SOURCE_FILE.name) is None:  # installed, perhaps inside another repository
        return "unknown"
    return _git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12") or "unknown"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(SOURCE_FILE.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---- output for people


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Prints a rich table on a terminal; otherwise aligned plain lines, which are never cut."""
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left")
        for header in headers:
            table.add_column(header, justify="right" if header in right else "left")
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    print(title)
    for line in [headers, *rows]:
        cells = [
            cell.rjust(width) if header in right else cell.ljust(width)
            for cell, width, header in zip(line, widths, headers, strict=True)
        ]
        print("  ".join(cells).rstrip())
    sys.stdout.flush()


@contextlib.contextmanager
def progress(what: str, total: int, unit: str = "requests") -> Iterator[Callable[[], None]]:
    """Shows a bar on a terminal; otherwise prints a line for every quarter (only the last line for few items)."""
    if sys.stdout.isatty():
        with Progress(transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    num_done = 0

    def advance() -> None:
        nonlocal num_done
        num_done += 1
        if num_done == total or (total >= 8 and 4 * num_done // total > 4 * (num_done - 1) // total):
            print(f"{what}: {num_done} of {total} {unit}", flush=True)

    yield advance


def human_nbytes(nbytes: float) -> str:
    """Returns 1536 as 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _significant(value: float | None) -> float | None:
    """Rounds to five significant digits; integers stay unchanged."""
    if value is None or float(value).is_integer():
        return value
    return float(f"{value:.5g}")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _goal(result: Result) -> str:
    if result.goal is None:
        return ""
    return f"{'≥' if result.better == 'higher' else '≤'} {_number(result.goal)}"
