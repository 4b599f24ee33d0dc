"""Options of `bench load` and `simulate`: a load, its goals, its report. Only --help-all shows those for details."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from pd_cluster.commands.settings_flags import HELP_ALL, Command, with_options

WORKLOADS = "fixed, log-normal, shared-prefix, conversation or tool-agent."
PICTURE = "Draw the report into this .png or .svg; needs matplotlib."


def _option(name: str, kind: Any, default: object, help: str, **more: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(help=help, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _detail(name: str, kind: Any, default: object, help: str) -> inspect.Parameter:
    return _option(name, kind, default, help, hidden=True)


OPTIONS = (
    _option("workload", str, "fixed", WORKLOADS),
    _option("trace", str, "", "Replay this trace file in Mooncake's format, as `trace --export` writes."),
    _option("num_requests", int, 100, "Requests of a workload."),
    _option("rate", float, 1.0, "Mean requests per second."),
    _option("arrivals", str, "poisson", "Arrival times: poisson or constant."),
    _option("input_len", int, 512, "Prompt tokens; in a session, those of its first message."),
    _option("output_len", int, 128, "Output tokens."),
    _detail("sigma", float, 0.6, "Standard deviation of the logarithm of log-normal lengths."),
    _detail("num_prefixes", int, 4, "Prefixes of shared-prefix and tool-agent."),
    _detail("prefix_share", float, 0.5, "Share of --input-len that is a shared prefix."),
    _detail("num_turns", int, 4, "Turns of a conversation or an agent."),
    _detail("pause", float, 5.0, "Mean seconds between two turns of a session."),
    _detail("seed", int, 0, "Seed of the drawn lengths and times."),
    _detail("trace_limit", int | None, None, "Replay only the first requests of the trace."),
    _detail("trace_lengths", float, 1.0, "Factor for the lengths of the trace."),
    _detail("trace_time", float, 1.0, "Factor for the time between requests of the trace."),
    _detail("trace_repeat", int, 1, "Number of times to replay the trace, each time with other prompts."),
    _option("slo_ttft", float, 0.0, "Goal for the first token, seconds; 0: none.", min=0),
    _option("slo_tpot", float, 0.0, "Goal for the mean time per further token, seconds; 0: none.", min=0),
    _option("slo_e2e", float, 0.0, "Goal for the whole answer, seconds; 0: none.", min=0),
    _option("picture", str, "", PICTURE),
    _option("json", str, "", "Write the report with each request to this file too."),
    inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, HELP_ALL]),
)


def takes_load(command: Command) -> Command:
    """Adds OPTIONS to a command, after its own. The command gets their values as `**given`."""
    own = [name for name in inspect.signature(command).parameters if name != "given"]
    return with_options(command, OPTIONS, after=own[-1])
