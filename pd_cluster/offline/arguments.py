"""From `LLM`'s arguments to an OfflineConfig: those of `pd-cluster serve` by their Python names, judged as there.

Each is honoured, accepted with one warning where it cannot matter, or refused with the reason; one that nobody knows is
an error with the nearest known name. Starts nothing.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from pd_cluster.config import ChatConfig, EngineConfig
from pd_cluster.errors import ConfigError
from pd_cluster.flags import NO_EFFECT, REFUSED, Ignored
from pd_cluster.offline.session import OfflineConfig
from pd_cluster.options import ServeOptions
from pd_cluster.sampling_defaults import parse_override

log = logging.getLogger(__name__)

ALIASES = {
    "resoning_parser": "reasoning_parser",  # FastDeploy's document writes it so once
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_gib": "kv_cache_memory",
    "swap_space_gib": "swap_space",
}
# Of serve's flags: what holds offline too,
HONOURED = (
    *("model", "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype", "device"),
    *("block_size", "num_blocks", "kv_cache_memory", "gpu_memory_utilization", "enable_prefix_caching"),
    *("enforce_eager", "attention_backend", "max_seq_len_to_capture"),
    *("revision", "download_dir", "tokenizer", "tokenizer_revision", "skip_tokenizer_init"),
    *("hf_overrides", "rope_scaling", "rope_theta"),
    *("try_unlisted", "language_model_only"),
    *("preemption_mode", "swap_space", "growth_tokens", "seed", "max_logprobs", "guided_decoding_backend"),
    *("generation_config", "override_generation_config"),
    *(
        "chat_template",
        "allow_control_tokens",
        "response_role",
        "tool_call_parser",
        "enable_auto_tool_choice",
        "reasoning_parser",
    ),
    "enable_reasoning",
)
# what is for worker processes,
WORKERS = (
    "spawn",
    *("kv_transport", "kv_port_range", "kv_checksum", "kv_hmac", "kv_wire_dtype", "kv_rate_limit", "link_keepalive"),
    *("heartbeat_interval", "dead_after", "connect_timeout", "credit_timeout", "transfer_timeout"),
    *("collective_timeout", "step_timeout", "log_level"),
)
# and what is a server's.
SERVER = (
    *("host", "port", "served_model_name", "admin_port", "admin_host", "admin_token_file"),
    *("secret_file", "scheduler_key_file", "derive_secret"),
    *("auto_role", "request_timeout", "drain_timeout", "max_attempts", "replay_wait", "guided_timeout", "api_workers"),
    *("max_connections", "max_connections_per_host", "metrics_key", "admin_allowed_hosts"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("api_key", "api_key_tenant", "shared_prefix_cache", "root_path"),
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    *("enable_request_id_headers", "disable_fastapi_docs", "trust_request_chat_template"),
    *("return_tokens_as_token_ids", "require_model", "routing_policy", "scheduling_policy", "slo_ttft", "slo_tpot"),
)
NO_SERVER = Ignored("nothing is served offline")
# FastDeploy's arguments that are no flags here.
OTHERS_WITHOUT_EFFECT = {
    "metrics_port": NO_SERVER,
    "engine_worker_queue_port": NO_SERVER,
    "cache_queue_port": NO_SERVER,
    "data_parallel_size": Ignored("there is one engine", values=("1",)),
    "enable_custom_all_reduce": Ignored("there is no custom all-reduce"),
    "enable_logprob": Ignored("logprobs are there for who asks"),
    "graph_optimization_config": Ignored("graphs are captured for the sizes in use"),
    "dynamic_load_weight": Ignored("weights are loaded once", values=("0", "False")),
    "long_prefill_token_threshold": Ignored("prefill shares a step's tokens in order of arrival"),
    "max_concurrency": NO_SERVER,
    "max_long_partial_prefills": Ignored("prefill shares a step's tokens in order of arrival"),
    "max_num_partial_prefills": Ignored("prefill shares a step's tokens in order of arrival"),
    "max_waiting_time": NO_SERVER,
    "splitwise_role": Ignored("give prefill= and decode=, the numbers of worker processes", values=("mixed",)),
    "static_decode_blocks": Ignored("a request takes blocks as it needs them"),
    "use_cudagraph": Ignored("graphs are captured for the sizes in use"),
    "use_warmup": Ignored("a model is tried when it is loaded"),
}
OTHERS_REFUSED = {
    "enable_expert_parallel": "experts are not placed by themselves",
    "enable_mm": "images, audio and video are not supported",
    "guided_decoding_disable_any_whitespace": "whitespace follows the guide; leave it out",
    "innode_prefill_ports": "give prefill= and decode=, the numbers of worker processes",
    "lm_head_fp32": "logits are computed in the model's dtype; give dtype='float32'",
    "kv_cache_ratio": "blocks are not divided between prompts and answers: every request may have any of them",
    "mm_processor_kwargs": "images, audio and video are not supported",
}
# The signature's own values, which ask for nothing.
DEFAULTS = {"gpu_memory_utilization": 0.9, "max_seq_len_to_capture": 8192}
OBJECTS = ("hf_overrides", "rope_scaling", "override_generation_config")  # dicts, or JSON as on a command line
MOST_LOGPROBS = 1000  # as for `serve`


def config_of(given: Mapping[str, Any], prefill: int = 0, decode: int = 0) -> OfflineConfig:
    """Raises ConfigError and ModelError, which name the argument."""
    given = dict(given)
    if given.get("max_context_len_to_capture") is not None:
        given["max_seq_len_to_capture"] = given.pop("max_context_len_to_capture")
    arguments = {ALIASES.get(name, name): value for name, value in given.items()}
    arguments["model"] = os.fspath(arguments["model"])
    if arguments.get("tokenizer"):
        arguments["tokenizer"] = os.fspath(arguments["tokenizer"])
    for name in OBJECTS:
        if isinstance(arguments.get(name), Mapping):
            arguments[name] = _json(name, arguments[name])
    arguments = {name: value for name, value in arguments.items() if value not in (None, DEFAULTS.get(name))}
    num_ranks = arguments.get("tensor_parallel_size", 1)
    if isinstance(num_ranks, int) and num_ranks > 1 and not prefill and not decode:
        prefill = decode = 1  # several ranks are several processes
        log.warning(
            "tensor_parallel_size=%d: a prefill and a decode instance of %d ranks each, both with all the weights "
            "(prefill=1, decode=1)",
            num_ranks,
            num_ranks,
        )
    defaults = _serve_defaults()
    honoured, flags = {}, []
    for name, value in arguments.items():
        if name in HONOURED:
            honoured[name] = value
        elif name in WORKERS and prefill:
            flags += _as_flag(name, value)
        elif name in WORKERS or name in SERVER:
            why = "the engine runs in this process (prefill, decode)" if name in WORKERS else NO_SERVER.why
            if value != defaults[name]:
                log.warning("%s has no effect: %s", name, why)
        else:
            _judge(name, value)
    options = defaults | honoured
    with in_python_names():
        engine, chat = _settings(options)
        override = parse_override(options["override_generation_config"])
    return OfflineConfig(
        engine=engine,
        chat=chat,
        prefill=prefill,
        decode=decode,
        max_logprobs=options["max_logprobs"],
        # A server limits answers by the file's max_new_tokens; who asks here by himself means what he asks.
        sampling_override={"max_new_tokens": None, **override},
        arguments=tuple(flags),
    )


@contextmanager
def in_python_names() -> Iterator[None]:
    """Errors of code that both modes have name flags: here they name arguments."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(_in_python(str(error))) from None


