"""`pd-cluster plan`: its signature, and its input files. Imports nothing heavy at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.commands.settings_flags import given_model
from pd_cluster.errors import ConfigError

if TYPE_CHECKING:
    from pd_cluster.bench.request_arrivals import Arrival
    from pd_cluster.plan.cost_sources import CostSource

USUAL_REQUESTS = 600


def plan(
    trace: Annotated[str, typer.Option(metavar="FILE", help="The load, in Mooncake's format.")],
    devices: Annotated[int, typer.Option(min=1, max=1024, help="Maximum number of devices to use.")],
    model: Annotated[
        str, typer.Option(callback=given_model, help="Folder or hub name; its config.json is enough. Default: shipped.")
    ] = "",
    slo_ttft: Annotated[float, typer.Option(help="Goal for the first token, in seconds; 0: none.")] = 0.0,
    slo_tpot: Annotated[float, typer.Option(help="Goal for each further token, in seconds; 0: none.")] = 0.0,
    slo_e2e: Annotated[float, typer.Option(help="Goal for the whole answer, in seconds; 0: none.")] = 0.0,
    slo_share: Annotated[float, typer.Option(help="Share of the requests that must meet the goals.")] = 0.9,
    costs: Annotated[str, typer.Option(metavar="FILE", help="Measured costs, from `pd-cluster profile`.")] = "",
    device: Annotated[str, typer.Option(help="Compute the costs for a device: a100, h100, h200, b200 or 910b.")] = "",
    tensor_parallel_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks of each instance; may be repeated. Default: all that fit.")
    ] = None,
    one_host: Annotated[bool, typer.Option("--one-host", help="Instances on one host slow each other.")] = False,
    num_requests: Annotated[
        int, typer.Option(min=0, help="Use the first requests of the trace; 0: all.")
    ] = USUAL_REQUESTS,
    json: Annotated[str, typer.Option(metavar="FILE", help="Write the plan to a file.")] = "",
) -> None:
    """Find the smallest layout for a trace and its goals: split or not, and with which settings.

    Simulates, and needs neither a device nor the model's weights. Exit code 1 if no layout meets the goals.
    """
    from pd_cluster.bench.outcomes import Slo
    from pd_cluster.bench.trace_files import TraceScale, read_trace
    from pd_cluster.commands.plan_report import PlanReport
    from pd_cluster.plan.candidate_runs import CandidateRuns
    from pd_cluster.plan.layout_search import Search
    from pd_cluster.plan.plan_goals import PlanGoals
    from pd_cluster.result_tables import check_writable
    from pd_cluster.settings.engine_config import SHIPPED_MODEL
    from pd_cluster.simulate.simulation import silent, simulate

    check_writable(json)
    goals = PlanGoals(Slo(ttft_s=slo_ttft, tpot_s=slo_tpot, e2e_s=slo_e2e), slo_share)
    goals.check()
    if bool(costs) == bool(device):
        raise ConfigError("--costs, --device: give one of them: a file of measured costs, or a device such as h100")
    arrivals = read_trace(trace, TraceScale(limit=num_requests or None))
    model = (model or str(SHIPPED_MODEL)).removeprefix("hf:")
    source = _source(model, costs, device, arrivals)
    space = source.space(tensor_parallel_size or (), one_host)
    trials = CandidateRuns(arrivals, goals, source.costs, simulate)
    with silent():
        found = Search(trials, space, lambda line: typer.echo(line, err=True)).plan(devices)
    report = PlanReport(model=model, goals=goals, plan=found, source=source)
    report.show()
    if json:
        report.write(json)
    raise typer.Exit(0 if found.is_met else 1)


def _source(model: str, costs: str, device: str, arrivals: list[Arrival]) -> CostSource:
    """Raises ConfigError."""
    from pd_cluster.costs.cost_files import read_costs
    from pd_cluster.model.planning.model_needs import model_needs
    from pd_cluster.plan.cost_sources import ComputedSource, MeasuredSource, longest
    from pd_cluster.plan.device_models import device_model

    if costs:
        return MeasuredSource(read_costs(costs), costs, arrivals)
    known = device_model(device)
    needs = model_needs(model)
    if longest(arrivals) > needs.max_model_len:
        at, number = max((each.num_prompt_tokens + each.num_output_tokens, i) for i, each in enumerate(arrivals))
        raise ConfigError(f"--trace: request {number} has {at} tokens; {model} takes {needs.max_model_len}")
    return ComputedSource(needs, known, arrivals)
