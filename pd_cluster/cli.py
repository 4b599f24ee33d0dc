"""`pd-cluster`: the signature of each function is its command line.

Imports nothing heavy at the top: `--help` and errors come at once, torch only in rank processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Annotated

import typer

from pd_cluster import __version__
from pd_cluster.errors import PdClusterError
from pd_cluster.instances import DEFAULT_ADMIN, SECRET_FILE, TOKEN_FILE
from pd_cluster.instances import app as instances_app

app = typer.Typer(
    name="pd-cluster",
    help="Disaggregated prefill/decode serving for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure the running or a fresh cluster.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(instances_app, name="instances")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model folder; default: the model that the project ships.")] = "",
    host: Annotated[str, typer.Option(help="Address to bind HTTP to.")] = "0.0.0.0",
    port: Annotated[
        int, typer.Option(help="HTTP port: the public one on the scheduler, one of NODE_PORTS else.")
    ] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="What clients call the model.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Devices that share the model; default: as many as the rank table gives.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and output together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in one step; prompts are chunked.")] = 2048,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16; auto is float32 on CPU.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens in a KV cache block.")] = 16,
    seed: Annotated[int | None, typer.Option(help="Draw the seeds of requests without one from this.")] = None,
    max_logprobs: Annotated[int, typer.Option(help="Most logprobs that a request may ask for.")] = 20,
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    num_blocks: Annotated[
        int | None, typer.Option("--num-blocks", "--num-gpu-blocks-override", help="Blocks in the KV pool.")
    ] = None,
    kv_cache_memory: Annotated[float | None, typer.Option(help="GiB for the KV pool.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the free memory for the KV pool, if the two above do not say.")
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Keep KV blocks of ended requests for others.")] = True,
    preemption_mode: Annotated[str, typer.Option(help="recompute or swap: when the KV pool is full.")] = "recompute",
    swap_space: Annotated[float, typer.Option(help="GiB of host memory to swap to.")] = 4.0,
    growth_tokens: Annotated[int, typer.Option(help="Output tokens that decode reserves room for.")] = 128,
    kv_transport: Annotated[str, typer.Option(help="auto, shm (same host) or dist (torch.distributed).")] = "auto",
    kv_port_range: Annotated[str, typer.Option(help="FIRST-LAST for the control socket; default: any.")] = "",
    kv_checksum: Annotated[bool, typer.Option(help="Check every KV payload.")] = True,
    kv_hmac: Annotated[bool, typer.Option(help="Authenticate every KV header.")] = True,
    kv_wire_dtype: Annotated[str, typer.Option(help="auto, or int8: smaller, inexact KV between hosts.")] = "auto",
    kv_rate_limit: Annotated[float, typer.Option(help="MB/s of KV over each link; 0: no limit.")] = 0.0,
    link_keepalive: Annotated[float, typer.Option(help="Seconds after which an idle link is probed.")] = 30.0,
    secret_file: Annotated[str | None, typer.Option(help="The cluster's secret; default: from the table.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Scheduler's admin port; default: port + 1.")] = None,
    admin_host: Annotated[str, typer.Option(help="Address to bind the admin port to.")] = "127.0.0.1",
    admin_token_file: Annotated[
        str | None, typer.Option(help="Scheduler's admin token (mode 0600); default: derived from the secret.")
    ] = None,
    auto_role: Annotated[
        bool, typer.Option("--auto-role", help="Scheduler: instances change between prefill and decode as load asks.")
    ] = False,
    heartbeat_interval: Annotated[float, typer.Option(help="Seconds between heartbeats.")] = 0.5,
    dead_after: Annotated[float, typer.Option(help="Seconds of silence after which a peer is dead.")] = 3.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to open a connection or a link.")] = 5.0,
    credit_timeout: Annotated[float, typer.Option(help="Seconds for an idle decode instance to take an offer.")] = 10.0,
    transfer_timeout: Annotated[float, typer.Option(help="Seconds that a KV transfer may stand still.")] = 30.0,
    collective_timeout: Annotated[float, typer.Option(help="Seconds that a rank waits for another.")] = 60.0,
    request_timeout: Annotated[float, typer.Option(help="Seconds for a whole request; 0: none.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests after SIGTERM.")] = 30.0,
    max_attempts: Annotated[
        int, typer.Option(help="Times that a request goes on elsewhere when its instance or link is lost.")
    ] = 6,
    replay_wait: Annotated[float, typer.Option(help="Seconds that such a request waits for an instance.")] = 30.0,
    guided_decoding_backend: Annotated[
        str, typer.Option(help="auto, guidance or llguidance: names of the one library that is used.")
    ] = "auto",
    guided_timeout: Annotated[float, typer.Option(help="Seconds to try a request's schema, regex or grammar.")] = 5.0,
    api_workers: Annotated[int, typer.Option(help="Scheduler's processes that serve the public port.")] = 1,
    routing_policy: Annotated[
        str, typer.Option(help="least-loaded, prefix-aware, predicted-ttft or session: which workers get a request.")
    ] = "prefix-aware",
    scheduling_policy: Annotated[
        str, typer.Option(help="fcfs, or priority: requests may have one, lower numbers come first.")
    ] = "fcfs",
    slo_ttft: Annotated[float, typer.Option(help="Seconds to the first token, else 429; 0: no promise.")] = 0.0,
    slo_tpot: Annotated[float, typer.Option(help="Seconds for each further token, else 429; 0: no promise.")] = 0.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "INFO",
) -> None:
    """Run one instance; its role comes from the rank tables that the environment names.

    Reads GLOBAL_RANK_TABLE_FILE_PATH, RANK_TABLE_FILE_PATH; of the scheduler NODE_PORTS, NODE_PORTS_FILE, USE_OPENAI.
    Any instance takes every flag, so that one command line serves all roles. vLLM's other flags: docs/flags.md.
    """
    from pd_cluster.serve import ServeOptions, run

    options = {name: value for name, value in context.params.items() if name != "context"}
    run(ServeOptions(**options), _warn_extras(context), os.environ)


@app.command()
def up(
    model: Annotated[str, typer.Option(help="Model folder; default: the model that the project ships.")] = "",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the public port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Public port; the admin port is the next one.")] = 9000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="What clients call the model.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Rank processes of each instance.")] = 1,
    prefill_tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Of each prefill instance, when it is another number.")
    ] = None,
    decode_tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Of each decode instance.")] = None,
    restart: Annotated[str, typer.Option(help="on-failure or no: what becomes of a worker that dies.")] = "on-failure",
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: flags for every instance.")] = None,
) -> None:
    """Run a whole cluster on this machine: rank tables, workers and scheduler, until Ctrl-C."""
    from pd_cluster.cluster.launcher import Launch, run_until_signal

    launch = Launch(
        model=model,
        num_prefill=prefill,
        num_decode=decode,
        host=host,
        port=port,
        served_model_names=served_model_name or [],
        tp_sizes={f"prefill-{i}": prefill_tensor_parallel_size or tensor_parallel_size for i in range(prefill)}
        | {f"decode-{i}": decode_tensor_parallel_size or tensor_parallel_size for i in range(decode)},
        restart=restart,
        arguments=arguments or [],
    )
    raise typer.Exit(asyncio.run(run_until_signal(launch)))


@app.command()
def trace(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="As its answer names it (cmpl-…, chatcmpl-…); default: list the last.")
    ] = "",
    admin: Annotated[str, typer.Option(help="The scheduler's admin address.")] = DEFAULT_ADMIN,
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, SECRET_FILE] = "",
    png: Annotated[str, typer.Option(help="Draw the timeline into this file too; needs matplotlib.")] = "",
    json: Annotated[str, typer.Option(help="Write what is shown to this file too.")] = "",
) -> None:
    """Show what became of a request: when it was queued, computed, handed over and decoded."""
    from pd_cluster.admin import Admin
    from pd_cluster.trace.command import run

    run(request_id, Admin(admin, admin_token_file, secret_file, os.environ), png, json)


@app.command()
def check() -> None:
    """Check the rank tables and variables of this environment, and show every deadline with its flag."""
    from pd_cluster.check import run

    run(os.environ)


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="A running server; default: start a cluster for the measurement.")] = "",
    admin: Annotated[str, typer.Option(help="Its admin address; default: the port above the server's.")] = "",
    model: Annotated[str, typer.Option(help="Model folder for a cluster that is started.")] = "",
    prefill: int = 1,
    decode: int = 1,
    num_requests: Annotated[int, typer.Option(min=1)] = 32,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of each request.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 64,
    routing_policy: Annotated[str, typer.Option(help="Of a cluster that is started; default: its own.")] = "",
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """TTFT, TPOT and tokens/s of a running cluster, or of one that is started for it."""
    from pd_cluster.bench.serve import ServeBench, run

    asyncio.run(
        run(
            ServeBench(
                url, admin, model, prefill, decode, num_requests, concurrency, input_len, output_len, routing_policy
            ),
            json,
        )
    )


@bench.command("routing")
def bench_routing(
    model: Annotated[str, typer.Option(help="Model folder; default: one that is made for it.")] = "",
    prefill: Annotated[int, typer.Option(min=1)] = 2,
    decode: Annotated[int, typer.Option(min=1)] = 2,
    policies: Annotated[str, typer.Option(help="To compare, with commas.")] = "least-loaded,prefix-aware",
    users: Annotated[int, typer.Option(min=1)] = 50,
    turns: Annotated[int, typer.Option(min=1, help="Of each user's conversation.")] = 4,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens that a user says in a turn.")] = 96,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 24,
    think_time: Annotated[float, typer.Option(min=0, help="Seconds between two turns of a user, on average.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each policy runs, in turn.")] = 1,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Conversations of many users, with one routing policy after another: cache hits, TTFT, TPOT."""
    from pd_cluster.bench.conversations import Conversations, run

    names = tuple(policies.split(","))
    shape = (users, turns, input_len, output_len)
    asyncio.run(run(Conversations(model, prefill, decode, names, *shape, think_time, rounds), json))


