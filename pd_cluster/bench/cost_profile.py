"""`pd-cluster profile`: measures a model's steps, alone and in pairs, fits costs to them, and writes a file.

Two engine processes share the host's cores like a prefill and a decode instance. They run steps of known work, first
one process alone, then both together. Then a cluster of two instances serves requests one by one. All processes end
with the command.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pd_cluster.bench.profile_cluster import ClusterCosts, measure_cluster
from pd_cluster.bench.profile_messages import EngineReady
from pd_cluster.bench.profile_steps import StepSamples, measure_alone, measure_beside, warm_up
from pd_cluster.bench.profiled_engine_process import started
from pd_cluster.bench.serve_bench import sigterm_ends_it
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.costs.cost_files import write_costs
from pd_cluster.costs.cost_fit import TERMS, fit_step
from pd_cluster.costs.linear_costs import Costs, NeighbourCost, StepCost
from pd_cluster.engine.start.preloader import has_no_driver
from pd_cluster.errors import ConfigError, called
from pd_cluster.result_tables import check_writable, human_nbytes, print_table
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Role

ALONE, BESIDE, CLUSTER = 0.5, 0.15, 0.2  # shares of the command's time; the rest is for starting processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The command's parameters. `launch`: how instances are started. `engine`: the settings of their engines."""

    launch: Launch
    engine: EngineConfig
    seconds: float
    out: str = ""
    command: str = "pd-cluster profile"


async def run(profile: Profile) -> Costs:
    """Measures the costs, prints them and writes the file. Raises PdClusterError."""
    check_writable(profile.out, "--out")
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if (size := getattr(profile.engine, name)) != 1:
            raise ConfigError(f"{called(name)} {size}: a profile measures instances of one device; leave it out")
    with sigterm_ends_it():
        costs = await _measure(profile)
    _show(profile, costs)
    if profile.out:
        write_costs(profile.out, costs)
        print(f"written to {profile.out}; use it with --costs {profile.out}", flush=True)
    return costs


async def _measure(profile: Profile) -> Costs:
    seconds, is_host = profile.seconds, has_no_driver(profile.engine.device)
    ready, alone, neighbour, spreads = await _measure_engines(profile, is_host)
    step, error = fit_step(list(alone.values()))
    found: ClusterCosts | None = None
    if is_host:
        found = await measure_cluster(profile.launch, ready, step, CLUSTER * seconds)
    errors = {"step": error, **spreads}
    costs = Costs(
        model=profile.launch.model_name,
        device=ready.device,
        source=profile.command,
        step=step,
        neighbour=neighbour,
        kv_token_nbytes=ready.kv_token_nbytes,
        num_blocks=ready.num_blocks,
        block_size=ready.block_size,
        max_num_seqs=ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        error=errors,
    )
    return costs if found is None else found.add_to(costs)


async def _measure_engines(
    profile: Profile, is_host: bool
) -> tuple[EngineReady, StepSamples, NeighbourCost, dict[str, float]]:
    """Measures steps alone and, if both engines compute on this host's cores, together."""
    roles: tuple[Role, ...] = ("prefill", "decode") if is_host else ("decode",)
    print(f"starting {len(roles)} engine processes of {profile.launch.model_name} …", flush=True)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pd-cluster-profile-") as folder:
        async with started(profile.engine, roles, Path(folder)) as engines:
            await warm_up(engines)
            print(f"ready after {time.monotonic() - started_s:.1f} s", flush=True)
            alone = await measure_alone(engines[-1], ALONE * profile.seconds)
            if not is_host:
                return engines[-1].ready, alone, NeighbourCost(), {}
            print("prompts and decode steps beside each other …", flush=True)
            neighbour, spreads = await measure_beside(engines[0], engines[1], alone, BESIDE * profile.seconds)
            return engines[-1].ready, alone, neighbour, spreads


def _show(profile: Profile, costs: Costs) -> None:
    rows = [["step", name.removesuffix("_s"), _time(getattr(costs.step, name)), ""] for name in sorted_terms()]
    rows[0][3] = _percent(costs.error["step"])
    if costs.step.num_flat_rows:
        rows.append(["", "rows at no extra cost", str(costs.step.num_flat_rows), ""])
    if "handover" in costs.error:
        handover, host = costs.handover, costs.host
        rows.append(["handover", "setup", _time(handover.setup_s), _percent(costs.error["handover"])])
        rows.append(["handover", "MiB", _time((1 << 20) * handover.byte_s), ""])
        rows += [["host", name.removesuffix("_s"), _time(getattr(host, name)), ""] for name in host.__struct_fields__]
    for name in ("decode_beside_prefill", "prefill_beside_decode"):
        if name in costs.error:
            factor = getattr(costs.neighbour, name)
            rows.append(["neighbour", name.replace("_", " "), f"{factor:.2f} times", _percent(costs.error[name])])
        elif "handover" in costs.error:
            rows.append(["neighbour", name.replace("_", " "), "not measured: give more --seconds", ""])
    title = f"{costs.model} on {costs.device}, {human_nbytes(costs.kv_token_nbytes)} of KV cache a token"
    print_table(title, ["", "of", "takes", "error"], rows, right=("takes", "error"))
    if "handover" not in costs.error:
        print(f"not measured on {costs.device}: handover, host and neighbour, which take two devices")


def sorted_terms() -> list[str]:
    """Returns the terms of a step in the order of StepCost."""
    return [name for name in StepCost.__struct_fields__ if name in TERMS]


def _time(seconds: float) -> str:
    for factor, unit in ((1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _percent(error: float) -> str:
    return f"{error:.1%}"
