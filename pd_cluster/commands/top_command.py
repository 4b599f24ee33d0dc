"""`pd-cluster top`: the cluster, live in a terminal; without a terminal, a line for each sample."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pd_cluster.client.admin_client import Admin
from pd_cluster.client.instance_list import idle_rounds, place_in_unit
from pd_cluster.client.overview_reader import FINE, Found, fetch_overview, figures, sparkline
from pd_cluster.errors import PdClusterError
from pd_cluster.result_tables import human_nbytes

NUM_SAMPLES = 600
NUM_MARKS = 6
STYLES = {"critical": "bold red", "warning": "yellow", "notice": "cyan"}
DOWN = ("failed", "unreachable")


class ClusterSamples:
    """The results of several queries: samples, events (marks), and rates, which are computed from two queries."""

    def __init__(self) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=NUM_SAMPLES)
        self.marks: deque[dict[str, Any]] = deque(maxlen=NUM_MARKS)
        self.found: Found | None = None
        self.rates: dict[str, tuple[float, float]] = {}  # instance -> KV bytes sent and received a second

    async def look(self, admin: Admin) -> Found:
        before = self.found
        since_s = self.samples[-1]["at_s"] if self.samples else None
        last_mark = self.marks[-1]["number"] if self.marks else 0
        found = await fetch_overview(admin, since_s, last_mark)
        if before is not None and before["started_s"] != found["started_s"]:  # the scheduler has restarted
            self.samples.clear()
            self.marks.clear()
            found, before = await fetch_overview(admin), None
        self.samples.extend(found["samples"])
        self.marks.extend(found["marks"])
        found["samples"] = list(self.samples)
        self.rates = _rates(before, found)
        self.found = found
        return found


def run(admin: Admin, period_s: float, as_json: bool, num_looks: int | None = None) -> None:
    """Queries every `period_s` seconds, until Ctrl-C or `num_looks` times. Raises PdClusterError if the first fails."""
    asyncio.run(_run(admin, period_s, as_json, num_looks))


async def _run(admin: Admin, period_s: float, as_json: bool, num_looks: int | None) -> None:
    watch = ClusterSamples()
    await watch.look(admin)
    is_live = sys.stdout.isatty() and not as_json
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) if is_live else _Plain() as live:
        number = 0
        while True:
            assert watch.found is not None
            if isinstance(live, Live):
                live.update(screen(watch, admin.url, console.width), refresh=True)
            else:
                print(json.dumps(watch.found) if as_json else plain_line(watch.found), flush=True)
            number += 1
            if number == num_looks:
                return
            await asyncio.sleep(period_s)
            try:
                await watch.look(admin)
            except PdClusterError as error:
                watch.found["problems"] = [{"severity": "critical", "text": str(error), "way_out": "asking again"}]


class _Plain:
    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


def plain_line(found: Found) -> str:
    """Returns one line: the time, figures, the states of instances that are not ready, and the worst problem."""
    at = time.strftime("%H:%M:%S", time.localtime(found["now_s"]))
    numbers = ", ".join(f"{name} {value}" for name, value in figures(found).items())
    num_ready = sum(each["state"] == "ready" for each in found["instances"])
    worst = f"; {found['problems'][0]['text']}" if found["problems"] else ""
    return f"{at} {num_ready} of {len(found['instances'])} instances ready, {numbers}{worst}"


def screen(watch: ClusterSamples, url: str, width: int) -> Group:
    """Returns the screen for a terminal of `width` columns. `watch` must have at least one sample."""
    found = watch.found
    assert found is not None
    head = Text.assemble(("pd-cluster top", "bold"), f"  {url}  {found['model']}  ", (_clock(found["now_s"]), "dim"))
    above = (head, *_problems(found), Text(), _numbers(found), *_lines(watch, width), Text())
    return Group(*above, _instances(watch), *_events(watch))


def bottom(watch: ClusterSamples, width: int) -> Group:
    """Returns the part that `pd-cluster up` shows below its log lines."""
    found = watch.found
    assert found is not None
    return Group(_instances(watch), *_lines(watch, width)[:1], _numbers(found), *_problems(found))


def _problems(found: Found) -> list[Text]:
    return [
        Text(f"{each['severity']}: {each['text']}  {each['way_out']}", style=STYLES[each["severity"]])
        for each in found["problems"]
    ] or [Text(FINE, style="green")]


def _numbers(found: Found) -> Text:
    return Text("   ".join(f"{name} {value}" for name, value in figures(found).items()), style="bold")


def _lines(watch: ClusterSamples, width: int) -> list[Text]:
    num_columns = max(10, width - 28)
    lines = []
    for name, key, style in (
        ("tokens/s", "tokens_per_s", "blue"),
        ("requests", "num_running", "green"),
        ("TTFT p99", "ttft_p99_s", "yellow"),
        ("TPOT p99", "tpot_p99_s", "yellow"),
    ):
        values = [sample[key] for sample in watch.samples]
        most = max([value for value in values[-num_columns:] if value is not None], default=0.0)
        unit = " s" if key.endswith("_s") and key != "tokens_per_s" else ""
        lines.append(Text.assemble(f"{name:>9} ", (sparkline(values, num_columns), style), f"  most {most:,.3g}{unit}"))
    return lines


def _instances(watch: ClusterSamples) -> Table:
    assert watch.found is not None
    table, instances = Table(expand=True), watch.found["instances"]
    has_units = any(each["unit"] for each in instances)
    for heading, right in (
        *(("instance", False), ("role", False), ("state", False), ("run", True), ("wait", True)),
        *(("KV held", True), ("cached", True), ("KV out/s", True), ("KV in/s", True), ("links", False)),
        *((("unit", False), ("idle rounds", True)) if has_units else ()),
    ):
        table.add_column(heading, justify="right" if right else "left", overflow="ellipsis", no_wrap=True)
    for each in instances:
        sent, received = watch.rates.get(each["instance_id"], (0.0, 0.0))
        state = Text(f"{each['state']}: {each['reason']}" if each["reason"] else each["state"])
        state.stylize("bold red" if each["state"] in DOWN else "green" if each["state"] == "ready" else "yellow")
        table.add_row(
            each["instance_id"],
            f"{each['role']} → {each['next_role']}" if each["next_role"] else each["role"],
            state,
            str(each["num_running"]),
            str(each["num_waiting"]),
            _share(each["num_held_blocks"], each["num_blocks"]),
            _share(each["num_cached_blocks"], each["num_blocks"]),
            human_nbytes(sent),
            human_nbytes(received),
            ", ".join(f"{peer.split('@')[0]} {link}" for peer, link in each["links"].items()) or "-",
            *((place_in_unit(each), idle_rounds(each)) if has_units else ()),
        )
    return table


def _events(watch: ClusterSamples) -> list[Text]:
    style = {"down": "red", "up": "green", "change": "yellow"}
    return [
        Text(f"{_clock(mark['at_s'])} {mark['instance_id']} {mark['text']}", style=style[mark["kind"]])
        for mark in reversed(watch.marks)
    ]


def _rates(before: Found | None, found: Found) -> dict[str, tuple[float, float]]:
    if before is None or found["now_s"] <= before["now_s"]:
        return {}
    passed_s = found["now_s"] - before["now_s"]
    old = {(each["instance_id"], each["epoch"]): each for each in before["instances"]}
    rates = {}
    for each in found["instances"]:
        if (earlier := old.get((each["instance_id"], each["epoch"]))) is not None:
            sent, received = (each[name] - earlier[name] for name in ("kv_sent_nbytes", "kv_received_nbytes"))
            rates[each["instance_id"]] = max(0.0, sent / passed_s), max(0.0, received / passed_s)
    return rates


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
