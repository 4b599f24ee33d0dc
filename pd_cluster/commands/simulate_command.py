"""`pd-cluster simulate`. Imports nothing heavy at the top."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pd_cluster.commands.bench_load_command import asked_arrivals, changed_flags
from pd_cluster.commands.load_options import takes_load


@takes_load
def simulate(
    layout: Annotated[str, typer.Option(help="Such as 2P1D, or 1H (hybrid).")],
    costs: Annotated[str, typer.Option(metavar="FILE", help="Costs of `pd-cluster profile`.")],
    routing_policy: Annotated[str, typer.Option(help="Routing policy, as in `up`.")] = "prefix-aware",
    auto_role: Annotated[str, typer.Option(help="Role changes: cost or rules.")] = "",
    prefix_pull: Annotated[bool, typer.Option("--prefix-pull", help="As in `up`.")] = False,
    script: Annotated[str, typer.Option(metavar="FILE", help="Deaths, joins, drains and more: JSON lines.")] = "",
    one_host: Annotated[bool, typer.Option("--one-host", help="All instances share one host's cores.")] = False,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Default: as in the costs.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Default: as in the costs.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks per instance; default: as in the costs.")
    ] = None,
    **given: Any,
) -> None:
    """Serve a trace or a workload with a simulated cluster: the real scheduler and engines, with simulated time.

    Needs no devices; the report is that of `pd-cluster bench load`.
    """
    own = locals()
    _run(own | own.pop("given"))


def _run(given: dict[str, Any]) -> None:
    """Makes all checks before anything is computed. Raises ConfigError."""
    from pd_cluster.bench.load_report import LoadRun, show, write_json
    from pd_cluster.bench.outcomes import Slo
    from pd_cluster.commands.load_chart import check_picture, write_picture
    from pd_cluster.costs.cost_files import read_costs
    from pd_cluster.result_tables import check_writable, progress
    from pd_cluster.simulate.event_script import read_script
    from pd_cluster.simulate.simulated_layout import layout_of

    check_writable(given["json"])
    check_picture(given["picture"])
    layout = layout_of(
        given["layout"],
        (given["max_num_batched_tokens"], given["max_num_seqs"], given["num_blocks"]),
        routing_policy=given["routing_policy"],
        auto_role=given["auto_role"],
        are_neighbours=given["one_host"],
        pulls_prefixes=given["prefix_pull"],
    )
    costs = read_costs(given["costs"])
    script = read_script(given["script"]) if given["script"] else []
    title, arrivals = asked_arrivals(given)
    from pd_cluster.simulate.simulation import silent
    from pd_cluster.simulate.simulation import simulate as compute

    with silent(), progress("simulated", len(arrivals)) as ended:
        found = compute(layout, costs, arrivals, script, ended)
    slo = Slo(ttft_s=given["slo_ttft"], tpot_s=given["slo_tpot"], e2e_s=given["slo_e2e"])
    title = f"{given['layout']}, simulated: {title}; {costs.model} on {costs.device}"
    run = LoadRun(title, found.duration_s, found.outcomes, found.samples, slo, found.gaps, found.events)
    asked = {name: value for name, value in given.items() if name not in ("json", "picture", "help_all")}
    command = "pd-cluster simulate " + " ".join(changed_flags(asked, simulate))
    show(run, command)
    for at_s, what in run.events:
        typer.echo(f"{at_s:10.2f} s  {what}")
    if given["json"]:
        write_json(run, command, given["json"])
    if given["picture"]:
        write_picture(run, given["picture"])
