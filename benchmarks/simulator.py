"""`python -m benchmarks simulator`: compares small real clusters to simulated ones with this machine's costs.

A real cluster and a simulated one serve each configuration with the same arrivals, at a share of the simulated
cluster's capacity. A ratio is the larger value divided by the smaller one. `pd-cluster profile --out FILE` makes the
costs.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from benchmarks.figures import begin, finish, names_of
from pd_cluster.bench.outcomes import Outcome, Slo, goodput_per_s
from pd_cluster.bench.request_arrivals import Arrival, prompt_of
from pd_cluster.bench.serve_bench import NUM_TOKEN_IDS, ServeBench, ask_model, make_bodies, running, send_all
from pd_cluster.bench.workloads import Workload, WorkloadName, arrivals_of
from pd_cluster.client.instance_list import fetch_settled
from pd_cluster.client.streaming_client import make_client, measure
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.costs.cost_files import read_costs
from pd_cluster.costs.linear_costs import Costs
from pd_cluster.result_tables import Report, Result, percentile, progress
from pd_cluster.simulate.event_script import ScriptLine
from pd_cluster.simulate.simulated_layout import SimulatedLayout, layout_of
from pd_cluster.simulate.simulation import simulate

GOAL = 0.15  # allowed relative difference of a simulated figure from the measured one
WARM_UP, NUM_WARM_UP = ServeBench(input_len=32, output_len=8), 8
SLACK = Slo(ttft_s=3.0, tpot_s=2.0)  # goals, as multiples of a single request's times
MOST_OPEN = 512


@dataclass(frozen=True, slots=True)
class Configuration:
    """`share`: the load, as a share of the layout's capacity. `kill`: an instance that dies in the middle."""

    layout: str
    workload: WorkloadName
    share: float
    kill: str = ""

    @property
    def name(self) -> str:
        return f"{self.layout} {self.workload} {self.share:.0%}{f' without {self.kill}' if self.kill else ''}"


CONFIGURATIONS = (
    Configuration("1H", "fixed", 0.4),
    Configuration("1H", "log-normal", 0.7),
    Configuration("1H", "shared-prefix", 0.9),
    Configuration("1P1D", "fixed", 0.9),
    Configuration("1P1D", "log-normal", 0.4),
    Configuration("1P1D", "shared-prefix", 0.7),
    Configuration("2P1D", "fixed", 0.7),
    Configuration("2P1D", "log-normal", 0.9),
    Configuration("2P1D", "shared-prefix", 0.4),
    Configuration("1P2D", "fixed", 0.4),
    Configuration("1P2D", "log-normal", 0.7, kill="decode-1"),
    Configuration("1P2D", "shared-prefix", 0.7),
)


@dataclass(frozen=True, slots=True)
class SimulatorBench:
    """`costs`: a file. `model`: the real clusters' model; "": the shipped one. `flags`: flags of `serve`."""

    costs: str
    model: str = ""
    layouts: str = ""
    num_requests: int = 120
    flags: tuple[str, ...] = ()


async def run(bench: SimulatorBench, json: str) -> None:
    """Measures and reports. Raises PdClusterError if the costs cannot be read, or a cluster does not start."""
    begin(json)
    costs = read_costs(bench.costs)
    layouts = names_of("--layouts", bench.layouts, dict.fromkeys(each.layout for each in CONFIGURATIONS))
    results: list[Result] = []
    for each in CONFIGURATIONS:
        if each.layout in layouts:
            results += await _compare(bench, costs, each)
    asked = f"--costs {bench.costs} --layouts {','.join(layouts)} --num-requests {bench.num_requests}"
    finish(Report(f"python -m benchmarks simulator {asked}", results), "measured and simulated", json)


