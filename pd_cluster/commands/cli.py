"""`pd-cluster`: the signature of each function is its command line; the settings make the signature of `serve`.

Imports nothing heavy at the top, so that `--help` and errors appear at once. Only rank processes import torch.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_cluster import __version__
from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.commands.bench_command import app as bench_app
from pd_cluster.commands.extra_commands import add_extra
from pd_cluster.commands.instances_command import ADMIN, NO_SECRET_FILE, TOKEN_FILE
from pd_cluster.commands.instances_command import app as instances_app
from pd_cluster.commands.plan_command import plan
from pd_cluster.commands.run_batch_command import run_batch
from pd_cluster.commands.settings_flags import (
    EMPTY_MODEL,
    HELP_ALL,
    BriefHelp,
    check_model,
    given_model,
    shorten_help,
    takes,
)
from pd_cluster.commands.simulate_command import simulate
from pd_cluster.commands.view_commands import JSON, LOOKING
from pd_cluster.errors import KEEPS_MARKS, ConfigError, PdClusterError, flag_of
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.flag_file import expanded
from pd_cluster.settings.lora_settings import SHIPPED_ADAPTER_FLAGS
from pd_cluster.settings.routing_settings import MAX_SCHEDULERS
from pd_cluster.settings.serve_options import USUAL, ServeOptions, settings
from pd_cluster.settings.value_spellings import IN_OTHER_UNITS
from pd_cluster.settings.vllm_flags import ALIASES, choice_of_model, judge, normalize, split_keys, split_values
from pd_cluster.settings.vllm_flags_without_setting import FOREIGN, foreign
from pd_cluster.settings.vllm_variables import warnings_of
from pd_cluster.transport import transport_table as transports

if TYPE_CHECKING:
    from pd_cluster.cluster.processes.launch_settings import Launch

app = typer.Typer(
    name="pd-cluster",
    help="Disaggregated prefill/decode serving for large language models.",
    epilog="A variable can set each option: PD_CLUSTER_UP_PORT sets `pd-cluster up --port`. "
    "`pd-cluster --debug COMMAND` shows where an error comes from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
SERVE, LOOK, CHANGE, OFFLINE = "Serve", "Look and talk", "Change a running cluster", "Without a server"
app.add_typer(bench_app, name="bench", rich_help_panel=LOOK)
app.add_typer(instances_app, name="instances", rich_help_panel=CHANGE)
keys_app = typer.Typer(help="Make and show API keys and the keys of nodes.", no_args_is_help=True)
for keys_command in ("keys new", "keys list", "keys remove", "keys node"):
    add_extra(keys_app, keys_command)
app.add_typer(keys_app, name="keys", rich_help_panel=CHANGE)
add_extra(app, "endpoint-picker", SERVE)
add_extra(app, "dashboard", LOOK)
for look in LOOKING:
    app.command(look.__name__.replace("_", "-"), rich_help_panel=LOOK)(look)
SECRET_FLAGS = (
    *(each.flag for each in settings().values() if each.setting.is_secret),
    *(name for name, each in FOREIGN.items() if each.is_secret),
)
OPEN_CHOICES = {
    "routing_policy": f"{', '.join(POLICIES)} or module:function",
    "kv_transport": transports.help_text(),
}

WHOLE = ["--enable-expert-parallel"]
WHOLE_EXPERTS = Annotated[bool, typer.Option("--enable-expert-parallel", help="Whole experts on each rank.")]
TEXT_ONLY = Annotated[
    bool, typer.Option("--language-model-only", help="Serve only the text model of a multimodal model.")
]
MODEL_AND_FLAGS = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL] [-- FLAGS]", help="After --: flags for every instance.")
]


@app.command(
    rich_help_panel=SERVE, cls=BriefHelp, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
@takes(settings().values(), after="context", show_envvar=False, choices=OPEN_CHOICES, usual=USUAL)
def serve(context: typer.Context, help_all: Annotated[bool, HELP_ALL] = False, **given: Any) -> None:
    """Run one instance of a cluster. Its role comes from rank tables that the environment names, or from --role.

    Reads GLOBAL_RANK_TABLE_FILE_PATH, RANK_TABLE_FILE_PATH and NODE_PORTS.
    Every instance takes every flag. --config FILE gives flags as YAML;
    the variable PD_CLUSTER_SERVE_MAX_NUM_SEQS sets --max-num-seqs.
    --help-all shows all flags; docs/flags.md also lists vLLM's other flags.
    """
    gc.disable()  # until all modules are imported; collections would take a tenth of that time and free nothing
    from pd_cluster.commands.serve_command import run

    options = ServeOptions(**given)
    run(options, [*_warn_extras(context), *warnings_of(os.environ), *options.remarks()], dict(os.environ))


@app.command(rich_help_panel=SERVE)
def up(
    context: typer.Context,
    model: Annotated[str, typer.Option(callback=given_model, help="Default: the shipped one.")] = "",
    prefill: Annotated[int | None, typer.Option(min=1, help="Instances; default: 1 unit.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Instances; default: 1 unit.")] = None,
    encode: Annotated[int, typer.Option(min=0, help="Number of image encoders.")] = 0,
    hybrid: Annotated[int | None, typer.Option(min=1, help="Hybrid instances only.")] = None,
    schedulers: Annotated[int, typer.Option(min=1, max=MAX_SCHEDULERS, help="Schedulers; 2 ports each.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the public port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Public port (0: any); the admin port is the next.")] = 9000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Model name for clients.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks of each instance.")] = 1,
    prefill_tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Ranks per prefill instance.")] = None,
    decode_tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Ranks per decode instance.")] = None,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Instances of a unit.")] = 1,
    prefill_data_parallel_size: Annotated[int | None, typer.Option(min=1, help="Prefill instances per unit.")] = None,
    decode_data_parallel_size: Annotated[int | None, typer.Option(min=1, help="Decode instances per unit.")] = None,
    enable_expert_parallel: WHOLE_EXPERTS = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Also serve the shipped LoRA adapter, pirate.")] = False,
    restart: Annotated[str, typer.Option(help="Restart of dead workers: on-failure or no.")] = "on-failure",
    spawn: Annotated[bool, typer.Option("--spawn", help="Start rank processes by command line, without fork.")] = False,
    try_unlisted: Annotated[list[str] | None, typer.Option(metavar="TYPE", help="Serve unproven model_type.")] = None,
    language_model_only: TEXT_ONLY = False,
    arguments: MODEL_AND_FLAGS = None,
) -> None:
    """Run a whole cluster on this machine until Ctrl-C.

    The model is a folder, or a model of a hub (hf:ORG/NAME, or ORG/NAME), which is downloaded once.
    USE_OPENAI=0 in the environment serves vLLM's plain /generate instead of the OpenAI API.
    """
    gc.disable()  # until the cluster is ready
    from pd_cluster.cluster.members.rank_table_place import use_openai
    from pd_cluster.cluster.processes.launch_settings import SPAWN, Launch, by_role

    port = port or _free_port(schedulers)
    model, arguments = _model_and_flags(model, arguments or [], adapter)
    arguments += choice_of_model(try_unlisted or (), language_model_only) + WHOLE * enable_expert_parallel
    unit_sizes = by_role(data_parallel_size, prefill_data_parallel_size, decode_data_parallel_size)
    flags, keys, metrics_key = _without_keys(arguments)
    model, in_effect, _ = _checked(context, model, [f"--host={host}", f"--port={port}", *arguments])
    launch = Launch(
        model=model,
        num_prefill=_num_of_role("prefill", prefill, hybrid, unit_sizes),
        num_decode=_num_of_role("decode", decode, hybrid, unit_sizes),
        num_hybrid=hybrid or 0,
        num_encode=encode,
        num_schedulers=schedulers,
        host=host,
        port=port,
        served_model_names=served_model_name or [],
        tp_sizes=by_role(tensor_parallel_size, prefill_tensor_parallel_size, decode_tensor_parallel_size),
        unit_sizes=unit_sizes,
        openai=use_openai(os.environ),
        restart=restart,
        arguments=[*flags, *(SPAWN for _ in range(spawn))],
        in_effect=in_effect,
        api_keys=keys,
        metrics_key=metrics_key,
    )
    raise typer.Exit(_run(launch.with_lasting_streams(os.environ)))


@app.command(rich_help_panel=LOOK)
def profile(
    context: typer.Context,
    model: Annotated[str, typer.Option(callback=given_model, help="Default: the shipped one.")] = "",
    out: Annotated[str, typer.Option(help="Write the costs to this file, for simulate, plan and --costs.")] = "",
    device: Annotated[str, typer.Option(help="Device of the instances.")] = "cpu",
    seconds: Annotated[float, typer.Option(min=3.0, max=3600.0, help="Duration of the measurement.")] = 120.0,
    arguments: MODEL_AND_FLAGS = None,
) -> None:
    """Measure the costs of steps and handovers on this machine.

    Runs real engines, alone and in pairs, and ends every process that it starts.
    """
    import uvloop

    from pd_cluster.bench.cost_profile import Profile, run
    from pd_cluster.cluster.processes.launch_settings import Launch

    model, arguments = _model_and_flags(model, arguments or [], adapter=False)
    arguments = normalize([*arguments, f"--device={device}"])
    model, in_effect, options = _checked(context, model, arguments)
    launch = Launch(model=model, port=_free_port(1), arguments=arguments, in_effect=in_effect, restart="no")
    named = " ".join(["pd-cluster profile", *([f"--model {model}"] if model else []), "--", *arguments])
    uvloop.run(run(Profile(launch=launch, engine=options.engine(), seconds=seconds, out=out, command=named)))


@app.command(rich_help_panel=LOOK)
def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="A request's id in its answer (cmpl-…, chatcmpl-…); default: list the last requests."
        ),
    ] = "",
    admin: Annotated[str, ADMIN] = "",
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, NO_SECRET_FILE] = "",
    png: Annotated[str, typer.Option(help="Draw the timeline into this file too; needs matplotlib.")] = "",
    json: Annotated[str, typer.Option(help="Write what is shown to this file too.")] = "",
    export: Annotated[
        str, typer.Option(help="Write lengths and block hashes of the served requests to this file: a trace.")
    ] = "",
    export_block: Annotated[int, typer.Option(help="Tokens per block of the trace; Mooncake's have 512.")] = 512,
) -> None:
    """Show the timeline of a request: when it was queued, prefilled, handed over and decoded."""
    from pd_cluster.client.admin_client import Admin
    from pd_cluster.commands.trace.trace_command import export_trace, run

    found = Admin.find(admin, admin_token_file, os.environ)
    if export:
        export_trace(found, export, export_block, {"ID": request_id, "--png": png, "--json": json})
    else:
        run(request_id, found, png, json)


@app.command(rich_help_panel=SERVE)
def check(
    network: Annotated[
        bool,
        typer.Option("--network", help="Check the network instead: the NPUs' ports, and KV blocks between devices."),
    ] = False,
    wait: Annotated[
        float,
        typer.Option(min=0.0, help="With --network: seconds to wait for this command on the other hosts; 0: no wait."),
    ] = 120.0,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Check this environment's rank tables and variables.

    Shows every deadline with its flag.
    With --network, checks the network before a start; exit code 1 if it has a fault.
    PD_CLUSTER_SERVE_DEVICE and PD_CLUSTER_SERVE_KV_TRANSPORT give --device and --kv-transport.
    With PD_CLUSTER_SERVE_MODEL, shows how many tokens, sequences and kept states fit.
    """
    from pd_cluster.commands.check_command import run

    if not run(os.environ, network, wait, json):
        raise typer.Exit(1)


