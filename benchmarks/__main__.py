"""`python -m benchmarks NAME …`, in a checkout: the signature of each function is its command line.

Imports nothing heavy at the top.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_cluster.commands.settings_flags import given_model
from pd_cluster.errors import PdClusterError

Json = Annotated[str, typer.Option(help="Write the result to this file too.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of rounds; each measures everything in turn.")]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads.")]
Quick = Annotated[bool, typer.Option(help="Only check that everything runs: small measurements, no goals.")]
Seed = Annotated[int, typer.Option(help="Seed of the requests and their arrival times.")]
Faults = Annotated[str, typer.Option(help="Names of faults, with commas; an unknown name lists all. Default: all.")]
LoadShare = Annotated[float, typer.Option(help="Load, as a share of the cluster's capacity.")]
KVTransport = Annotated[str, typer.Option(help="shm or dist; default: what `up` chooses.")]

app = typer.Typer(help="Measure parts of this checkout.", no_args_is_help=True)


def _run(measuring: Coroutine[Any, Any, None]) -> None:
    """Runs clients on uvloop, which saves a third of their CPU time, because they may share cores with the servers."""
    import uvloop

    uvloop.run(measuring)


@app.command("engine")
def engine(
    workload: Annotated[str, typer.Option(help="uniform,mixed,steps; default: all.")] = "",
    shape: Annotated[
        str, typer.Option(help="mla-1B (latent attention), moe-1B (experts) or hybrid-1B; default: a Llama.")
    ] = "",
    parts: Annotated[
        str,
        typer.Option(
            help="sparse (sparse against dense latent attention), windows (requests at once) or unit (experts spread "
            "over two instances); default: whole models."
        ),
    ] = "",
    rounds: Rounds = 3,
    threads: Threads = 2,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Compare the engine to transformers' generate(), and its steps to the machine's limits."""
    from benchmarks import engine, experts, hybrids, latents, sparse, units, windows

    if parts not in ("", sparse.NAME, windows.NAME, units.NAME) or (parts and (shape or workload)):
        expected = f"{sparse.NAME}, {windows.NAME} or {units.NAME}"
        raise PdClusterError(f"--parts {parts}: expected {expected}, without --shape and --workload")
    if parts == windows.NAME:
        windows.run(json)
        return
    if parts == units.NAME:
        units.run(rounds, quick, json)
        return
    if parts:
        sparse.run(rounds, threads, quick, json)
        return
    shapes = {each.NAME: each.measure for each in (latents, experts, hybrids)}
    if (shape and workload) or shape not in ("", *shapes):
        raise PdClusterError(f"--shape {shape}: expected {' or '.join(shapes)}, without --workload")
    if shape:
        engine.run_shape(shape, shapes[shape], rounds, threads, quick, json)
        return
    engine.run(workload, rounds, threads, quick, json)


