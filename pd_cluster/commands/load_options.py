"""Options that say which load to send, for `bench load` and `simulate`. Those of details are in --help-all alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer

WORKLOADS = "fixed, log-normal, shared-prefix, conversation or tool-agent."


def _detail(help: str) -> Any:
    return typer.Option(help=help, hidden=True)


WorkloadName = Annotated[str, typer.Option(help=WORKLOADS)]
TraceFile = Annotated[str, typer.Option(help="Replay this trace instead: Mooncake's format, as of `trace --export`.")]
NumRequests = Annotated[int, typer.Option(help="Of a workload.")]
Rate = Annotated[float, typer.Option(help="Requests a second, on average.")]
Arrivals = Annotated[str, typer.Option(help="poisson or constant.")]
InputLen = Annotated[int, typer.Option(help="Prompt tokens; of a session: of its first message.")]
OutputLen = Annotated[int, typer.Option(help="Output tokens.")]
Sigma = Annotated[float, _detail("Deviation of log-normal lengths' logarithm.")]
NumPrefixes = Annotated[int, _detail("Of shared-prefix and tool-agent.")]
PrefixShare = Annotated[float, _detail("Of --input-len, that is one of the prefixes.")]
NumTurns = Annotated[int, _detail("Of a conversation or an agent.")]
Pause = Annotated[float, _detail("Mean seconds from one of its turns to the next.")]
Seed = Annotated[int, _detail("Another one draws other lengths and times.")]
TraceLimit = Annotated[int | None, _detail("First requests of the trace only.")]
TraceLengths = Annotated[float, _detail("Factor on its lengths.")]
TraceTime = Annotated[float, _detail("Factor on the time between its requests.")]
TraceRepeat = Annotated[int, _detail("Times in a row, with other prompts each time.")]
SloTtft = Annotated[float, typer.Option(min=0, help="Goal for the first token, seconds; 0: none.")]
SloTpot = Annotated[float, typer.Option(min=0, help="Goal for the mean time of a further token, seconds.")]
SloE2e = Annotated[float, typer.Option(min=0, help="Goal for the whole answer, seconds.")]
Picture = Annotated[str, typer.Option(help="Draw the report into this .png or .svg; needs matplotlib.")]
ReportFile = Annotated[str, typer.Option(help="Write the report with each request to this file too.")]
