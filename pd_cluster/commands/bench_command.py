"""`pd-cluster bench …`: the signature of each function is its command line. Imports nothing heavy at the top."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pd_cluster.commands.bench_load_command import load
from pd_cluster.commands.bench_quality_command import quality
from pd_cluster.commands.settings_flags import BriefHelp, given_model

app = typer.Typer(help="Measure the running or a fresh cluster.", no_args_is_help=True)


app.command("load", cls=BriefHelp)(load)
app.command("quality")(quality)


@app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="A running server; default: start a cluster for the measurement.")] = "",
    admin: Annotated[str, typer.Option(help="Its admin address; default: the port above the server's.")] = "",
    model: Annotated[str, typer.Option(callback=given_model, help="Model folder for a started cluster.")] = "",
    prefill: int = 1,
    decode: int = 1,
    num_requests: Annotated[int, typer.Option(min=1)] = 32,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of each request.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 64,
    routing_policy: Annotated[
        str, typer.Option(help="Routing policy of a started cluster; default: that of `up`.")
    ] = "",
    lend_cores: Annotated[str, typer.Option(help="--lend-cores of a started cluster: auto, on or off.")] = "",
    first_token: Annotated[str, typer.Option(help="--first-token of a started cluster: with-decode or at-once.")] = "",
    json: Annotated[str, typer.Option(help="Write the result to this file too.")] = "",
) -> None:
    """Measure TTFT, TPOT and tokens/s of a running cluster, or of a cluster started for the measurement."""
    import uvloop

    from pd_cluster.bench.serve_bench import ServeBench, run

    shape = (num_requests, concurrency, input_len, output_len)
    bench = ServeBench(url, admin, model, prefill, decode, *shape, routing_policy, lend_cores, first_token)
    uvloop.run(run(bench, json))  # the client may share the servers' cores, and uvloop uses a third less of them


@app.command("compare")
def compare(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="TOML or JSON: a load, goals, rounds and servers.")],
    guidellm: Annotated[
        str, typer.Option(help="The guidellm executable; default: next to this Python, or on PATH.")
    ] = "",
    picture: Annotated[str, typer.Option(help="Draw the runs into this .png or .svg file; needs matplotlib.")] = "",
    json: Annotated[str, typer.Option(help="Write the figures, ratios and runs to this file too.")] = "",
) -> None:
    """Compare servers under one load, in turn: hybrid, split, other settings, vLLM, running servers."""
    import uvloop

    from pd_cluster.bench.compare.comparison_file import read_spec
    from pd_cluster.bench.compare.comparison_run import run_comparison
    from pd_cluster.bench.compare.comparison_table import show, write_json
    from pd_cluster.bench.compare.guidellm_load import GuidellmLoad
    from pd_cluster.commands.compare_chart import write_comparison
    from pd_cluster.commands.load_chart import check_picture
    from pd_cluster.result_tables import check_writable

    check_writable(json)
    check_picture(picture)
    comparison = read_spec(spec)
    client = GuidellmLoad.find(guidellm, comparison.client_processes)
    runs, slo = uvloop.run(run_comparison(comparison, spec, client))
    show(comparison, runs, slo, dict(os.environ))
    command = f"pd-cluster bench compare {spec}"
    if json:
        write_json(comparison, runs, slo, command, json)
    if picture:
        write_comparison(runs, command, comparison.level_name, picture)
