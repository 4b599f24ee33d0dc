"""`pd-cluster simulate`. Imports nothing heavy at the top."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.errors import ConfigError

if TYPE_CHECKING:
    from pd_cluster.bench.arrivals import Arrival
    from pd_cluster.bench.report import LoadRun
    from pd_cluster.costs.costs import Costs
    from pd_cluster.simulate.scenario import SimulatedLayout
    from pd_cluster.simulate.script import ScriptLine

Factor = Annotated[float, typer.Option(min=1e-6, max=1e6, help="Times between the trace's requests, times this.")]


def simulate(
    layout: Annotated[str, typer.Option(help="Numbers of instances: 2P1D, or 1H for instances that do both.")],
    costs: Annotated[str, typer.Option(metavar="FILE", help="Of pd-cluster profile.")],
    trace: Annotated[str, typer.Option(metavar="FILE", help="Requests in Mooncake's format.")] = "",
    workload: Annotated[
        str, typer.Option(help="In place of a trace: fixed, log-normal, shared-prefix, conversation or tool-agent.")
    ] = "",
    rate: Annotated[float, typer.Option(help="Of a workload: requests a second.")] = 1.0,
    num_requests: Annotated[int | None, typer.Option(min=1, help="The first of a trace, or of a workload.")] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Of a workload: mean prompt tokens.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Of a workload: mean output tokens.")] = 128,
    time_scale: Factor = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="The trace so often, each time with other contents.")] = 1,
    slo_ttft: Annotated[float, typer.Option(min=0, help="Goal for goodput: seconds to the first token.")] = 0.0,
    slo_tpot: Annotated[float, typer.Option(min=0, help="Likewise: seconds for each further token.")] = 0.0,
    slo_e2e: Annotated[float, typer.Option(min=0, help="Likewise: seconds for all.")] = 0.0,
    routing_policy: Annotated[str, typer.Option(help="As `up` has it.")] = "prefix-aware",
    auto_role: Annotated[str, typer.Option(help="cost or rules: instances change their roles.")] = "",
    script: Annotated[str, typer.Option(metavar="FILE", help="Deaths, joins, drains and more: JSON lines.")] = "",
    one_host: Annotated[bool, typer.Option("--one-host", help="All instances share one host's cores.")] = False,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Default: that of the costs.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Default: that of the costs.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Of an instance; default: that of the costs.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of a workload's lengths and times.")] = 0,
    json: Annotated[str, typer.Option(metavar="FILE", help="Write the result to this file too.")] = "",
    picture: Annotated[
        str, typer.Option(metavar="FILE", help="Draw it into this .png or .svg; needs matplotlib.")
    ] = "",
) -> None:
    """Serve a trace or a workload by a simulated cluster: the real scheduler and engines, with costs for time.

    The same report as `pd-cluster bench load`, in seconds and without devices.
    """
    from pd_cluster.bench.outcomes import Slo
    from pd_cluster.commands.load_picture import check_picture
    from pd_cluster.costs.files import read_costs
    from pd_cluster.simulate.scenario import layout_of
    from pd_cluster.simulate.script import read_script
    from pd_cluster.tables import check_writable

    check_writable(json)
    check_picture(picture)
    sizes = (max_num_batched_tokens, max_num_seqs, num_blocks)
    wanted = layout_of(layout, sizes, routing_policy=routing_policy, auto_role=auto_role, are_neighbours=one_host)
    known, events = read_costs(costs), read_script(script) if script else []
    if bool(trace) == bool(workload):
        raise ConfigError("--trace FILE or --workload NAME: give one of the two")
    if trace:
        arrivals, asked = _of_trace(trace, num_requests, repeat, time_scale), f"--trace {trace}"
    else:
        arrivals = _of_workload(workload, num_requests or 100, rate, (input_len, output_len), seed)
        asked = f"--workload {workload} --rate {rate:g} --seed {seed}"
    run = _run(wanted, known, arrivals, seed, events)
    run.title = f"{layout}, simulated, {trace or workload}, {known.model} on {known.device}"
    run.slo = Slo(ttft_s=slo_ttft, tpot_s=slo_tpot, e2e_s=slo_e2e)
    _show(run, f"pd-cluster simulate --layout {layout} --costs {costs} {asked}", json, picture)


def _run(
    layout: SimulatedLayout, costs: Costs, arrivals: list[Arrival], seed: int, events: list[ScriptLine]
) -> LoadRun:
    from pd_cluster.bench.report import LoadRun
    from pd_cluster.simulate.simulate import simulate as run
    from pd_cluster.tables import progress

    logging.disable(logging.ERROR)  # what processes would say that do not exist; the report has the events
    with progress("simulated", len(arrivals)) as ended:
        found = run(layout, costs, arrivals, seed, events, ended)
    return LoadRun("", found.duration_s, found.outcomes, found.samples, gaps=found.gaps, events=found.events)


def _show(run: LoadRun, command: str, json: str, picture: str) -> None:
    from pd_cluster.bench.report import show, write_json
    from pd_cluster.commands.load_picture import write_picture

    show(run, command)
    for at_s, what in run.events:
        typer.echo(f"{at_s:10.2f} s  {what}")
    if json:
        write_json(run, command, json)
    if picture:
        write_picture(run, picture)


def _of_trace(file: str, limit: int | None, repeat: int, time: float) -> list[Arrival]:
    from pd_cluster.bench.trace_files import TraceScale, read_trace

    return read_trace(file, TraceScale(limit=limit, repeat=repeat, time=time))


def _of_workload(name: str, num_requests: int, rate: float, means: tuple[int, int], seed: int) -> list[Arrival]:
    import msgspec

    from pd_cluster.bench.workloads import Workload, arrivals_of

    asked = {"name": name, "num_requests": num_requests, "rate_per_s": rate, "seed": seed}
    asked |= {"num_prompt_tokens": means[0], "num_output_tokens": means[1]}
    try:
        return arrivals_of(msgspec.convert(asked, Workload))
    except msgspec.ValidationError as error:
        raise ConfigError(f"--workload {name}: {error}") from None
