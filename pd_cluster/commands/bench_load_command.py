"""`pd-cluster bench load`: its signature, and the load that its flags describe. Imports nothing heavy at the top."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_cluster.commands import load_options as opt
from pd_cluster.commands.instances_command import ADMIN, TOKEN_FILE
from pd_cluster.commands.settings_flags import HELP_ALL, given_model

if TYPE_CHECKING:
    from pd_cluster.bench.load.scenario_file import LoadRow
    from pd_cluster.bench.request_arrivals import Arrival
    from pd_cluster.bench.workloads import Workload

LENGTHS = ("input_len", "sigma", "num_prefixes", "prefix_share", "num_turns", "pause", "num_requests", "workload")
TRACE = ("trace_limit", "trace_lengths", "trace_time", "trace_repeat")


def load(
    url: Annotated[str, typer.Option(help="A running server; default: start a cluster for the measurement.")] = "",
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    model: Annotated[str, typer.Option(callback=given_model, help="Model folder for a started cluster.")] = "",
    prefill: int = 1,
    decode: int = 1,
    workload: opt.WorkloadName = "fixed",
    trace: opt.TraceFile = "",
    prompts: Annotated[
        str, typer.Option(help='Send the prompts of this file: lines of {"prompt": …} or {"messages": …}.')
    ] = "",
    num_requests: opt.NumRequests = 100,
    rate: opt.Rate = 1.0,
    arrivals: opt.Arrivals = "poisson",
    input_len: opt.InputLen = 512,
    output_len: opt.OutputLen = 128,
    sigma: opt.Sigma = 0.6,
    num_prefixes: opt.NumPrefixes = 4,
    prefix_share: opt.PrefixShare = 0.5,
    num_turns: opt.NumTurns = 4,
    pause: opt.Pause = 5.0,
    seed: opt.Seed = 0,
    trace_limit: opt.TraceLimit = None,
    trace_lengths: opt.TraceLengths = 1.0,
    trace_time: opt.TraceTime = 1.0,
    trace_repeat: opt.TraceRepeat = 1,
    profile: Annotated[
        str,
        typer.Option(help="A guidellm profile, which sets the arrival times: kind=sweep,sweep_size=5.", hidden=True),
    ] = "",
    max_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds after which each guidellm run ends; 0: no limit.", hidden=True)
    ] = 0.0,
    slo_ttft: opt.SloTtft = 0.0,
    slo_tpot: opt.SloTpot = 0.0,
    slo_e2e: opt.SloE2e = 0.0,
    guidellm: Annotated[
        str, typer.Option(help="The guidellm executable; default: next to this Python, or on PATH.")
    ] = "",
    client_processes: Annotated[
        int, typer.Option(min=1, max=64, help="Processes of guidellm that send requests.", hidden=True)
    ] = 1,
    flags: Annotated[str, typer.Option(help="Flags of `serve` for a started cluster, as in a shell.")] = "",
    folder: Annotated[
        str, typer.Option(help="Keep guidellm's scenario, data, report and HTML here.", hidden=True)
    ] = "",
    picture: opt.Picture = "",
    json: opt.ReportFile = "",
    help_all: Annotated[bool, HELP_ALL] = False,
) -> None:
    """Send an open-loop load by guidellm: goodput, percentiles, requests in prefill, handover and decode, KV pools."""
    _run(locals())


def _run(given: dict[str, Any]) -> None:
    """Makes all checks before anything starts. Raises PdClusterError."""
    import shlex

    import uvloop

    from pd_cluster.bench.load.guidellm_process import Guidellm
    from pd_cluster.bench.load.load_bench import LoadPlan, addresses_of, folder_for, run_against, run_alone
    from pd_cluster.bench.outcomes import Slo
    from pd_cluster.cluster.processes.launch_settings import Launch
    from pd_cluster.cluster.processes.port_reservations import free_port_pair
    from pd_cluster.commands.load_chart import check_picture
    from pd_cluster.result_tables import check_writable

    _refuse_unused(given)
    check_writable(given["json"])
    check_picture(given["picture"])
    server = None
    if given["url"]:
        server = addresses_of(given["url"], given["admin"], given["admin_token_file"], os.environ)
    title, rows = _asked(given)
    with folder_for(given["folder"]) as folder:
        plan = LoadPlan(
            title=title,
            rows=rows,
            guidellm=Guidellm.find(given["guidellm"]),
            folder=folder,
            slo=Slo(ttft_s=given["slo_ttft"], tpot_s=given["slo_tpot"], e2e_s=given["slo_e2e"]),
            profile=given["profile"],
            max_s=given["max_seconds"],
            num_processes=given["client_processes"],
        )
        plan.check()
        if server is not None:
            runs = uvloop.run(run_against(plan, *server))
        else:
            launch = Launch(
                model=given["model"],
                num_prefill=given["prefill"],
                num_decode=given["decode"],
                port=free_port_pair(),
                arguments=shlex.split(given["flags"]),
                restart="no",  # figures of a cluster that has lost an instance would be wrong
            )
            runs = uvloop.run(run_alone(plan, launch))
    _show(runs, given)


def _asked(given: dict[str, Any]) -> tuple[str, list[LoadRow]]:
    """Returns a title and the requests. Raises ConfigError."""
    import random

    from pd_cluster.bench.load.scenario_file import LoadRow, rows_of
    from pd_cluster.bench.prompt_lines import read_prompts
    from pd_cluster.bench.workloads import times_of
    from pd_cluster.errors import ConfigError

    if given["trace"] and given["prompts"]:
        raise ConfigError("--trace and --prompts: give one of them")
    if not given["prompts"]:
        title, arrivals = asked_arrivals(given)
        return title, list(rows_of(arrivals))
    workload = _workload(given)
    lines = read_prompts(given["prompts"])
    times = times_of(workload.rate_per_s, workload.process, random.Random(workload.seed))
    rows = [
        LoadRow(at_s, line.body, None, line.output_tokens or workload.num_output_tokens)
        for line, at_s in zip(lines, times, strict=False)  # the times are endless
    ]
    return f"{len(rows)} requests of {os.path.basename(given['prompts'])}, {workload.rate_per_s:g}/s", rows


def asked_arrivals(given: dict[str, Any]) -> tuple[str, list[Arrival]]:
    """Returns a title and the requests of a trace or a workload, from flags by their names. Raises ConfigError."""
    from pd_cluster.bench.trace_files import TraceScale, read_trace
    from pd_cluster.bench.workloads import arrivals_of

    if given["trace"]:
        scale = TraceScale(
            limit=given["trace_limit"],
            lengths=given["trace_lengths"],
            repeat=given["trace_repeat"],
            time=given["trace_time"],
        )
        found = read_trace(given["trace"], scale)
        return f"{len(found)} requests of {os.path.basename(given['trace'])}", found
    workload = _workload(given)
    made = arrivals_of(workload)
    return f"{len(made)} requests of {workload.name}, {workload.rate_per_s:g}/s", made


def _workload(given: dict[str, Any]) -> Workload:
    from pd_cluster.bench.workloads import Workload

    workload = Workload(
        name=given["workload"],
        num_requests=given["num_requests"],
        rate_per_s=given["rate"],
        process=given["arrivals"],
        num_prompt_tokens=given["input_len"],
        num_output_tokens=given["output_len"],
        sigma=given["sigma"],
        num_prefixes=given["num_prefixes"],
        prefix_share=given["prefix_share"],
        num_turns=given["num_turns"],
        pause_s=given["pause"],
        seed=given["seed"],
    )
    workload.check()
    return workload


def _show(runs: list[Any], given: dict[str, Any]) -> None:
    """Prints, writes and draws the reports; the files of several runs are numbered in order."""
    from pathlib import Path

    from pd_cluster.bench.load_report import show, write_json
    from pd_cluster.commands.load_chart import write_picture

    command = "pd-cluster bench load " + " ".join(changed_flags(given, load))
    for number, run in enumerate(runs, 1):
        show(run, command)
        for name, write in (("json", write_json), ("picture", None)):
            if not given[name]:
                continue
            path = Path(given[name])
            file = str(path if len(runs) == 1 else path.with_stem(f"{path.stem}-{number}"))
            if write is None:
                write_picture(run, file)
            else:
                write(run, command, file)


def _refuse_unused(given: dict[str, Any]) -> None:
    """Raises ConfigError for a flag that another flag leaves without effect, and for an invalid number of seconds."""
    from pd_cluster.errors import ConfigError, flag_of

    for name in ("slo_ttft", "slo_tpot", "slo_e2e", "max_seconds"):
        if not math.isfinite(given[name]):
            raise ConfigError(f"{flag_of(name)} {given[name]}: expected seconds, 0 for none")
    unused = [
        ("--url", given["url"], ("model", "prefill", "decode", "flags")),
        ("--trace", given["trace"], (*LENGTHS, "output_len", "rate", "arrivals", "seed")),
        ("--prompts", given["prompts"], LENGTHS),
        ("a cluster that is started", not given["url"], ("admin", "admin_token_file")),
        ("no --trace", not given["trace"], TRACE),
    ]
    changed = {flag.partition("=")[0] for flag in changed_flags(given, load)}
    for reason, is_given, names in unused:
        if is_given and (found := [flag_of(name) for name in names if flag_of(name) in changed]):
            raise ConfigError(f"{', '.join(found)}: of no use with {reason}; leave it out")


def changed_flags(given: dict[str, Any], command: Callable[..., None]) -> list[str]:
    """Returns the flags that differ from the command's defaults, so that its report can be reproduced."""
    import inspect

    defaults = {name: each.default for name, each in inspect.signature(command).parameters.items()}
    flags = {name: value for name, value in given.items() if value != defaults[name]}
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
