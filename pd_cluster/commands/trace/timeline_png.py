"""Draws a timeline's chart with matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

from pd_cluster.commands.trace.timeline_chart import Chart, Row, chart_of
from pd_cluster.commands.trace.timeline_text import title_of
from pd_cluster.errors import PdClusterError
from pd_cluster.output_files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_PX, HEIGHT_PX, DPI = 1200, 560, 100
TITLE_NUM_CHARS = 150
LEAST_SHARE = 0.003  # minimum width of a bar as a share of the chart's width; a shorter bar would be invisible
COLOURS = ("#7f7f7f", "#e0a100", "#1f6fb4", "#8e5bb5", "#17a2b8", "#2e8b57", "#c0392b", "#86b817")
MARKS = {"first token": "#222222", "failed": "#c0392b"}


def check_installed(flag: str = "--png") -> None:
    """Raises PdClusterError if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise PdClusterError(
            f"{flag}: drawing needs matplotlib, which is not installed here; "
            "install it with: pip install 'pd-cluster[plot]' (or: pip install matplotlib)"
        ) from None


def write_png(timeline: dict[str, Any], file: str) -> None:
    """Writes the picture. Raises ConfigError when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chart = chart_of(timeline)
    figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title_of(timeline), TITLE_NUM_CHARS), fontsize=11)
    _draw(figure.add_subplot(), chart)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_output(file, "--png", drawn.getvalue())


def _draw(axes: Axes, chart: Chart) -> None:
    width_ms = chart.shown_ms or 1.0
    for at, (row, colour) in enumerate(zip(chart.rows, COLOURS, strict=True)):
        _draw_row(axes, at, row, colour, width_ms)
    for mark in chart.marks:
        style: dict[str, Any] = {"linestyle": "--", "linewidth": 1.4, "clip_on": False}
        axes.axvline(mark.at_ms, color=MARKS[mark.name], label=mark.name, **style)
    axes.set_yticks(range(len(chart.rows)), [row.name for row in chart.rows])
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.set_xlim(0, width_ms)
    cut = f"; cut, the request ended at {chart.end_ms:,.0f} ms" if chart.shown_ms < chart.end_ms else ""
    axes.set_xlabel(f"ms since the request was received{cut}")
    axes.set_ylabel("what the request did or waited for")
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside lower center", ncols=5, fontsize=9, frameon=False)


def _draw_row(axes: Axes, at: int, row: Row, colour: str, width_ms: float) -> None:
    """Draws a row's bars, and its note on the side with more space."""
    if not row.bars:
        return
    least_ms = LEAST_SHARE * width_ms
    spans = [(bar.start_ms, max(least_ms, bar.stop_ms - bar.start_ms)) for bar in row.bars]
    edge = "white" if len(spans) > 1 else colour
    axes.broken_barh(spans, (at - 0.35, 0.7), facecolors=colour, edgecolors=edge, linewidth=0.6, label=row.name)
    start_ms, stop_ms = row.bars[0].start_ms, max(start + length for start, length in spans)
    gap_ms = 0.006 * width_ms
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
    style: dict[str, Any] = {"va": "center", "fontsize": 9, "color": "#222222", "bbox": behind}
    if stop_ms < 0.72 * width_ms:
        axes.text(stop_ms + gap_ms, at, row.note, ha="left", **style)
    elif start_ms > 0.28 * width_ms:
        axes.text(start_ms - gap_ms, at, row.note, ha="right", **style)
    else:
        axes.text(width_ms / 2, at, row.note, ha="center", **style)
    if row.bars[-1].stop_ms > width_ms:
        where = f"continues to {row.bars[-1].stop_ms:,.0f} ms →"
        axes.text(width_ms - gap_ms, at, where, ha="right", va="center", fontsize=9, color="white")