async def _compare(bench: SimulatorBench, costs: Costs, configuration: Configuration) -> list[Result]:
    layout = layout_of(configuration.layout, are_neighbours=True)
    workload = Workload(name=configuration.workload, num_requests=bench.num_requests, num_output_tokens=64)
    rate = configuration.share * await asyncio.to_thread(_capacity, layout, costs, workload)
    arrivals = arrivals_of(msgspec.structs.replace(workload, rate_per_s=rate))
    kill_s = arrivals[len(arrivals) // 2].at_s
    script = [ScriptLine(at_s=kill_s, what="kill", instance=configuration.kill)] if configuration.kill else []
    simulated = await asyncio.to_thread(simulate, layout, costs, arrivals, script)
    alone = (await asyncio.to_thread(simulate, layout, costs, arrivals[:1])).outcomes[0]
    goals = Slo(ttft_s=SLACK.ttft_s * (alone.ttft_s or 0.0), tpot_s=SLACK.tpot_s * (alone.tpot_s or 0.0))
    measured, hit_share = await _measured(bench, layout, arrivals, configuration.kill, kill_s)
    prompts = sum(each.num_prompt_tokens for each in simulated.outcomes)
    simulated_hits = sum(each.num_cached_tokens for each in simulated.outcomes) / prompts
    print(
        f"{configuration.name}: {rate:.2f} requests/s; hits {hit_share:.1%}, simulated {simulated_hits:.1%}", flush=True
    )
    one, other = _figures(measured, goals), _figures(simulated.outcomes, goals)
    one["hit share"], other["hit share"] = hit_share, simulated_hits
    print(", ".join(f"{name} {one[name]:.3g} for {other[name]:.3g}" for name in one), flush=True)
    return [
        Result(
            name=f"{configuration.name}: {name}",
            value=max(one[name], other[name]) / min(one[name], other[name]),
            unit="ratio",
            better="lower",
            samples=len(measured),
            goal=1 + GOAL,
        )
        for name in one
        if one[name] and other[name]
    ]


def _capacity(layout: SimulatedLayout, costs: Costs, workload: Workload) -> float:
    """Returns the requests a second of a simulated cluster in which requests are always waiting."""
    arrivals = [msgspec.structs.replace(each, at_s=0.0) for each in arrivals_of(workload)]
    return len(arrivals) / simulate(layout, costs, arrivals).duration_s


def _figures(outcomes: Sequence[Outcome], goals: Slo) -> dict[str, float]:
    good = [each for each in outcomes if not each.error]
    ttft_s = [each.ttft_s for each in good if each.ttft_s is not None]
    tpot_s = [each.tpot_s for each in good if each.tpot_s is not None]
    took_s = max((each.last_s or 0.0 for each in good), default=0.0)
    return {
        "ttft mean": sum(ttft_s) / max(1, len(ttft_s)),
        "ttft p90": percentile(ttft_s, 90) or 0.0,
        "tpot mean": sum(tpot_s) / max(1, len(tpot_s)),
        "goodput": goodput_per_s(list(outcomes), goals, took_s),
    }


async def _measured(
    bench: SimulatorBench, layout: SimulatedLayout, arrivals: Sequence[Arrival], kill: str, kill_s: float
) -> tuple[list[Outcome], float]:
    """Returns a real cluster's outcomes, and the share of prompt tokens that were cached."""
    numbers: dict[str, Any] = {"num_prefill": layout.num_prefill, "num_decode": layout.num_decode}
    if layout.num_hybrid:
        numbers["num_hybrid"] = layout.num_hybrid
    launch = Launch(model=bench.model, port=free_port_pair(), arguments=list(bench.flags), restart="no", **numbers)
    async with running(launch) as cluster, make_client(MOST_OPEN) as client:
        model, _ = await ask_model(client, launch.url)
        await send_all(client, launch.url, make_bodies(WARM_UP, model, NUM_WARM_UP), NUM_WARM_UP, "warming up")
        before = await fetch_settled(launch.admin_url)
        outcomes = await _sent(client, launch.url, model, arrivals, _Death(cluster, kill, kill_s))
        after = await fetch_settled(launch.admin_url)
    names = ("num_prefix_hit_tokens", "num_prefix_query_tokens")
    hits, asked = (sum(e[name] for e in after) - sum(e[name] for e in before) for name in names)
    return outcomes, hits / asked if asked > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Death:
    cluster: Cluster
    name: str  # "": no instance dies
    at_s: float

    async def happen(self) -> None:
        if self.name:
            await asyncio.sleep(self.at_s)
            os.kill(self.cluster.pid_of(self.name), signal.SIGKILL)


async def _sent(
    client: httpx.AsyncClient, url: str, model: str, arrivals: Sequence[Arrival], death: _Death
) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    async def one(number: int, arrival: Arrival) -> Outcome:
        body = {
            "model": model,
            "prompt": prompt_of(arrival, number, NUM_TOKEN_IDS),
            "max_tokens": arrival.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        await asyncio.sleep(max(0.0, started_s + arrival.at_s - loop.time()))
        sent_s = loop.time() - started_s
        sample = await measure(client, f"{url}/v1/completions", body)
        advance()
        return Outcome(
            request_id=f"r{number}",
            sent_s=sent_s,
            first_s=None if sample.ttft_s is None else sent_s + sample.ttft_s,
            last_s=sent_s + sample.e2e_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_output_tokens=sample.num_output_tokens,
            error=sample.error or "",
        )

    with progress("measured", len(arrivals)) as advance:
        *outcomes, _ = await asyncio.gather(*(one(at, each) for at, each in enumerate(arrivals)), death.happen())
    return [each for each in outcomes if each is not None]