def _settings(options: dict[str, Any]) -> tuple[EngineConfig, ChatConfig]:
    from pd_cluster.api.guide_fields import BACKENDS

    try:
        serve = msgspec.convert(options, ServeOptions)
    except msgspec.ValidationError as error:
        what, _, name = str(error).rpartition(" - at `$.")
        name = name.rstrip("`").partition("[")[0]
        raise ConfigError(f"{name} {reprlib.repr(options.get(name))}: {what[:1].lower()}{what[1:]}") from None
    if serve.guided_decoding_backend not in BACKENDS:
        raise ConfigError(
            f"guided_decoding_backend {serve.guided_decoding_backend!r}: expected one of {', '.join(BACKENDS)}"
        )
    if not 0 <= serve.max_logprobs <= MOST_LOGPROBS:
        raise ConfigError(f"max_logprobs {serve.max_logprobs}: must be in 0 to {MOST_LOGPROBS}")
    return serve.engine(), msgspec.structs.replace(serve.chat(), trusts_request_templates=True)


def _json(name: str, value: Mapping[str, Any]) -> str:
    """Raises ConfigError."""
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError):
        raise ConfigError(f"{name} {reprlib.repr(value)}: expected a mapping as JSON has them, or JSON") from None


def _serve_defaults() -> dict[str, Any]:
    """The signature of `pd-cluster serve` is where they are written."""
    from pd_cluster.cli import serve

    return {name: each.default for name, each in inspect.signature(serve).parameters.items() if name != "context"}


def _as_flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [] if value is None else [flag, str(value)]


def _judge(name: str, value: Any) -> None:
    """An argument that is none of serve's flags. Raises ConfigError."""
    flag = f"--{name.replace('_', '-')}"
    without_effect = NO_EFFECT.get(flag) or OTHERS_WITHOUT_EFFECT.get(name)
    refused = REFUSED.get(flag) or OTHERS_REFUSED.get(name)
    if without_effect is not None:
        if without_effect.values:
            if str(value) not in without_effect.values:
                raise ConfigError(f"{name} {value!r}: not supported ({without_effect.why}); leave it out")
        elif value is not False:
            log.warning("%s has no effect: %s", name, without_effect.why)
    elif refused is not None:
        if value and str(value).lower() != "none":
            raise ConfigError(f"{name} {reprlib.repr(value)}: {_in_python(refused)}; leave it out")
    else:
        raise ConfigError(_unknown(name))


def _in_python(text: str) -> str:
    return re.sub(r"--([a-z][a-z0-9-]+)", lambda flag: flag[1].replace("-", "_"), text)


def _unknown(name: str) -> str:
    published = [flag[2:].replace("-", "_") for flag in (*NO_EFFECT, *REFUSED)]
    own = ("prefill", "decode", "max_context_len_to_capture")
    known = [*HONOURED, *WORKERS, *SERVER, *ALIASES, *OTHERS_WITHOUT_EFFECT, *OTHERS_REFUSED, *published, *own]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"{name}: unknown argument{f'; did you mean {near[0]}?' if near else '; docs/flags.md has those of serve'}"
