"""From `LLM`'s arguments to an OfflineConfig: those of `pd-cluster serve` by their Python names, validated as there.

Each is honoured, accepted with one warning where it cannot matter, or refused with the reason; an unknown one is an
error with the nearest known name. Starts nothing.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from pd_cluster.errors import ConfigError, flag_of, told
from pd_cluster.media.download import ANY_HOST
from pd_cluster.offline.session import OfflineConfig
from pd_cluster.settings.flags import NO_EFFECT, REFUSED, Ignored
from pd_cluster.settings.media import MediaSettings
from pd_cluster.settings.options import ServeOptions, settings
from pd_cluster.settings.requests import Assurances, RequestSettings
from pd_cluster.settings.setting import Scope
from pd_cluster.text.given_template import with_source

log = logging.getLogger(__name__)

MISSPELT = {"resoning_parser": "reasoning_parser"}  # FastDeploy's document misspells it once
NO_SERVER = Ignored("nothing is served offline")
# FastDeploy's arguments without a flag here.
OTHERS_WITHOUT_EFFECT = {
    "metrics_port": NO_SERVER,
    "engine_worker_queue_port": NO_SERVER,
    "cache_queue_port": NO_SERVER,
    "data_parallel_size": Ignored("there is one engine", values=("1",)),
    "enable_custom_all_reduce": Ignored("there is no custom all-reduce"),
    "enable_logprob": Ignored("logprobs are there for who asks"),
    "graph_optimization_config": Ignored("graphs are captured without it; see graph_sizes"),
    "dynamic_load_weight": Ignored("weights are loaded once", values=("0", "False")),
    "long_prefill_token_threshold": Ignored("prefill shares a step's tokens in order of arrival"),
    "max_concurrency": NO_SERVER,
    "max_long_partial_prefills": Ignored("prefill shares a step's tokens in order of arrival"),
    "max_num_partial_prefills": Ignored("prefill shares a step's tokens in order of arrival"),
    "max_waiting_time": NO_SERVER,
    "splitwise_role": Ignored("give prefill= and decode=, the numbers of worker processes", values=("mixed",)),
    "static_decode_blocks": Ignored("a request takes blocks as it needs them"),
    "use_cudagraph": Ignored("graphs are captured without it; see graph_sizes"),
    "use_warmup": Ignored("a model is tried when it is loaded"),
}
OTHERS_REFUSED = {
    "enable_expert_parallel": "experts are not placed by themselves",
    "guided_decoding_disable_any_whitespace": "whitespace follows the guide; leave it out",
    "innode_prefill_ports": "give prefill= and decode=, the numbers of worker processes",
    "lm_head_fp32": "logits are computed in the model's dtype; give dtype='float32'",
    "kv_cache_ratio": "blocks are not divided between prompts and answers: every request may have any of them",
}
# The signature's own defaults, which change nothing.
DEFAULTS = {"gpu_memory_utilization": 0.9, "max_seq_len_to_capture": 8192, "swap_space": 4}
HERE = (Scope.ENGINE, Scope.TEXT)  # the scopes that apply without a server and without worker processes


def config_of(given: Mapping[str, Any], prefill: int = 0, decode: int = 0) -> OfflineConfig:
    """Reads the arguments. Raises ConfigError and ModelError, which name the argument."""
    if "model" in given and given["model"] is None:
        raise ConfigError("model None: expected a folder, or the name of a hub's model")
    if given.get("max_context_len_to_capture") is not None:
        log.warning("max_context_len_to_capture is the older name of max_seq_len_to_capture, which goes before it")
    arguments = _by_setting(given)
    num_ranks = arguments.get("tensor_parallel_size", 1)
    if isinstance(num_ranks, int) and num_ranks > 1 and not prefill and not decode:
        prefill = decode = 1  # several ranks need several processes
        log.warning(
            "tensor_parallel_size=%d: a prefill and a decode instance of %d ranks each, both with all the weights "
            "(prefill=1, decode=1)",
            num_ranks,
            num_ranks,
        )
    honoured, flags = {}, []
    for name, value in arguments.items():
        each = settings().get(name)
        if each is None:
            _judge(name, value)
        elif each.setting.scope in HERE:
            honoured[name] = value
        elif each.setting.scope is Scope.WORKERS and prefill:
            flags += [part for flag in each.flags(value) for part in flag]
        elif value != each.default:
            is_workers = each.setting.scope is Scope.WORKERS
            why = "the engine runs in this process (prefill, decode)" if is_workers else NO_SERVER.why
            log.warning("%s has no effect: %s", name, why)
    with in_python_names():
        options = ServeOptions.typed(honoured)
        options.read(Assurances)
        answers = options.read(RequestSettings)
        media = options.read(MediaSettings)
        if "allowed_media_domains" not in honoured:
            media = msgspec.structs.replace(media, domains=(ANY_HOST,))
        return OfflineConfig(
            engine=options.engine(),
            chat=msgspec.structs.replace(with_source(options.chat()), trusts_request_templates=True),
            media=media,
            prefill=prefill,
            decode=decode,
            max_logprobs=answers.max_logprobs,
            # A server limits answers by the file's max_new_tokens; an offline caller's own limit applies here.
            sampling_override={"max_new_tokens": None, **answers.sampling_override},
            structured_outputs=answers.structured_outputs,
            arguments=tuple(flags),
        )


def _by_setting(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given arguments other than defaults, by the settings' own names, in the types of a command line."""
    aliases = MISSPELT | {alias: each.name for each in settings().values() for alias in each.names[1:]}
    found: dict[str, Any] = {}
    for name in sorted(given, key=aliases.__contains__, reverse=True):  # a name comes after its alias, and overrides it
        setting, value = aliases.get(name, name), given[name]
        if value is not None and value != DEFAULTS.get(setting):  # the signature's default overrides nothing
            found[setting] = value
    for name, value in found.items():
        each = settings().get(name)
        if isinstance(value, os.PathLike):
            found[name] = os.fspath(value)
        elif each is not None and each.takes_mappings and isinstance(value, Mapping):
            found[name] = _json(name, value)
    return found


