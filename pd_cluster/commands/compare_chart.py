"""Draws a comparison with matplotlib (the extra `plot`): each server's runs, and the times of a constant workload."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pd_cluster.bench.compare.round_ratios import SLOW, ComparedRun
from pd_cluster.output_files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES, DPI = (12.0, 8.0), 100
COLOURS = ("#1f6fb4", "#e0a100", "#2e8b57", "#8e5bb5", "#c0392b", "#17a2b8", "#7f7f7f", "#86b817")
PANELS = {
    "ttft_p50": "TTFT p50, ms",
    "itl_p99": "p99 between tokens, ms",
    "goodput": "goodput, requests/s",
}


def write_comparison(
    runs: Sequence[ComparedRun], title: str, level_name: str, file: str, flag: str = "--picture"
) -> None:
    """Draws the runs. Raises ConfigError when the file cannot be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    *panels, last = figure.subplots(2, 2).flat
    for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
        _draw_figure(axes, runs, name, label, level_name)
    panels[0].legend(fontsize=8, frameon=False)
    _draw_constant_work(last, runs)
    for axes in (*panels, last):
        axes.set_ylim(bottom=0)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    suffix = Path(file).suffix.lower().removeprefix(".")
    with matplotlib.rc_context({"svg.hashsalt": "pd-cluster"}):  # otherwise ids are random
        figure.savefig(drawn, format=suffix, metadata={"Date": None} if suffix == "svg" else {"Software": None})
    write_output(file, flag, drawn.getvalue())


def _draw_figure(axes: Axes, runs: Sequence[ComparedRun], name: str, label: str, level_name: str) -> None:
    """Draws a dot for each run, and medians over the rounds, as a line over several levels or a bar for one."""
    levels = list(dict.fromkeys(run.level for run in runs))
    servers = sorted({run.server for run in runs}, key=[run.server for run in runs].index)
    for at, server in enumerate(servers):
        colour = COLOURS[at % len(COLOURS)]
        points = [
            (run.level if len(levels) > 1 else float(at), value)
            for run in runs
            if run.server == server and (value := _value(run, name)) is not None
        ]
        places = sorted({x for x, _ in points})
        middles = [median(y for x, y in points if x == place) for place in places]
        if len(levels) > 1:
            axes.plot(places, middles, color=colour, label=server)
        else:
            axes.bar(places, middles, color=colour, alpha=0.5, label=server)
        axes.scatter([x for x, _ in points], [y for _, y in points], color=colour, s=14, zorder=3)
    if len(levels) > 1:
        axes.set_xlabel(level_name)
    else:
        axes.set_xticks(range(len(servers)), servers, fontsize=8)
    axes.set_ylabel(label)


def _draw_constant_work(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    taken = [run.constant_s for run in runs]
    axes.plot(range(1, len(runs) + 1), taken, "o-", color="#222222", linewidth=1.0, markersize=4)
    axes.axhline(SLOW * median(taken), color="#c0392b", linestyle=":", linewidth=1.2)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("runs in order of time; above the dotted line, the machine was slow")
    axes.set_ylabel("constant work, s")


def _value(run: ComparedRun, name: str) -> float | None:
    found = run.figures().get(name)
    return found.value if found is not None else None
