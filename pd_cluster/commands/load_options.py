"""Options that describe a load, for `bench load` and `simulate`. Only --help-all shows the less usual ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer

WORKLOADS = "fixed, log-normal, shared-prefix, conversation or tool-agent."


def _detail(help: str) -> Any:
    return typer.Option(help=help, hidden=True)


WorkloadName = Annotated[str, typer.Option(help=WORKLOADS)]
TraceFile = Annotated[str, typer.Option(help="Replay this trace file, in Mooncake's format, as of `trace --export`.")]
NumRequests = Annotated[int, typer.Option(help="Requests of a workload.")]
Rate = Annotated[float, typer.Option(help="Mean requests per second.")]
Arrivals = Annotated[str, typer.Option(help="Arrival times: poisson or constant.")]
InputLen = Annotated[int, typer.Option(help="Prompt tokens, in a session those of its first message.")]
OutputLen = Annotated[int, typer.Option(help="Output tokens.")]
Sigma = Annotated[float, _detail("Standard deviation of the logarithm of log-normal lengths.")]
NumPrefixes = Annotated[int, _detail("Prefixes of shared-prefix and tool-agent.")]
PrefixShare = Annotated[float, _detail("Share of --input-len that is a shared prefix.")]
NumTurns = Annotated[int, _detail("Turns of a conversation or an agent.")]
Pause = Annotated[float, _detail("Mean seconds between two turns of a session.")]
Seed = Annotated[int, _detail("Seed of the drawn lengths and times.")]
TraceLimit = Annotated[int | None, _detail("Replay only the first requests of the trace.")]
TraceLengths = Annotated[float, _detail("Factor for the lengths of the trace.")]
TraceTime = Annotated[float, _detail("Factor for the time between requests of the trace.")]
TraceRepeat = Annotated[int, _detail("Number of times to replay the trace, each time with other prompts.")]
SloTtft = Annotated[float, typer.Option(min=0, help="Goal for the first token, seconds; 0: none.")]
SloTpot = Annotated[float, typer.Option(min=0, help="Goal for the mean time per further token, seconds.")]
SloE2e = Annotated[float, typer.Option(min=0, help="Goal for the whole answer, seconds.")]
Picture = Annotated[str, typer.Option(help="Draw the report into this .png or .svg; needs matplotlib.")]
ReportFile = Annotated[str, typer.Option(help="Write the report with each request to this file too.")]