@app.command(rich_help_panel=LOOK)
def version(json: Annotated[bool, JSON] = False) -> None:
    """Print the version; with --json also the protocol's version."""
    if not json:
        typer.echo(__version__)
        return
    from pd_cluster.wire import PROTOCOL_VERSION

    typer.echo(dumps({"version": __version__, "protocol": PROTOCOL_VERSION}))


app.command("run-batch", rich_help_panel=OFFLINE, cls=BriefHelp)(run_batch)
app.command(rich_help_panel=OFFLINE)(plan)
add_extra(app, "quantize", OFFLINE)
app.command(rich_help_panel=OFFLINE, cls=BriefHelp)(simulate)


def _run(launch: Launch) -> int:
    """Serves until a signal; in a terminal, shows a table below the log lines. Returns the exit code."""
    if launch.remark:
        typer.echo(launch.remark.strip())
    if sys.stdout.isatty():
        from pd_cluster.commands.live_view import run_live

        return run_live(launch)
    from pd_cluster.cluster.processes.launcher import run_until_signal

    return asyncio.run(run_until_signal(launch))


def _num_of_role(role: str, given: int | None, hybrid: int | None, unit_sizes: Mapping[str, int]) -> int:
    """Returns the number of instances of a role; 0 with hybrid instances. Raises ConfigError."""
    if hybrid and given:
        raise ConfigError(f"--{role} {given}: not with --hybrid {hybrid}, which does the same work; give one of them")
    return 0 if hybrid else given or unit_sizes[role]


