"""Those of `pd-cluster bench …` that compute steps in processes of their own, without a cluster."""

from __future__ import annotations

from typing import Annotated

import typer


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
        from pd_cluster.lab.engine import bits

        setup = bits.setup_of(peers, workload, rounds, threads, peers_dir, quick)
        bits.run(bits.make_bench(dtype, quantization, quantize_head, shape, setup), json)
        return
    from pd_cluster.lab.engine.bench import make_bench, run

    run(make_bench(peers, workload, rounds, threads, peers_dir, quick, full), json)


def rows(
    rounds: Annotated[int, typer.Option(min=1, help="Processes for each model and number of sequences.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of either kind in each.")] = 150,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny model: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Decode steps in float32 with oneDNN's products and with own ones, in turn; both have the same numbers."""
    from pd_cluster.lab.engine.rows import run

    run(rounds, steps, threads, quick, json)


def linear(
    rounds: Annotated[int, typer.Option(min=1, help="How often each form is measured, in turn.")] = 8,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny layer: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Linear layers on CPU with weights of 16, 8 and 4 bits, against float32 and the time to read their bytes."""
    from pd_cluster.lab.engine.linear import run

    run(rounds, threads, quick, json)


def context(
    context: Annotated[int, typer.Option(min=16, help="Tokens of each sequence before the step.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="How often each pool is measured, in turn.")] = 10,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny model: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Steps at a long context on CPU, over KV pools of 16, 8 and 4 bits, against float32."""
    from pd_cluster.lab.engine.variants import context_bench, run

    run(context_bench(context, rounds, threads, quick), json)


def weights(
    rounds: Annotated[int, typer.Option(min=1, help="How often each kind is measured, in turn.")] = 10,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    quick: Annotated[bool, typer.Option(help="A tiny model: does it all run?")] = False,
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Whole steps on CPU with weights of 16, 8 and 4 bits, against float32."""
    from pd_cluster.lab.engine.variants import run, weights_bench

    run(weights_bench(rounds, threads, quick), json)