@bench.command("engine")
def bench_engine(
    peers: Annotated[
        str, typer.Option(help="Engines to compare with: generate,continuous,llama.cpp,vllm; default: all.")
    ] = "",
    workload: Annotated[str, typer.Option(help="uniform,mixed,steps,guided; default: all.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each engine runs, in turn.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 2,
    peers_dir: Annotated[str, typer.Option(help="What scripts/setup_bench_peers.sh made; default: .venv-peers.")] = "",
    full: Annotated[bool, typer.Option(help="Run the slow workload in every round, not only in the first.")] = False,
    quick: Annotated[bool, typer.Option(help="A tiny model, one round, generate() only: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """The engine alone against transformers, llama.cpp and vLLM on CPU, and against what the machine can do."""
    from pd_cluster.bench.engine import make_bench, run

    run(make_bench(peers, workload, rounds, threads, peers_dir, quick, full), json)


@bench.command("kv")
def bench_kv(
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured, in turn.")] = 5,
    transports: Annotated[str, typer.Option(help="shm,dist; default: both.")] = "",
    sizes: Annotated[str, typer.Option(help="MiB of each transfer; default: 1,16,256.")] = "",
    streaming: Annotated[bool, typer.Option(help="Measure what streaming hides of a slow link, too.")] = True,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, one round, no goals: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """KV cache between two processes: GB/s, latency and streaming, against what the machine can do."""
    from pd_cluster.bench.kv import make_bench, run

    run(make_bench(rounds, transports, sizes, streaming, quick), json)


@bench.command("guided")
def bench_guided(
    peers_dir: Annotated[str, typer.Option(help="What scripts/setup_bench_peers.sh made; default: .venv-peers.")] = "",
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Guides: compiling, masks, JSON schema features and hostile input, against xgrammar if it is there."""
    from pd_cluster.bench.guided import run

    run(peers_dir, json)


@bench.command("faults")
def bench_faults(
    model: Annotated[str, typer.Option(help="Model folder; default: the model that the project ships.")] = "",
    faults: Annotated[
        str,
        typer.Option(
            help="kill-prefill,kill-decode,kill-both,stall-decode,stall-prefill,rolling,kill-scheduler,"
            "stall-scheduler; default: all."
        ),
    ] = "",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each run, at least.")] = 1000,
    load: Annotated[float, typer.Option(help="Share of what the cluster can serve.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the requests and of when they come.")] = 0,
    quick: Annotated[bool, typer.Option(help="60 requests, two faults: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Two prefill and two decode instances that die, stand still and are restarted under load: what requests notice."""
    from pd_cluster.bench.faults import make_bench, run

    asyncio.run(run(make_bench(model, faults, num_requests, load, seed, quick), json))


@bench.command("router")
def bench_router(
    rounds: Annotated[int, typer.Option(min=1, help="How often the two costs are measured.")] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Streams that are open at once for the memory of one.")] = 4000,
    peers_dir: Annotated[str, typer.Option(help="What scripts/setup_bench_peers.sh made; default: .venv-peers.")] = "",
    quick: Annotated[bool, typer.Option(help="Few requests, one round: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """The scheduler's CPU time a token and a request, added TTFT and memory a stream, beside sglang-router's."""
    from pd_cluster.bench.router import make_bench, run

    run(make_bench(rounds, streams, peers_dir, quick), json)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _warn_extras(context: typer.Context) -> list[str]:
    from pd_cluster.flags import judge

    honoured = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    return judge(context.args, honoured)


def main() -> None:
    """Exit code 0; 1 with one line on stderr; 2 for a command line that typer refuses."""
    from pd_cluster.flags import normalize

    logging.captureWarnings(True)
    argv = sys.argv[1:]
    if argv[:1] == ["serve"]:
        argv = normalize(argv)
    try:
        app(args=argv, prog_name="pd-cluster", auto_envvar_prefix="PD_CLUSTER")
    except PdClusterError as error:
        print(f"pd-cluster: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