def _without_keys(arguments: list[str]) -> tuple[list[str], list[str], str]:
    """Returns the flags without keys, the API keys, and the metrics key."""
    flags, keys = split_keys(normalize(arguments))
    flags, metrics_keys = split_values(flags, "--metrics-key")
    return flags, keys, metrics_keys[-1] if metrics_keys else ""


def _free_port(num_schedulers: int) -> int:
    from pd_cluster.cluster.processes.port_reservations import free_port_row

    return free_port_row(2 * num_schedulers)


def _model_and_flags(model: str, arguments: list[str], adapter: bool) -> tuple[str, list[str]]:
    """Returns the model, which `arguments` may begin with, and the flags with the adapter's. Raises ConfigError."""
    if arguments and not arguments[0].startswith("-"):
        first, *arguments = arguments
        if model:
            raise ConfigError(f"--model {model}: {first!r} also names a model; give one of them")
        model = first
        if not model:
            raise ConfigError(EMPTY_MODEL)
    if adapter and model:
        raise ConfigError(f"--adapter: the adapter is for the shipped model; leave out {model}")
    arguments = [*(SHIPPED_ADAPTER_FLAGS if adapter else ()), *arguments]
    return model.removeprefix("hf:"), arguments


def _checked(context: typer.Context, model: str, argv: list[str]) -> tuple[str, list[str], ServeOptions]:
    """Reads the flags as each instance will. Returns the model, the flags including those of a --config file, and the
    options that they set.

    `model`: the model given to `up` itself, or "". If it is "", the model may come from the instances' flags, the
    --config file or a variable; without any of these, the returned model is "", too. Raises ConfigError, and click's
    errors for values of a wrong type.
    """
    from pd_cluster.commands.launch_check import check_launch

    group = context.parent.command if context.parent is not None else None
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands["serve"]
    flags = expanded([f"--model={model}", *argv] if model else argv, _serve_flags())
    each = command.make_context("serve", list(flags), context.parent)
    _warn_extras(each)
    given = {name: value for name, value in each.params.items() if name != "help_all"}
    check_model(each.get_parameter_source("model"), given["model"])
    options = ServeOptions(**{**given, "model": given["model"] or str(SHIPPED_MODEL)})
    check_launch(options, dict(os.environ))
    return given["model"], flags, options


