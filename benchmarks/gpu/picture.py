"""Draws the times between tokens of `benchmarks gpu`, from the CSV file of its clusters. Needs matplotlib."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

CSV_FILE, PNG_FILE = "between-tokens.csv", "between-tokens.png"
HEADERS = ("cluster", "stream", "at_s", "gap_ms")
COLOURS = {"colocated": "#c0392b", "split": "#1f6fb4"}


def draw(folder: Path) -> str:
    """Writes PNG_FILE; returns why that failed, or ""."""
    if not (folder / CSV_FILE).exists():
        return "there is nothing to draw"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for cluster, colour in COLOURS.items():
        points = points_of(folder / CSV_FILE, cluster)
        axes.plot([at for at, _ in points], [gap for _, gap in points], ".", ms=3, color=colour, label=cluster)
    axes.set_xlabel("s since the stream was sent")
    axes.set_ylabel("ms since its token before")
    axes.set_yscale("log")
    axes.set_title("Streams that decode while long prompts arrive")
    axes.legend()
    figure.savefig(folder / PNG_FILE)
    return ""


def points_of(file: Path, cluster: str) -> list[tuple[float, float]]:
    """Returns (at_s, gap_ms) for each token of one cluster's streams."""
    with file.open(newline="") as lines:
        return [(float(r["at_s"]), float(r["gap_ms"])) for r in csv.DictReader(lines) if r["cluster"] == cluster]
