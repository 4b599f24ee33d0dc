"""Draws the report of a load with matplotlib (the extra `plot`): latencies, and the cluster's state over time.

Equal runs give files with equal bytes, .png and .svg alike.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.bench.load_report import STAGES, Interval, LoadRun, over_time
from pd_cluster.bench.outcomes import Outcome
from pd_cluster.commands.trace.timeline_png import check_installed
from pd_cluster.errors import ConfigError
from pd_cluster.output_files import write_output
from pd_cluster.result_tables import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES, DPI = (12.0, 8.0), 100
FORMATS = (".png", ".svg")
COLOURS = {"prefill": "#1f6fb4", "handover": "#e0a100", "decode": "#2e8b57", "hybrid": "#8e5bb5"}
GREY = "#7f7f7f"


def check_picture(file: str, flag: str = "--picture") -> None:
    """Checks the flag before a run. Raises PdClusterError: no matplotlib, an unknown format, no such folder."""
    if not file:
        return
    check_writable(file, flag)
    if Path(file).suffix.lower() not in FORMATS:
        raise ConfigError(f"{flag} {file}: expected a name that ends in {' or '.join(FORMATS)}")
    check_installed(flag)


def write_picture(run: LoadRun, file: str, flag: str = "--picture") -> None:
    """Draws the run. Raises ConfigError when the file cannot be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    slowed = f"\nNOT VALID: {run.slowed_by}" if run.slowed_by else ""
    figure.suptitle(run.title + slowed, fontsize=11, color="#c0392b" if slowed else "#222222")
    times, requests, batches, pools = figure.subplots(2, 2).flat
    intervals = over_time(run)
    _draw_times(times, run)
    _draw_stages(requests, intervals)
    _draw_roles(batches, intervals, lambda each: each.num_running, "sequences an instance")
    _draw_roles(batches, intervals, lambda each: each.num_waiting, "waiting", "--")
    _draw_roles(pools, intervals, lambda each: {role: 100 * at for role, at in each.held_share.items()}, "pool in use")
    batches.set_ylabel("sequences an instance; dashed: waiting")
    pools.set_ylabel("% of the KV blocks")
    for axes in (times, requests, batches, pools):
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    suffix = Path(file).suffix.lower().removeprefix(".")
    with matplotlib.rc_context({"svg.hashsalt": "pd-cluster"}):  # otherwise ids are random
        figure.savefig(drawn, format=suffix, metadata={"Date": None} if suffix == "svg" else {"Software": None})
    write_output(file, flag, drawn.getvalue())


def _draw_times(axes: Axes, run: LoadRun) -> None:
    """Draws the share of requests that took at most a time x: TTFT and end to end in s, TPOT in units of 10 ms."""
    taken: list[tuple[str, Callable[[Outcome], float | None], float, str, float]] = [
        ("TTFT, s", lambda each: each.ttft_s, 1.0, COLOURS["prefill"], run.slo.ttft_s),
        ("TPOT, 10 ms", lambda each: each.tpot_s, 100.0, COLOURS["decode"], run.slo.tpot_s),
        ("end to end, s", lambda each: each.e2e_s, 1.0, GREY, run.slo.e2e_s),
    ]
    for label, value, scale, colour, goal_s in taken:
        values = sorted(scale * found for each in run.outcomes if (found := value(each)) is not None)
        shares = [100 * (at + 1) / len(values) for at in range(len(values))]
        axes.step(values, shares, where="post", color=colour, label=label)
        if goal_s:
            axes.axvline(scale * goal_s, color=colour, linestyle=":", linewidth=1.2)
    axes.set_xlabel("time; dotted: goals")
    axes.set_ylabel("% of requests within it")
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _draw_stages(axes: Axes, intervals: list[Interval]) -> None:
    at_s = [each.at_s for each in intervals]
    layers = [[each.num_in[stage] for each in intervals] for stage in STAGES]
    if at_s:
        axes.stackplot(at_s, *layers, labels=STAGES, colors=[COLOURS[stage] for stage in STAGES], alpha=0.8)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_xlabel("s")
    axes.set_ylabel("requests in each stage")
    axes.set_ylim(bottom=0)


def _draw_roles(
    axes: Axes, intervals: list[Interval], values: Callable[[Interval], dict[str, float]], what: str, style: str = "-"
) -> None:
    for role in sorted({role for each in intervals for role in values(each)}):
        points = [(each.at_s, found[role]) for each in intervals if role in (found := values(each))]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, style, color=COLOURS.get(role, GREY), label=f"{role}: {what}", linewidth=1.3)
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(fontsize=8, frameon=False, loc="upper left")