@app.command("speculative")
def speculative(
    kinds: Annotated[str, typer.Option(help="Kinds of requests, with commas; an unknown name lists all.")] = "",
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4,16,32",
    places: Annotated[str, typer.Option(help="alone,1P1D; default: both.")] = "",
    weights: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "float32",
    rows: Annotated[bool, typer.Option(help="Only measure the cost of steps of one sequence with drafts.")] = False,
    vllm: Annotated[str, typer.Option(help="A Python that has vLLM for CPUs: compare n-gram drafts to vLLM's.")] = "",
    rounds: Rounds = 3,
    threads: Threads = 1,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Compare tokens/s with drafts (right, wrong, found) to tokens/s without, and check that answers are equal."""
    from benchmarks import beside_vllm
    from benchmarks import draft_row_costs as row_costs
    from benchmarks.figures import names_of
    from benchmarks.speculative import ALONE, KINDS, SPLIT, WEIGHTS, Bench, run

    chosen, form = names_of("--kinds", kinds, KINDS), names_of("--weights", weights, WEIGHTS)[0]
    counts = tuple(map(int, names_of("--batches", batches, map(str, range(1, 257)))))
    where, counts, rounds = (
        names_of("--places", places, (ALONE, SPLIT)),
        (1, 2) if quick else counts,
        1 if quick else rounds,
    )
    bench = Bench(chosen, counts, where, form, rounds, threads, quick)
    if rows:
        row_costs.run(form, rounds, threads, quick, json)
    elif vllm:
        beside_vllm.run(bench, vllm, json)
    else:
        run(bench, json)


@app.command("lora")
def lora(rounds: Rounds = 20, threads: Threads = 2, quick: Quick = False, json: Json = "") -> None:
    """Compare decode steps on CPU with 1 to 32 LoRA adapters to the same steps without adapters."""
    from benchmarks import lora

    lora.run(rounds, threads, quick, json)


@app.command("kv")
def kv(
    rounds: Rounds = 5,
    transports: Annotated[str, typer.Option(help="Some of shm,dist,nixl; default: all but nixl.")] = "",
    sizes: Annotated[str, typer.Option(help="MiB of each transfer; default: 1,16,256.")] = "",
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Measure KV cache transfers between two processes (GB/s and latency) against the machine's limits."""
    from benchmarks.kv.kv_bench import make_bench, run

    run(make_bench(transports, sizes, quick), rounds, json)


@app.command("router")
def router(
    rounds: Rounds = 3,
    streams: Annotated[int, typer.Option(min=1, help="Number of open streams, to measure the memory of one.")] = 4000,
    against: Annotated[
        str, typer.Option(help="Another checkout of this project: compare a request's CPU time only, in turn.")
    ] = "",
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Measure the scheduler's CPU time per token and per request, added TTFT, and memory per stream."""
    from benchmarks.router.router_bench import run

    run(rounds, streams, against, quick, json)


@app.command("routing")
def routing(
    policies: Annotated[str, typer.Option(help="Policies to compare, with commas.")] = "least-loaded,prefix-aware",
    users: Annotated[int, typer.Option(min=1)] = 50,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each user's conversation.")] = 4,
    first_len: Annotated[int, typer.Option(min=0, help="Tokens of each first turn, in addition to the usual 96.")] = 0,
    rounds: Rounds = 1,
    instances: Annotated[
        str, typer.Option(help="Only CPU time of choices among these numbers of instances, such as 32,100,500.")
    ] = "",
    json: Json = "",
) -> None:
    """Compare routing policies for conversations of many users: cache hits, TTFT, TPOT."""
    if instances:
        from benchmarks.router.routing_cost import run as run_choices

        _run(run_choices(instances, policies, rounds, json))
        return
    from benchmarks.router.routing import Conversations, run

    _run(run(policies, Conversations(users, turns, first_len=first_len), rounds, json))


@app.command("agents")
def agents(
    num_requests: Annotated[int, typer.Option(min=1, help="Turns of all sessions.")] = 1500,
    seed: Seed = 0,
    export: Annotated[str, typer.Option(metavar="FILE", help="Write the trace, as for `bench load --trace`.")] = "",
    json: Json = "",
) -> None:
    """Simulate agents' sessions with and without pulls: cache hits and TTFT, compared to one large pool."""
    from benchmarks.router.agents import run

    run(num_requests, seed, export, json)


@app.command("overload")
def overload(
    seconds: Annotated[float, typer.Option(help="Duration of each of six runs.")] = 60.0,
    shapes: Annotated[str, typer.Option(help="Bottleneck role: prefill,decode; default: both in turn.")] = "",
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Send three times the capacity to simulated workers: served and refused requests, delays, fairness."""
    from benchmarks.router.overload import run

    _run(run(seconds, shapes, seed, quick, json))


@app.command("roles")
def roles(
    seconds: Annotated[float, typer.Option(min=70, help="Duration of each of three phases.")] = 180.0,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Compare --auto-role to fixed roles while lengths change, with simulated workers."""
    from benchmarks.router.roles import run

    _run(run(seconds, seed, quick, json))


@app.command("batches")
def batches(
    lines: Annotated[int, typer.Option(min=1, help="Lines of the batch.")] = 5000,
    rate: Annotated[float, typer.Option(help="Interactive requests a second.")] = 4.0,
    seconds: Annotated[float, typer.Option(help="Duration of the load, without and with the batch.")] = 60.0,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Compare times to the first token of interactive requests with and without a batch of /v1/batches."""
    from benchmarks.router.interactive_beside_batch import BatchLoad, run

    load = BatchLoad(60, rate, 5.0, seed) if quick else BatchLoad(lines, rate, seconds, seed)
    _run(run(load, quick, json))


@app.command("long-prompts")
def long_prompts(
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens of the long prompt.")] = 262_144,
    rate: Annotated[float, typer.Option(help="Requests of 200 tokens a second.")] = 4.0,
    seconds: Annotated[float, typer.Option(help="Duration of the load, alone and beside the long prompt.")] = 20.0,
    timeout: Annotated[float, typer.Option(help="Maximum seconds for the long prompt.")] = 3600.0,
    seed: Seed = 0,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Compare times to the first token of short requests with and without a long prompt."""
    from benchmarks.router.beside_long_prompt import LongPrompt, run

    load = LongPrompt(8192, rate, 3.0, seed) if quick else LongPrompt(tokens, rate, seconds, seed, timeout)
    _run(run(load, quick, json))


@app.command("hog")
def hog(
    seconds: Annotated[float, typer.Option(help="Duration of each attack.")] = 20.0,
    attacks: Annotated[str, typer.Option(help="Names of attacks, with commas; an unknown name lists all.")] = "",
    json: Json = "",
) -> None:
    """Measure three quiet tenants while a fourth attacks with guides, pictures, sequences, adapters and more."""
    from benchmarks.router.hog import run

    _run(run(seconds, attacks, json))


@app.command("faults")
def faults(
    faults: Faults = "",
    num_requests: Annotated[int, typer.Option(min=1, help="Minimum number of requests of each run.")] = 1000,
    load: LoadShare = 0.7,
    seed: Seed = 0,
    kv_transport: KVTransport = "",
    units: Annotated[
        bool, typer.Option("--units", help="The instances of each role are a unit of a model's experts.")
    ] = False,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Kill, stop and restart instances of a 2P2D cluster under load: the effect on requests."""
    from benchmarks.faults.faults_bench import FaultsBench, run

    _run(run(FaultsBench(faults, num_requests, load, seed, quick, kv_transport, units), json))


@app.command("soak")
def soak(
    model: Annotated[str, typer.Option(callback=given_model, help="Model folder; default: the shipped model.")] = "",
    minutes: Annotated[float, typer.Option(help="Duration of the load, after a fault-free run.")] = 30.0,
    kv_transport: KVTransport = "shm",
    faults: Faults = "",
    load: LoadShare = 0.4,
    seed: Seed = 0,
    leave: Annotated[float, typer.Option(help="Share of requests whose clients leave within a second.")] = 0.0,
    tenants: Annotated[int, typer.Option(help="Number of clients, each with its own address.")] = 1,
    quick: Quick = False,
    json: Json = "",
) -> None:
    """Run a 2P2D cluster under steady load with random faults: lost requests, growth of memory and descriptors."""
    from benchmarks.faults.soak import SoakBench, run

    _run(run(SoakBench(model, minutes, kv_transport, faults, load, seed, quick, leave, tenants), json))


@app.command("simulator")
def simulator(
    costs: Annotated[str, typer.Option(metavar="FILE", help="From pd-cluster profile, for the same model and flags.")],
    model: Annotated[str, typer.Option(callback=given_model, help="Model folder; default: the shipped model.")] = "",
    layouts: Annotated[str, typer.Option(help="Layouts, with commas; an unknown one lists all. Default: all.")] = "",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each configuration.")] = 120,
    flags: Annotated[str, typer.Option(help="Flags of `serve` for the real clusters, as in a shell.")] = "",
    json: Json = "",
) -> None:
    """Compare twelve small real clusters to simulated ones: TTFT, TPOT, cache hits and goodput."""
    import shlex

    from benchmarks.simulator import SimulatorBench, run

    _run(run(SimulatorBench(costs, model, layouts, num_requests, tuple(shlex.split(flags))), json))


@app.command("start")
def start(rounds: Rounds = 5, json: Json = "") -> None:
    """Measure start-up of a cluster and restart of a killed worker, in units of `import torch`; and memory."""
    from benchmarks import start

    start.run(rounds, json)


@app.command("gpu")
def gpu(
    parts: Annotated[
        str, typer.Option(help="Parts, with commas; an unknown name lists all. models: only make the model.")
    ] = "",
    stage: Annotated[str, typer.Option(help="Only the parts of this stage of scripts/gpu_check.sh.")] = "",
    device: Annotated[str, typer.Option(help="cuda, or cpu with --quick.")] = "cuda",
    budget: Annotated[float, typer.Option(min=1, help="Seconds; parts that no longer fit are not run.")] = 540,
    out: Annotated[str, typer.Option(help="Folder of the report, profiles and logs.")] = "gpu-report",
    models: Annotated[str, typer.Option(help="Folder that keeps the model for later runs.")] = "",
    resume: Annotated[bool, typer.Option(help="Add to the report in --out.")] = False,
    quick: Quick = False,
    table: Annotated[str, typer.Option(help="Only print this report as Markdown.")] = "",
) -> None:
    """Measure the CUDA path (decode, prefill, handover, a split cluster) against the GPU's limits."""
    from benchmarks.gpu.gpu_bench import GpuBench, parts_of, run
    from benchmarks.gpu.gpu_report import table as table_of

    if table:
        print(table_of(Path(table)), end="")
        return
    place = Path(out).expanduser().absolute()
    if not run(GpuBench(parts_of(parts, stage), device, quick, budget, place, models, resume)):
        raise typer.Exit(1)


def main() -> None:
    """Exits with 0, with 1 and one line on stderr, or with 2 for a command line that typer refuses."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended by SIGTERM"))  # child processes end, too
    try:
        app(prog_name="python -m benchmarks")
    except PdClusterError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
