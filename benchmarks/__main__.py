"""`python -m benchmarks NAME …`: the signature of each function is its command line. Imports nothing heavy at the top.

Run it in a checkout, after `sh scripts/setup.sh test`.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from pd_cluster.commands.signature import given_model
from pd_cluster.errors import PdClusterError


def _run(measuring: Coroutine[Any, Any, None]) -> None:
    """Runs clients on uvloop: they use cores that the servers may share, and take a third less of them so."""
    import uvloop

    uvloop.run(measuring)


app = typer.Typer(help="Measure parts of this checkout.", no_args_is_help=True)


@app.command("serve-against")
def serve_against(
    servers: Annotated[
        str,
        typer.Argument(
            help="Asked in turn, with commas: hybrid (the decode instances compute everything), resume (streams "
            "outlive their scheduler), vllm."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(callback=given_model, help="Model folder; default: one of 125 million parameters, made for it."),
    ] = "",
    prefill: int = 1,
    decode: int = 1,
    num_requests: Annotated[int, typer.Option(min=1)] = 32,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is asked.")] = 3,
    peers_dir: Annotated[str, typer.Option(help="What scripts/setup_bench_peers.sh made; default: .venv-peers.")] = "",
    quick: Annotated[bool, typer.Option(help="A tiny model, one round: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """TTFT, TPOT and tokens/s of a cluster beside other servers, in turn on this machine."""
    from benchmarks import serve_against as turns
    from pd_cluster.bench.serve import ServeBench

    bench = ServeBench("", "", model, prefill, decode, num_requests, concurrency)
    _run(turns.run(turns.make_bench(bench, servers, rounds, peers_dir, quick), json))


@app.command("routing")
def routing(
    model: Annotated[
        str, typer.Option(callback=given_model, help="Model folder; default: one that is made for it.")
    ] = "",
    prefill: Annotated[int, typer.Option(min=1)] = 2,
    decode: Annotated[int, typer.Option(min=1)] = 2,
    policies: Annotated[
        str, typer.Option(help="To compare, with commas; NAME+host: with --host-cache.")
    ] = "least-loaded,prefix-aware",
    users: Annotated[int, typer.Option(min=1)] = 50,
    turns: Annotated[int, typer.Option(min=1, help="Of each user's conversation.")] = 4,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens that a user says in a turn.")] = 96,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 24,
    think_time: Annotated[float, typer.Option(min=0, help="Seconds between two turns of a user, on average.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each policy runs, in turn.")] = 1,
    num_blocks: Annotated[int, typer.Option(min=0, help="KV blocks on each device; 0: the default.")] = 0,
    host_cache: Annotated[float, typer.Option(min=0, help="GiB of each host cache.")] = 0.0,
    trace: Annotated[
        str, typer.Option(help="Replay this recorded trace against caches of several tiers instead; no model runs.")
    ] = "",
    device_tokens: Annotated[int, typer.Option(min=1, help="With --trace: in each instance's device.")] = 1_000_000,
    host_tokens: Annotated[int, typer.Option(min=1, help="With --trace: in each one's host memory.")] = 1_000_000,
    tier_tokens: Annotated[int, typer.Option(min=1, help="With --trace: on all disks, or shared.")] = 15_000_000,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Conversations of many users, with one routing policy after another: cache hits, TTFT, TPOT."""
    if trace:
        from benchmarks.router import tier_trace

        sizes = device_tokens, host_tokens, tier_tokens
        tier_trace.run(tier_trace.TierTrace(trace, prefill, *sizes), json)
        return
    from benchmarks.router.conversations import Conversations, run

    names = tuple(policies.split(","))
    shape = (users, turns, input_len, output_len)
    caches = num_blocks, host_cache
    _run(run(Conversations(model, prefill, decode, names, *shape, think_time, rounds, *caches), json))