@contextmanager
def in_python_names() -> Iterator[None]:
    """Makes errors of code shared with the command line name arguments instead of flags."""
    try:
        yield
    except ConfigError as error:
        raise error.named(str) from None


def _json(name: str, value: Mapping[str, Any]) -> str:
    """Encodes a mapping. Raises ConfigError."""
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError):
        raise ConfigError(f"{name} {reprlib.repr(value)}: expected a mapping as JSON has them, or JSON") from None


def _judge(name: str, value: Any) -> None:
    """Checks an argument that is not a flag of serve. Raises ConfigError."""
    flag = flag_of(name)
    without_effect = NO_EFFECT.get(flag) or OTHERS_WITHOUT_EFFECT.get(name)
    refused = REFUSED.get(flag) or OTHERS_REFUSED.get(name)
    if without_effect is not None:
        if without_effect.values:
            if str(value) not in without_effect.values:
                raise ConfigError(f"{name} {value!r}: not supported ({without_effect.why}); leave it out")
            asks_for_nothing = str(value) not in without_effect.unmet
        else:
            asks_for_nothing = value is False
        if not asks_for_nothing:
            log.warning("%s has no effect: %s", name, told(without_effect.why, str))
    elif refused is not None:
        if value and str(value).lower() != "none":
            raise ConfigError(f"{name} {reprlib.repr(value)}: {told(refused, str)}; leave it out")
    else:
        raise ConfigError(_unknown(name))


def _unknown(name: str) -> str:
    published = [flag[2:].replace("-", "_") for flag in (*NO_EFFECT, *REFUSED)]
    ours = [name for each in settings().values() for name in each.names]
    known = [*ours, *MISSPELT, *OTHERS_WITHOUT_EFFECT, *OTHERS_REFUSED, *published, "prefill", "decode"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"{name}: unknown argument{f'; did you mean {near[0]}?' if near else '; docs/flags.md has those of serve'}"