def _warn_extras(context: Any) -> list[str]:
    honoured = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    return judge(context.args, honoured)


def _serve_flags() -> list[str]:
    return [flag_of(name) for each in settings().values() for name in (each.name, *each.setting.also)]


def _own_flags_of_up(command: Any, argv: list[str]) -> list[str]:
    """Returns the command line with vLLM's short forms of `up`'s own flags, such as -tp, written out.

    Raises ConfigError for a flag of instances that is not after --.
    """
    own = {name for parameter in command.commands["up"].params for name in parameter.opts}
    of_instances = {*_serve_flags(), *IN_OTHER_UNITS} - own
    end = argv.index("--") if "--" in argv else len(argv)
    found = []
    for word in argv[:end]:
        name, equals, value = word.partition("=")
        flag = ALIASES.get(name, name).replace("_", "-")
        if flag in of_instances or (flag not in own and flag.startswith("--") and foreign(flag.partition(".")[0])):
            shown = name if flag.partition(".")[0] in SECRET_FLAGS else word
            raise ConfigError(
                f"{flag} is a flag of `pd-cluster serve`; give it after --, as in `pd-cluster up -- {shown}`"
            )
        found.append(flag + equals + value if name in ALIASES else word)
    return [*found, *argv[end:]]


def whole_command() -> Any:
    """Returns the command line, with brief help texts."""
    command = typer.main.get_command(app)
    shorten_help(command)
    return command


def _serve_alone() -> Any:
    """Returns a command line with `serve` as its only command, with which instances start faster."""
    alone = typer.Typer()
    alone.info = app.info
    alone.registered_commands = [each for each in app.registered_commands if each.callback is serve]
    command = typer.main.get_group(alone)
    shorten_help(command)
    return command


def main() -> None:
    """Exits with 0, with 1 and one line on stderr, or with 2 for a command line that typer refuses.

    With --debug as the first argument, an error prints its traceback.
    """
    keeps_marks = os.environ.pop(KEEPS_MARKS, "")  # removed, so that child processes do not inherit the variable
    logging.captureWarnings(True)
    argv = sys.argv[1:]
    is_debugged = argv[:1] == ["--debug"]
    argv = argv[is_debugged:]
    is_serve = argv[:1] == ["serve"]
    command = _serve_alone() if is_serve else whole_command()
    try:
        if is_serve:
            argv = ["serve", *expanded(argv[1:], _serve_flags())]
        elif argv[:1] == ["up"]:
            argv = _own_flags_of_up(command, argv)
        command(args=argv, prog_name="pd-cluster", auto_envvar_prefix="PD_CLUSTER")
    except PdClusterError as error:
        if is_debugged:
            traceback.print_exc()
        print(f"pd-cluster: {error.text if keeps_marks else error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