@app.command("tenants")
def tenants(
    model: Annotated[
        str, typer.Option(callback=given_model, help="Model folder; default: one that is made for it.")
    ] = "",
    tenants: Annotated[int, typer.Option(min=1)] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Of each tenant.")] = 8,
    system_len: Annotated[int, typer.Option(min=1, help="Tokens of the system prompt that all have.")] = 512,
    question_len: Annotated[int, typer.Option(min=1, help="Tokens that follow it, other ones each time.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each mode runs, in turn.")] = 3,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """The cost of keeping cached prompts separate for each tenant."""
    from benchmarks.router.tenants import Tenants, run

    _run(run(Tenants(model, tenants, requests, system_len, question_len, rounds), json))


@app.command("multimodal")
def multimodal(
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of generate().")] = 1,
    encode: Annotated[
        int, typer.Option(min=0, help="Compare so many encoders with none instead, on prompts of many images.")
    ] = 0,
    quick: Annotated[bool, typer.Option(help="A tiny model, one round, no goals: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Images: how many the front reads, TTFT with them, and what streams without images pay."""
    from benchmarks.multimodal import Multimodal, run

    bench = Multimodal(1 if quick else rounds, threads, quick)
    if encode:
        from benchmarks import encoders

        _run(encoders.run(bench, encode, json))
        return
    _run(run(bench, json))


@app.command("engine")
def engine(
    peers: Annotated[
        str, typer.Option(help="Engines to compare with: generate,continuous,llama.cpp,vllm; default: all.")
    ] = "",
    workload: Annotated[str, typer.Option(help="uniform,mixed,steps,guided; default: all.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each engine runs, in turn.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 2,
    peers_dir: Annotated[str, typer.Option(help="What scripts/setup_bench_peers.sh made; default: .venv-peers.")] = "",
    full: Annotated[bool, typer.Option(help="Run the slow workload in every round, not only in the first.")] = False,
    dtype: Annotated[str, typer.Option(help="float32,bfloat16: forms to measure beside vLLM's and llama.cpp's.")] = "",
    quantization: Annotated[str, typer.Option(help="none,int8,int8_wo,int4_wo,w4a8: each with each --dtype.")] = "",
    quantize_head: Annotated[str, typer.Option(help="The same for the output layer.")] = "",
    shape: Annotated[str, typer.Option(help="Of the model with --dtype or --quantization: 125M,1B.")] = "",
    quick: Annotated[bool, typer.Option(help="A tiny model, one round, generate() only: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """The engine alone against transformers, llama.cpp and vLLM on CPU, and against what the machine can do."""
    if dtype or quantization or quantize_head or shape:
        from benchmarks.engine import bits

        setup = bits.setup_of(peers, workload, rounds, threads, peers_dir, quick)
        bits.run(bits.make_bench(dtype, quantization, quantize_head, shape, setup), json)
        return
    from benchmarks.engine.bench import make_bench, run

    run(make_bench(peers, workload, rounds, threads, peers_dir, quick, full), json)


@app.command("rows")
def rows(
    rounds: Annotated[int, typer.Option(min=1, help="Processes for each model and number of sequences.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of either kind in each.")] = 150,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny model: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Decode steps in float32 with oneDNN's products and with own ones, in turn; both have the same numbers."""
    from benchmarks.engine.rows import run

    run(rounds, steps, threads, quick, json)


@app.command("linear")
def linear(
    rounds: Annotated[int, typer.Option(min=1, help="How often each form is measured, in turn.")] = 8,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny layer: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Linear layers on CPU with weights of 16, 8 and 4 bits, against float32 and the time to read their bytes."""
    from benchmarks.engine.linear import run

    run(rounds, threads, quick, json)


@app.command("context")
def context(
    context: Annotated[int, typer.Option(min=16, help="Tokens of each sequence before the step.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="How often each pool is measured, in turn.")] = 10,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny model: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Steps at a long context on CPU, over KV pools of 16, 8 and 4 bits, against float32."""
    from benchmarks.engine.variants import context_bench, run

    run(context_bench(context, rounds, threads, quick), json)


@app.command("weights")
def weights(
    rounds: Annotated[int, typer.Option(min=1, help="How often each kind is measured, in turn.")] = 10,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny model: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Whole steps on CPU with weights of 16, 8 and 4 bits, against float32."""
    from benchmarks.engine.variants import run, weights_bench

    run(weights_bench(rounds, threads, quick), json)


@app.command("lora")
def lora(
    rounds: Annotated[int, typer.Option(min=1, help="How often each step is measured, in turn.")] = 20,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    cold: Annotated[
        bool, typer.Option(help="First requests of adapters that a cluster must read again, and what others pay.")
    ] = False,
    spread: Annotated[
        bool, typer.Option(help="How often requests find their adapter in memory, by the way they are routed.")
    ] = False,
    peers_dir: Annotated[
        str, typer.Option(help="Ask vLLM for CPU, too, which scripts/setup_bench_peers.sh FOLDER made.")
    ] = "",
    quick: Annotated[bool, typer.Option(help="A tiny model: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Decode steps on CPU with 1 to 256 LoRA adapters, against the same without, and transformers with PEFT."""
    if cold:
        from benchmarks.router.cold_adapters import ColdBench
        from benchmarks.router.cold_adapters import run as run_cold

        _run(run_cold(ColdBench(rounds, quick), json))
        return
    if spread:
        from benchmarks.router.adapter_spread import SpreadBench
        from benchmarks.router.adapter_spread import run as run_spread

        _run(run_spread(SpreadBench(rounds, quick), json))
        return
    from benchmarks.engine.lora import run

    run(rounds, threads, quick, json, peers_dir)


@app.command("kv")
def kv(
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured, in turn.")] = 5,
    transports: Annotated[str, typer.Option(help="As shm,dist,nixl; default: all but nixl.")] = "",
    sizes: Annotated[str, typer.Option(help="MiB of each transfer; default: 1,16,256.")] = "",
    streaming: Annotated[bool, typer.Option(help="Measure what streaming hides of a slow link, too.")] = True,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, one round, no goals: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """KV cache between two processes: GB/s, latency and streaming, against what the machine can do."""
    from benchmarks.kv.bench import make_bench, run

    run(make_bench(rounds, transports, sizes, streaming, quick), json)


@app.command("guided")
def guided(
    peers_dir: Annotated[str, typer.Option(help="What scripts/setup_bench_peers.sh made; default: .venv-peers.")] = "",
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Guides: compiling, masks, JSON schema features and hostile input, against xgrammar if it is there."""
    from benchmarks.guided.bench import run

    run(peers_dir, json)


@app.command("faults")
def faults(
    model: Annotated[
        str, typer.Option(callback=given_model, help="Model folder; default: the model that the project ships.")
    ] = "",
    faults: Annotated[
        str,
        typer.Option(help="Some of those that an unknown name lists, with commas; default: all."),
    ] = "",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each run, at least.")] = 1000,
    load: Annotated[float, typer.Option(help="Share of what the cluster can serve.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the requests and of when they come.")] = 0,
    kv_transport: Annotated[str, typer.Option(help="shm or dist; default: what `up` chooses.")] = "",
    quick: Annotated[bool, typer.Option(help="60 requests, two faults: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Two prefill and two decode instances that die, stand still and are restarted under load: what requests notice."""
    from benchmarks.faults.bench import make_bench, run

    _run(run(make_bench(model, faults, num_requests, load, seed, quick, kv_transport), json))


@app.command("soak")
def soak(
    model: Annotated[
        str, typer.Option(callback=given_model, help="Model folder; default: the model that the project ships.")
    ] = "",
    minutes: Annotated[float, typer.Option(help="Of load, after a quiet run.")] = 30.0,
    kv_transport: Annotated[str, typer.Option(help="shm or dist.")] = "shm",
    faults: Annotated[str, typer.Option(help="To draw from, with commas; an unknown name lists them.")] = "",
    load: Annotated[float, typer.Option(help="Share of what the cluster can serve.")] = 0.4,
    seed: Annotated[int, typer.Option(help="Of the requests, of when they come and of the faults.")] = 0,
    leave: Annotated[float, typer.Option(help="Share of requests whose clients leave within a second.")] = 0.0,
    quick: Annotated[bool, typer.Option(help="15 seconds, two faults: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Two prefill and two decode instances under steady load, with faults at random: what is lost, what grows."""
    from benchmarks.faults.soak import make_bench, run

    _run(run(make_bench(model, minutes, kv_transport, faults, load, seed, quick, leave), json))


@app.command("router")
def router(
    rounds: Annotated[int, typer.Option(min=1, help="How often the two costs are measured.")] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Streams that are open at once for the memory of one.")] = 4000,
    peers_dir: Annotated[str, typer.Option(help="What scripts/setup_bench_peers.sh made; default: .venv-peers.")] = "",
    against: Annotated[
        str,
        typer.Option(
            help="Another checkout of this project: compare a request's CPU time only, in turn. resume: streams that "
            "outlive their scheduler instead."
        ),
    ] = "",
    schedulers: Annotated[
        int, typer.Option(min=1, max=16, help="Compare so many, over the same workers, with one: CPU time only.")
    ] = 1,
    profile: Annotated[bool, typer.Option(help="Show which layers the scheduler's CPU time goes to, only.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Instead: the cost of an open dashboard.")] = False,
    quick: Annotated[bool, typer.Option(help="Few requests, one round: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """The scheduler's CPU time a token and a request, added TTFT and memory a stream, beside sglang-router's."""
    from benchmarks.router import watched
    from benchmarks.router.bench import make_bench, run

    bench = make_bench(rounds, streams, peers_dir, quick, against, profile, schedulers)
    (watched.run if dashboard else run)(bench, json)


@app.command("overload")
def overload(
    seconds: Annotated[float, typer.Option(help="Of each of six runs.")] = 60.0,
    max_queue_time: Annotated[
        float | None,
        typer.Option(min=0, help="The scheduler's flag; default: 0.8, or 0.08 for decode; 1 with a hog."),
    ] = None,
    shapes: Annotated[str, typer.Option(help="What is short: prefill,decode; default: each once.")] = "",
    seed: Annotated[int, typer.Option(help="Of the requests and of when they come.")] = 0,
    give_up: Annotated[
        str,
        typer.Option(help="Instead: 1 to 5 times the capacity, and clients that leave after so many seconds: 0,2,10."),
    ] = "",
    quick: Annotated[bool, typer.Option(help="2 s each: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Three times the capacity before made-up workers: what is served, how late, what is refused, and a hog's guest."""
    from benchmarks.router import leaving_clients
    from benchmarks.router.overload import make_bench, run

    bench = make_bench(seconds, max_queue_time, shapes, seed, quick)
    _run(leaving_clients.run(bench, leaving_clients.give_up_times(give_up), json) if give_up else run(bench, json))


@app.command("hog")
def hog(
    seconds: Annotated[float, typer.Option(help="Of each attack.")] = 20.0,
    attacks: Annotated[str, typer.Option(help="With commas; an unknown name lists them; default: all.")] = "",
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Three quiet tenants beside one that attacks in turn with guides, pictures, sequences, texts and streams."""
    from benchmarks.router.hog import make_bench, run

    _run(run(make_bench(seconds, attacks), json))


@app.command("gpu")
def gpu(
    parts: Annotated[
        str,
        typer.Option(help="Names, by commas; a wrong one lists all. Default: all. models: only makes the models."),
    ] = "",
    stage: Annotated[str, typer.Option(help="Only the parts of this stage of scripts/gpu_check.sh.")] = "",
    device: Annotated[str, typer.Option(help="cuda, or cpu with --quick.")] = "cuda",
    budget: Annotated[float, typer.Option(min=1, help="Seconds; a part that does not fit any more is not run.")] = 540,
    out: Annotated[str, typer.Option(help="Folder of the report, profiles and logs; default: gpu-report.")] = "",
    folder: Annotated[str, typer.Option(help="Where 18 GB of models can be for the time being.")] = "",
    models: Annotated[str, typer.Option(help="A folder that keeps the models; whole ones are not made again.")] = "",
    resume: Annotated[bool, typer.Option(help="Adds to the report that is in --out.")] = False,
    quick: Annotated[bool, typer.Option(help="Tiny models, no goals: does it all run?")] = False,
    table: Annotated[str, typer.Option(help="Only print this report as Markdown.")] = "",
) -> None:
    """The CUDA path: decode, prefill and handover against what the GPU can do, and against transformers."""
    from benchmarks.gpu.bench import make_bench, run, show_table

    if table:
        show_table(table)
    elif not run(make_bench(parts, device, quick, budget, out, folder, models, resume, stage)):
        raise typer.Exit(1)


@app.command("start")
def start(
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured, in turn.")] = 5,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """How soon a cluster is ready, and a killed worker again, against `import torch`; memory; what imports cost."""
    from benchmarks.start import run

    run(rounds, json)


@app.command("offline")
def offline(
    model: Annotated[
        str, typer.Option(callback=given_model, help="Model folder; default: one of 14 million random weights.")
    ] = "",
    num_requests: Annotated[int, typer.Option(min=1)] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each contender runs, in turn.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one process; prefill and decode share them.")] = 2,
    quick: Annotated[bool, typer.Option(help="16 requests, one round: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """The offline service against the engine stepped directly, and split into prefill and decode processes."""
    from benchmarks.offline.bench import make_bench, run

    run(make_bench(model, num_requests, rounds, threads, quick), json)


def main() -> None:
    """Returns exit code 0; 1 with one line on stderr; 2 for a command line that typer refuses."""
    try:
        app(prog_name="python -m benchmarks")
    except PdClusterError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
