"""The report of `benchmarks gpu`: written again after every part, and shown as a Markdown table.

It has the contents of other reports, plus `device`, `parts` (each with its outcome), `notes` and the plain `figures`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.gpu.spec import Figure
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Report, Result

PartState = Literal["done", "failed", "not run"]
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part's outcome. `why`: the reason, if it is not done."""

    name: str
    state: PartState
    took_s: float = 0.0
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "took_s": round(self.took_s, 1), "why": self.why}


@dataclass(slots=True)
class GpuReport:
    command: str
    device: str = ""
    results: list[Result] = field(default_factory=list)
    parts: list[PartResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)  # as measured; the results follow from them

    def write(self, folder: Path) -> None:
        """Writes the report. Raises ConfigError if the file cannot be written."""
        whole = Report(self.command, self.results).to_json() | {
            "device": self.device,
            "parts": [part.to_json() for part in self.parts],
            "notes": self.notes,
            "figures": msgspec.to_builtins(self.figures),
        }
        try:
            (folder / REPORT_FILE).write_text(json.dumps(whole, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot be written: {error.strerror}") from None


def read_report(folder: Path) -> GpuReport:
    """Returns the report in a folder without its results; an empty one if there is none. Raises ConfigError."""
    file = folder / REPORT_FILE
    if not file.exists():
        return GpuReport("")
    try:
        report = json.loads(file.read_bytes())
        parts = [PartResult(**part) for part in report["parts"]]
        figures = msgspec.convert(report["figures"], list[Figure])
        return GpuReport(report["command"], report["device"], [], parts, report["notes"], figures)
    except (ValueError, LookupError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--resume: {file} is not a report of bench gpu: {error}; name another --out") from None


def table(file: Path) -> str:
    """Returns a report as Markdown. Raises ConfigError if the file is not a report."""
    try:
        report = json.loads(file.read_text())
        device = report["device"] or "device unknown, since ceilings were not measured"
        lines = [f"{device}; {report['machine']}; commit {report['commit']}.", ""]
        lines += [f"`{report['command']}`", "", *_goals(report["results"]), "", *_figures(report["results"])]
        for part in report["parts"]:
            if part["state"] != "done":
                lines += ["", f"**{part['name']}: {part['state']}**: {_in_short(part['why'])}"]
        lines += ["", *(f"- {note}" for note in report["notes"])]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--table {file}: not a report of bench gpu: {error}") from None
    return "\n".join(lines) + "\n"


def _in_short(why: str) -> str:
    """Returns the outcome, and the last line that the child wrote."""
    what, _, lines = why.partition("; its last lines:")
    last = lines.strip().rpartition("\n")[2]
    return f"{what}: {last}" if last else what


def _goals(results: list[dict[str, Any]]) -> list[str]:
    lines = ["| what | goal | measured | |", "|---|---|---|---|"]
    for each in results:
        if each["goal"] is not None:
            sign = "≥" if each["better"] == "higher" else "≤"
            word = "not measured" if each["value"] is None else "reached" if each["met"] else "**not reached**"
            lines.append(f"| {each['name']} | {sign} {_amount(each, 'goal')} | {_amount(each, 'value')} | {word} |")
    return lines


def _figures(results: list[dict[str, Any]]) -> list[str]:
    """Returns lines for results without a goal that have a value."""
    lines = ["| figure | value | spread | samples |", "|---|---|---|---|"]
    for each in results:
        if each["goal"] is None and each["value"] is not None:
            far = "" if each["spread"] is None else f"{each['spread']:.1%}"
            lines.append(f"| {each['name']} | {_amount(each, 'value')} | {far} | {each['samples']} |")
    return lines


def _amount(result: dict[str, Any], which: str) -> str:
    value, unit = result[which], result["unit"]
    if value is None:
        return ""
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {'×' if unit == 'x' else unit}"
