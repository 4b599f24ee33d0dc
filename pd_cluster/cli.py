"""`pd-cluster`: the signature of each function is its command line.

Imports nothing heavy at the top: `--help` and errors come at once, torch only in rank processes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from functools import partial
from typing import Annotated, Any

import typer

from pd_cluster import __version__
from pd_cluster.bench.commands import app as bench_app
from pd_cluster.errors import PdClusterError
from pd_cluster.instances import DEFAULT_ADMIN, NO_SECRET_FILE, TOKEN_FILE
from pd_cluster.instances import app as instances_app
from pd_cluster.offline.batch_command import run_batch

app = typer.Typer(
    name="pd-cluster",
    help="Disaggregated prefill/decode serving for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
app.add_typer(instances_app, name="instances")
app.command("run-batch")(run_batch)


def _panel(title: str | None = None) -> Any:
    """Options of one part of `serve --help`."""
    return partial(typer.Option, rich_help_panel=title, show_envvar=False)


BASIC, ENGINE, KV, TIMES = _panel(), _panel("Engine"), _panel("KV handover"), _panel("Times")
SCHEDULER, REQUESTS, HTTP = _panel("Scheduler"), _panel("Scheduler: requests"), _panel("Scheduler: HTTP")
ANY = '["*"]'


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[
        str, BASIC(help="Model folder, or a hub's model; default: the model that the project ships.")
    ] = "",
    host: Annotated[str, BASIC(help="Address to bind HTTP to.")] = "0.0.0.0",
    port: Annotated[int, BASIC(help="HTTP port: the public one on the scheduler, one of NODE_PORTS else.")] = 8000,
    served_model_name: Annotated[list[str] | None, BASIC(help="What clients call the model.")] = None,
    secret_file: Annotated[
        str | None, BASIC(help="The cluster's secret; default: cluster.secret beside the global rank table.")
    ] = None,
    derive_secret: Annotated[
        bool,
        BASIC("--derive-secret", help="The secrets follow from the table: one host, whose every user is trusted."),
    ] = False,
    log_level: Annotated[str, BASIC(help="debug, info, warning or error.")] = "INFO",
    tensor_parallel_size: Annotated[
        int | None, ENGINE(help="Devices that share the model; default: as many as the rank table gives.")
    ] = None,
    revision: Annotated[str, ENGINE(help="Branch, tag or commit of a hub's model.")] = "",
    download_dir: Annotated[str, ENGINE(help="Folder for hub's models; default: the hub's own cache.")] = "",
    tokenizer: Annotated[str, ENGINE(help="Folder or hub's model of another tokenizer than the model's own.")] = "",
    tokenizer_revision: Annotated[str, ENGINE(help="Branch, tag or commit of it.")] = "",
    skip_tokenizer_init: Annotated[
        bool,
        ENGINE("--skip-tokenizer-init", help="The model folder need not have a tokenizer; then prompts are token ids."),
    ] = False,
    hf_overrides: Annotated[str, ENGINE(help="JSON object of values in place of those of config.json.")] = "{}",
    rope_scaling: Annotated[str, ENGINE(help="JSON object for config.json's rope_scaling.")] = "{}",
    rope_theta: Annotated[float | None, ENGINE(help="In place of config.json's.")] = None,
    max_model_len: Annotated[int | None, ENGINE(help="Tokens of prompt and output together.")] = None,
    max_num_seqs: Annotated[int, ENGINE(help="Sequences in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, ENGINE(help="Tokens in one step; prompts are chunked.")] = 2048,
    dtype: Annotated[
        str, ENGINE(help="auto, float32, float16 or bfloat16; auto is the model's own, on CPU float32.")
    ] = "auto",
    device: Annotated[
        str, ENGINE(help="auto, cpu, cuda or npu; auto is the accelerator that the machine has, else cpu.")
    ] = "auto",
    enforce_eager: Annotated[bool, ENGINE(help="Capture no graphs, where the device could.")] = False,
    max_seq_len_to_capture: Annotated[
        int | None,
        ENGINE(
            "--max-seq-len-to-capture",
            "--max-context-len-to-capture",
            help="Tokens of the longest context that graphs are for, where there are graphs; default: any.",
        ),
    ] = None,
    spawn: Annotated[
        bool,
        ENGINE("--spawn", help="Start each rank process by command line, though it could be forked from a preloader."),
    ] = False,
    attention_backend: Annotated[
        str,
        ENGINE(
            help="auto, triton, flashinfer or sdpa; auto is triton on a GPU. flashinfer must be installed and is taken "
            "only when asked for: it has not been timed here yet. On CPU: auto or sdpa."
        ),
    ] = "auto",
    try_unlisted: Annotated[
        list[str] | None,
        ENGINE(
            metavar="TYPE",
            help="Serve this model_type though it is not listed, if a proof at load holds; may be given again.",
        ),
    ] = None,
    language_model_only: Annotated[
        bool, ENGINE("--language-model-only", help="Of a multimodal model, serve the text model alone.")
    ] = False,
    block_size: Annotated[
        int | None, ENGINE(help="Tokens in a KV cache block; 16, on NPUs 128 when not given.")
    ] = None,
    num_blocks: Annotated[
        int | None, ENGINE("--num-blocks", "--num-gpu-blocks-override", help="Blocks in the KV pool.")
    ] = None,
    kv_cache_memory: Annotated[float | None, ENGINE(help="GiB for the KV pool.")] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        ENGINE(
            help="If the two above do not say: on CPU the share of the free memory for the KV pool; on a GPU that of "
            "its memory for this instance, 0.9 by default."
        ),
    ] = None,
    enable_prefix_caching: Annotated[bool, ENGINE(help="Keep KV blocks of ended requests for others.")] = True,
    preemption_mode: Annotated[str, ENGINE(help="recompute or swap: when the KV pool is full.")] = "recompute",
    swap_space: Annotated[float, ENGINE(help="GiB of host memory to swap to.")] = 4.0,
    growth_tokens: Annotated[int, ENGINE(help="Output tokens that decode reserves room for.")] = 128,
    kv_transport: Annotated[
        str, KV(help="auto, ipc (GPUs or NPUs of one host), shm (same host) or dist (NCCL, HCCL or gloo).")
    ] = "auto",
    kv_port_range: Annotated[str, KV(help="FIRST-LAST for the control socket; default: any.")] = "",
    kv_checksum: Annotated[bool, KV(help="Check every KV payload.")] = True,
    kv_hmac: Annotated[bool, KV(help="Authenticate every KV header.")] = True,
    kv_wire_dtype: Annotated[str, KV(help="auto, or int8: smaller, inexact KV between hosts.")] = "auto",
    kv_rate_limit: Annotated[float, KV(help="MB/s of KV over each link; 0: no limit.")] = 0.0,
    link_keepalive: Annotated[float, KV(help="Seconds after which an idle link is probed.")] = 30.0,
    api_workers: Annotated[int, SCHEDULER(help="Processes that serve the public port.")] = 1,
    max_connections: Annotated[
        int, SCHEDULER(help="Connections that may have requests at a time, of all API processes together.")
    ] = 8192,
    max_connections_per_host: Annotated[int, SCHEDULER(help="The same from one address; 0: no such limit.")] = 6144,
    routing_policy: Annotated[
        str, SCHEDULER(help="least-loaded, prefix-aware, predicted-ttft or session: which workers get a request.")
    ] = "prefix-aware",
    scheduling_policy: Annotated[
        str, SCHEDULER(help="fcfs, or priority: requests may have one, lower numbers come first.")
    ] = "fcfs",
    auto_role: Annotated[
        bool, SCHEDULER("--auto-role", help="Instances change between prefill and decode as load asks.")
    ] = False,
    slo_ttft: Annotated[float, SCHEDULER(help="Seconds to the first token, else 429; 0: no promise.")] = 0.0,
    slo_tpot: Annotated[float, SCHEDULER(help="Seconds for each further token, else 429; 0: no promise.")] = 0.0,
    max_attempts: Annotated[
        int, SCHEDULER(help="Times that a request goes on elsewhere when its instance or link is lost.")
    ] = 6,
    replay_wait: Annotated[float, SCHEDULER(help="Seconds that such a request waits for an instance.")] = 30.0,
    admin_port: Annotated[int | None, SCHEDULER(help="Admin port; default: port + 1.")] = None,
    admin_host: Annotated[str, SCHEDULER(help="Address to bind the admin port to.")] = "127.0.0.1",
    admin_allowed_hosts: Annotated[
        str, SCHEDULER(help="Names beside localhost by which the admin port may be read, with commas between.")
    ] = "",
    admin_token_file: Annotated[
        str | None, SCHEDULER(help="Admin token (mode 0600); default: admin.token beside the global rank table.")
    ] = None,
    scheduler_key_file: Annotated[
        str | None,
        SCHEDULER(help="Its private key (mode 0600); default: scheduler.key beside the global rank table."),
    ] = None,
    seed: Annotated[int | None, REQUESTS(help="Draw the seeds of requests without one from this.")] = None,
    max_logprobs: Annotated[int, REQUESTS(help="Most logprobs that a request may ask for.")] = 20,
    generation_config: Annotated[
        str,
        REQUESTS(
            help="Sampling defaults: auto, the model folder's generation_config.json; vllm, none; or another folder "
            "with that file."
        ),
    ] = "auto",
    override_generation_config: Annotated[
        str, REQUESTS(help="JSON over these: temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens.")
    ] = "",
    require_model: Annotated[bool, REQUESTS(help="Refuse a request that names no model.")] = False,
    return_tokens_as_token_ids: Annotated[
        bool,
        REQUESTS(
            "--return-tokens-as-token-ids", help='Logprobs show tokens as "token_id:5" where a request does not say.'
        ),
    ] = False,
    guided_decoding_backend: Annotated[
        str, REQUESTS(help="auto, or a library's name as vLLM has them: llguidance does it in any case.")
    ] = "auto",
    guided_timeout: Annotated[
        float, REQUESTS(help="Seconds to try a request's schema, regex, grammar or template.")
    ] = 4.0,
    chat_template: Annotated[
        str, REQUESTS(help="File of a chat template, or the template itself; default: the model folder's.")
    ] = "",
    trust_request_chat_template: Annotated[
        bool, REQUESTS("--trust-request-chat-template", help="A request may bring a chat template.")
    ] = False,
    allow_control_tokens: Annotated[
        bool,
        REQUESTS(
            "--allow-control-tokens",
            help="The text of a control token, such as <|im_start|>, is that token in chat messages, too; otherwise it "
            "is plain text there.",
        ),
    ] = False,
    response_role: Annotated[str, REQUESTS(help="The role of a chat's answers.")] = "assistant",
    tool_call_parser: Annotated[
        str, REQUESTS(help="How the model writes tool calls: hermes, qwen3, llama3_json or mistral.")
    ] = "",
    enable_auto_tool_choice: Annotated[
        bool,
        REQUESTS("--enable-auto-tool-choice", help="Needs --tool-call-parser, which alone allows tool_choice auto."),
    ] = False,
    reasoning_parser: Annotated[str, REQUESTS(help="How the model marks its reasoning: qwen3 or deepseek_r1.")] = "",
    enable_reasoning: Annotated[
        bool, REQUESTS("--enable-reasoning", help="Needs --reasoning-parser, which alone has the same effect.")
    ] = False,
    api_key: Annotated[
        list[str] | None,
        HTTP(help="Keys, one of which clients must send; default: VLLM_API_KEY. Only /health, /ping, /live are open."),
    ] = None,
    metrics_key: Annotated[
        str,
        HTTP(help="The key that opens /metrics and nothing else. Without it, API keys close /metrics."),
    ] = "",
    allowed_origins: Annotated[
        str | None, HTTP(help="CORS: a JSON list of origins; [] turns CORS off. Default: any, none if there are keys.")
    ] = None,
    api_key_tenant: Annotated[
        list[str] | None,
        HTTP(
            help="Names of the keys' tenants, in the keys' order; keys of one name share cached prompts, as a new key "
            "should with the one that it replaces. Default: each key is a tenant of its own."
        ),
    ] = None,
    shared_prefix_cache: Annotated[
        bool,
        HTTP("--shared-prefix-cache", help="Requests find the cached prompts of other keys, and so can time them."),
    ] = False,
    allowed_methods: Annotated[str, HTTP(help="CORS: a JSON list of methods.")] = ANY,
    allowed_headers: Annotated[str, HTTP(help="CORS: a JSON list of headers.")] = ANY,
    allow_credentials: Annotated[bool, HTTP("--allow-credentials", help="CORS: with cookies and the like.")] = False,
    root_path: Annotated[str, HTTP(help="The path under which a proxy shows this server.")] = "",
    enable_request_id_headers: Annotated[
        bool, HTTP("--enable-request-id-headers", help="Answers have x-request-id, the client's own or a new one.")
    ] = False,
    disable_fastapi_docs: Annotated[bool, HTTP("--disable-fastapi-docs", help="No /docs and /openapi.json.")] = False,
    ssl_certfile: Annotated[str, HTTP(help="TLS: the certificate, in PEM, read again when it changes.")] = "",
    ssl_keyfile: Annotated[str, HTTP(help="TLS: its key; default: in the certificate's file.")] = "",
    ssl_ca_certs: Annotated[str, HTTP(help="TLS: who signs clients' certificates.")] = "",
    ssl_cert_reqs: Annotated[int, HTTP(help="TLS: clients show a certificate: 0: none, 1: if they like, 2: all.")] = 0,
    heartbeat_interval: Annotated[float, TIMES(help="Seconds between heartbeats.")] = 0.5,
    dead_after: Annotated[float, TIMES(help="Seconds of silence after which a peer is dead.")] = 3.0,
    connect_timeout: Annotated[float, TIMES(help="Seconds to open a connection or a link.")] = 5.0,
    credit_timeout: Annotated[float, TIMES(help="Seconds for an idle decode instance to take an offer.")] = 10.0,
    transfer_timeout: Annotated[float, TIMES(help="Seconds that a KV transfer may stand still.")] = 30.0,
    collective_timeout: Annotated[float, TIMES(help="Seconds that a rank waits for another.")] = 60.0,
    step_timeout: Annotated[
        float, TIMES(help="Seconds after which an engine that hangs in a step is ended; 0: never.")
    ] = 600.0,
    request_timeout: Annotated[float, TIMES(help="Seconds for a whole request; 0: none.")] = 600.0,
    drain_timeout: Annotated[float, TIMES(help="Seconds for running requests after SIGTERM.")] = 30.0,
) -> None:
    """Run one instance; its role comes from the rank tables that the environment names.

    Reads GLOBAL_RANK_TABLE_FILE_PATH, RANK_TABLE_FILE_PATH; of the scheduler NODE_PORTS, NODE_PORTS_FILE, USE_OPENAI.
    Any instance takes every flag, so that one command line serves all roles. vLLM's other flags: docs/flags.md.
    A flag may be a variable, too: --max-num-seqs is PD_CLUSTER_SERVE_MAX_NUM_SEQS.
    """
    gc.disable()  # until all is imported: modules stay, and looking through them takes a tenth of the time
    from pd_cluster.options import ServeOptions
    from pd_cluster.serve import run

    options = {name: value for name, value in context.params.items() if name != "context"}
    run(ServeOptions(**options), _warn_extras(context), dict(os.environ))


@app.command()
def up(
    model: Annotated[str, typer.Option(help="Model folder; default: the model that the project ships.")] = "",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the public port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Public port; the admin port is the next one.")] = 9000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="What clients call the model.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Rank processes of each instance.")] = 1,
    prefill_tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Of each prefill instance, when it is another number.")
    ] = None,
    decode_tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Of each decode instance.")] = None,
    restart: Annotated[str, typer.Option(help="on-failure or no: what becomes of a worker that dies.")] = "on-failure",
    spawn: Annotated[bool, typer.Option("--spawn", help="Start rank processes by command line; fork none.")] = False,
    try_unlisted: Annotated[
        list[str] | None, typer.Option(metavar="TYPE", help="Serve this model_type as unproven; may be given again.")
    ] = None,
    language_model_only: Annotated[
        bool, typer.Option("--language-model-only", help="Of a multimodal model, serve the text model alone.")
    ] = False,
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: flags for every instance.")] = None,
) -> None:
    """Run a whole cluster on this machine: rank tables, workers and scheduler, until Ctrl-C.

    USE_OPENAI=0 in the environment serves vLLM's plain /generate instead of the OpenAI API.
    """
    gc.disable()  # until the cluster is ready
    from pd_cluster.cluster.launcher import SPAWN, Launch, run_until_signal
    from pd_cluster.cluster.place import use_openai
    from pd_cluster.flags import choice_of_model, normalize, split_keys, split_values

    flags, keys = split_keys(normalize(arguments or []))
    flags, metrics_keys = split_values(flags, "--metrics-key")
    flags += choice_of_model(try_unlisted or (), language_model_only)
    launch = Launch(
        model=model,
        num_prefill=prefill,
        num_decode=decode,
        host=host,
        port=port,
        served_model_names=served_model_name or [],
        tp_sizes={f"prefill-{i}": prefill_tensor_parallel_size or tensor_parallel_size for i in range(prefill)}
        | {f"decode-{i}": decode_tensor_parallel_size or tensor_parallel_size for i in range(decode)},
        openai=use_openai(os.environ),
        restart=restart,
        arguments=[*flags, *(SPAWN for _ in range(spawn))],
        api_keys=keys,
        metrics_key=metrics_keys[-1] if metrics_keys else "",
    )
    raise typer.Exit(asyncio.run(run_until_signal(launch)))


@app.command()
def trace(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="As its answer names it (cmpl-…, chatcmpl-…); default: list the last.")
    ] = "",
    admin: Annotated[str, typer.Option(help="The scheduler's admin address.")] = DEFAULT_ADMIN,
    admin_token_file: Annotated[str, TOKEN_FILE] = "",
    secret_file: Annotated[str, NO_SECRET_FILE] = "",
    png: Annotated[str, typer.Option(help="Draw the timeline into this file too; needs matplotlib.")] = "",
    json: Annotated[str, typer.Option(help="Write what is shown to this file too.")] = "",
) -> None:
    """Show what became of a request: when it was queued, computed, handed over and decoded."""
    from pd_cluster.admin import Admin
    from pd_cluster.trace.command import run

    run(request_id, Admin(admin, admin_token_file, os.environ), png, json)


@app.command()
def check() -> None:
    """Check the rank tables and variables of this environment, and show every deadline with its flag."""
    from pd_cluster.check import run

    run(os.environ)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _warn_extras(context: typer.Context) -> list[str]:
    from pd_cluster.flags import judge

    honoured = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    return judge(context.args, honoured)


def main() -> None:
    """Exit code 0; 1 with one line on stderr; 2 for a command line that typer refuses."""
    from pd_cluster.flags import normalize

    logging.captureWarnings(True)
    argv = sys.argv[1:]
    if argv[:1] == ["serve"]:
        argv = normalize(argv)
    try:
        app(args=argv, prog_name="pd-cluster", auto_envvar_prefix="PD_CLUSTER")
    except PdClusterError as error:
        print(f"pd-cluster: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
