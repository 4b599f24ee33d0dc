"""Prints a timeline: a table of its events and a chart, or plain lines outside of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from pd_cluster.commands.trace.timeline_chart import Bar, Chart, chart_of, details_of
from pd_cluster.result_tables import print_table

PLAIN_NUM_COLUMNS = 60
MARGIN_NUM_COLUMNS = 2
COLOURS = ("bright_black", "yellow", "blue", "magenta", "cyan", "green", "red", "bright_green")


def print_requests(admin_url: str, answer: dict[str, Any]) -> None:
    headers = ["request", "status", "age", "took", "prompt", "prefill", "decode"]
    rows = [_request_row(entry) for entry in answer["requests"]]
    title = f"the last {len(rows)} of {answer['num_kept']} requests at {admin_url}"
    print_table(title, headers, rows, right=("age", "took", "prompt"))


def print_timeline(timeline: dict[str, Any]) -> None:
    rows = [[f"{e['at_ms']:.2f}", e["who"], e["what"], details_of(e)] for e in timeline["events"]]
    print_table(title_of(timeline), ["ms", "who", "what", "details"], rows, right=("ms",))
    if timeline["num_dropped_events"]:
        print(f"{timeline['num_dropped_events']} further events were not kept")
    print()
    console = Console(markup=False, highlight=False)
    is_terminal = sys.stdout.isatty()
    for line in chart_lines(chart_of(timeline), console.width if is_terminal else None):
        if is_terminal:
            console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            print(line.plain.rstrip())


def title_of(timeline: dict[str, Any]) -> str:
    error = f": {timeline['error']}" if timeline["error"] else ""
    return (
        f"{timeline['request_id']}: {timeline['num_prompt_tokens']} prompt tokens, {timeline['prefill']} → "
        f"{timeline['decode']}, {timeline['status']}{error}"
    )


def chart_lines(chart: Chart, width: int | None) -> list[Text]:
    """Returns a line per row, and the scale below. `width` None: not a terminal, so only plain characters are used."""
    names = max(len(row.name) for row in chart.rows)
    notes = max(len(row.note) for row in chart.rows)
    num_columns = PLAIN_NUM_COLUMNS if width is None else max(20, width - names - notes - 2 * MARGIN_NUM_COLUMNS)
    block = "#" if width is None else "█"
    lines = []
    for row, colour in zip(chart.rows, COLOURS, strict=True):
        line = Text(f"{row.name:>{names}}  ")
        line.append(_cells(row.bars, chart.shown_ms, num_columns, block), style=colour)
        lines.append(line.append(f"  {row.note}"))
    lines += [Text(" " * (names + 2) + text) for text in _scale(chart, num_columns)]
    return lines


def _cells(bars: Sequence[Bar], shown_ms: float, num_columns: int, block: str) -> str:
    """Draws each bar in at least one cell, with an arrow where it continues beyond the shown part."""
    cells = ["·"] * num_columns
    for bar in bars:
        first = min(num_columns - 1, _column(bar.start_ms, shown_ms, num_columns))
        last = max(first + 1, min(num_columns, _column(bar.stop_ms, shown_ms, num_columns)))
        cells[first:last] = [block] * (last - first)
        if bar.stop_ms > shown_ms:
            cells[-1] = ">"
    return "".join(cells)


def _column(at_ms: float, shown_ms: float, num_columns: int) -> int:
    return round(max(0.0, at_ms) / shown_ms * num_columns) if shown_ms else 0


def _scale(chart: Chart, num_columns: int) -> list[str]:
    end = f"{chart.shown_ms:,.1f} ms"
    lines = [f"0{end:>{num_columns - 1}}"]
    for mark in chart.marks:
        at = min(num_columns - 1, _column(mark.at_ms, chart.shown_ms, num_columns))
        lines.append(" " * at + f"^ {mark.name} at {mark.at_ms:,.1f} ms")
    if chart.shown_ms < chart.end_ms:
        lines.append(f"(cut: the request ended at {chart.end_ms:,.1f} ms)")
    return lines


def _request_row(entry: dict[str, Any]) -> list[str]:
    took = "-" if entry["duration_ms"] is None else f"{entry['duration_ms']:,.0f} ms"
    age, prompt = f"{entry['age_s']:,.1f} s", str(entry["num_prompt_tokens"])
    return [entry["request_id"], entry["status"], age, took, prompt, entry["prefill"], entry["decode"]]
