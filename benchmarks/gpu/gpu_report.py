"""The report of `gpu`. It is compared with goals, written again after each part, and shown as a Markdown table.

Its file has the contents of other reports and, in addition, `device`, `parts` (each with its outcome), `notes` and the
measured `figures`. A figure that could not be measured has no value; a goal without a value is not met.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.gpu.gpu_messages import LLAMA_8B, DeviceName, Figure, Line, Noted
from pd_cluster.errors import ConfigError
from pd_cluster.result_tables import Report, Result

REPORT_FILE = "report.json"
COPY, READ, PRODUCTS = "device-to-device copy, read + written", "read alone, by a sum", "bf16 products, the best"
TTFT, TPOT = "{mode}: TTFT of long prompts", "{mode}: TPOT of streams under long prompts, p99"
STARTUP_S, FLOOR_SHARE, OVERHEAD_PERCENT, PREFILL_SHARE = 20.0, 0.85, 5.0, 0.65
HANDOVER_SHARE, ADDED_TTFT_PERCENT = 0.8, 5.0


class PartResult(msgspec.Struct, frozen=True):
    """One part's outcome. `why`: the reason, if the part was not done."""

    name: str
    state: Literal["done", "failed", "not run"]
    took_s: float = 0.0
    why: str = ""


class GpuReport(msgspec.Struct):
    command: str = ""
    device: str = ""
    quick: bool = False
    parts: list[PartResult] = []
    notes: list[str] = []
    figures: list[Figure] = []

    @classmethod
    def read(cls, folder: Path) -> GpuReport:
        """Returns the report in a folder; an empty one if there is none. Raises ConfigError."""
        file = folder / REPORT_FILE
        if not file.exists():
            return cls()
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--resume: {file} is not a report of gpu: {error}; name another --out") from None

    def take(self, part: PartResult, lines: list[Line]) -> None:
        """Adds a part's results, which replace earlier ones of the same part."""
        self.parts = [each for each in self.parts if each.name != part.name] + [part]
        new = {line.name: line for line in lines if isinstance(line, Figure)}
        self.figures = [each for each in self.figures if each.name not in new] + [*new.values()]
        self.notes += [line.text for line in lines if isinstance(line, Noted)]
        self.device = next((line.name for line in lines if isinstance(line, DeviceName)), self.device)

    def results(self) -> list[Result]:
        plain = [Result(**msgspec.structs.asdict(each)) for each in self.figures]
        return [*judged({each.name: each.value for each in self.figures}, self.quick), *plain]

    def show(self, title: str) -> None:
        Report(self.command, self.results()).show(title)

    def write(self, folder: Path) -> None:
        """Writes the report. Raises ConfigError if the file cannot be written."""
        whole = Report(self.command, self.results()).to_json() | msgspec.to_builtins(self)
        try:
            (folder / REPORT_FILE).write_text(json.dumps(whole, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot be written: {error.strerror}") from None


def judged(figures: dict[str, float], quick: bool) -> Iterator[Result]:
    """Yields the results that follow from the figures. A quick run has no goals."""

    def of(name: str, value: float | None, unit: str, goal: float | None = None, more: bool = False) -> Result:
        better: Literal["higher", "lower"] = "higher" if more else "lower"
        return Result(name=name, value=value, unit=unit, better=better, goal=None if quick else goal)

    def ratio(above: str, below: str, factor: float = 1.0) -> float | None:
        return factor * figures[above] / figures[below] if above in figures and below in figures else None

    yield of("start-up from page cache", figures.get("start-up: process to engine ready"), "s", STARTUP_S)
    for batch in (1, 32, 128):
        step_ms, context = (figures.get(f"decode {batch}: {what}") for what in ("step", "context"))
        for rate, goal in ((COPY, FLOOR_SHARE), (READ, None)):
            share = None
            if step_ms and context and rate in figures:
                floor_ms = 1e-6 * LLAMA_8B.decode_read_nbytes(batch, context) / figures[rate]
                share = floor_ms / step_ms
            name = f"decode {batch}, share of the floor at the bandwidth of {'copies' if goal else 'reads'}"
            yield of(name, share, "x", goal, more=True)
        yield of(f"decode {batch}, host overhead", figures.get(f"decode {batch}: host overhead"), "%", OVERHEAD_PERCENT)
    share = ratio("prefill: model FLOPs", PRODUCTS)
    yield of("prefill, share of the best product", share, "x", PREFILL_SHARE, more=True)
    # Like a copy, a handover reads and writes each byte, and the copy's rate counts both.
    share = ratio("handover, with checksums", COPY, 2)
    yield of("handover, share of the copy", share, "x", HANDOVER_SHARE, more=True)
    ttft = ratio(TTFT.format(mode="split"), TTFT.format(mode="colocated"), 100)
    yield of("TTFT of long prompts, added by the split", None if ttft is None else ttft - 100, "%", ADDED_TTFT_PERCENT)
    tpot = ratio(TPOT.format(mode="split"), TPOT.format(mode="colocated"))
    yield of("p99 TPOT under long prompts, split / colocated", tpot, "x")


def table(file: Path) -> str:
    """Returns a report as Markdown. Raises ConfigError if the file is not a report."""
    try:
        report = json.loads(file.read_text())
        lines = [f"{report['device'] or 'device unknown'}; {report['machine']}; commit {report['commit']}.", ""]
        lines += [f"`{report['command']}`", "", "| what | goal | measured | |", "|---|---|---|---|"]
        for each in report["results"]:
            goal = "" if each["goal"] is None else f"{'≥' if each['better'] == 'higher' else '≤'} {each['goal']:g}"
            word = {None: "", True: "reached", False: "**not reached**"}[each["met"]]
            lines.append(f"| {each['name']} | {goal} | {_amount(each)} | {word} |")
        for part in report["parts"]:
            if part["state"] != "done":
                lines += ["", f"**{part['name']}: {part['state']}**: {part['why'].splitlines()[-1]}"]
        lines += ["", *(f"- {note}" for note in report["notes"])]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--table {file}: not a report of gpu: {error}") from None
    return "\n".join(lines) + "\n"


def _amount(result: dict[str, Any]) -> str:
    return "not measured" if result["value"] is None else f"{result['value']:,.4g} {result['unit']}"
