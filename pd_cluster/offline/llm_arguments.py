"""Converts `LLM`'s arguments to an OfflineConfig: flags of `pd-cluster serve` by their Python names, checked as there.

Each argument is honoured, ignored with one warning if it cannot matter, or refused with the reason. The error for an
unknown argument suggests the nearest known name. Starts nothing.
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

from pd_cluster.errors import ConfigError, called, flag_of, told
from pd_cluster.media.media_download import ANY_HOST
from pd_cluster.offline.offline_service import OfflineConfig
from pd_cluster.settings.flags_without_setting import Family, Takes, table
from pd_cluster.settings.media_settings import MediaSettings
from pd_cluster.settings.request_settings import Assurances, RequestSettings
from pd_cluster.settings.serve_options import ServeOptions, settings
from pd_cluster.settings.setting import Scope
from pd_cluster.settings.value_spellings import BYTES, in_own_terms
from pd_cluster.settings.vllm_flags import refusal
from pd_cluster.settings.vllm_flags_without_setting import FOREIGN, foreign
from pd_cluster.settings.vllm_variables import warnings_of
from pd_cluster.text.template_source import with_source

log = logging.getLogger(__name__)

MISSPELT = {"resoning_parser": "reasoning_parser"}  # FastDeploy's documentation misspells it once
NO_SERVER = "there is no server offline"
# FastDeploy's arguments without a flag here.
OTHERS = table(
    (
        Family(
            NO_SERVER,
            accepted="--metrics-port --engine-worker-queue-port --cache-queue-port --max-concurrency "
            "--max-waiting-time",
        ),
        Family("there is no custom all-reduce", accepted="--enable-custom-all-reduce"),
        Family("logprobs are always available", accepted="--enable-logprob"),
        Family(
            f"graphs are captured without it; see {called('graph_sizes')}",
            accepted="--graph-optimization-config --use-cudagraph",
        ),
        Family("weights are loaded once", refused="--dynamic-load-weight=0|False"),
        Family(
            "give prefill= and decode=, the numbers of worker processes",
            refused="--splitwise-role=mixed --innode-prefill-ports",
        ),
        Family("a request takes blocks as it needs them", accepted="--static-decode-blocks"),
        Family("every model is warmed up at load", accepted="--use-warmup"),
        Family(
            "whitespace follows the guide; leave it out",
            refused="--guided-decoding-disable-any-whitespace",
        ),
        Family("logits are computed in the model's dtype; give dtype='float32'", refused="--lm-head-fp32"),
        Family(
            "blocks are not divided between prompts and answers: every request may use any block",
            refused="--kv-cache-ratio",
        ),
    )
)
# Defaults of the signature; an argument with this value counts as not given, and has no effect.
DEFAULTS = {"gpu_memory_utilization": 0.9, "max_seq_len_to_capture": 8192, "swap_space": 4}
HERE = (Scope.ENGINE, Scope.TEXT)  # the scopes that apply without a server and worker processes


def config_of(given: Mapping[str, Any], prefill: int = 0, decode: int = 0) -> OfflineConfig:
    """Reads the arguments. Raises ConfigError and ModelError, which name the argument."""
    if "model" in given and given["model"] is None:
        raise ConfigError("model None: expected a folder, or the name of a model of a hub")
    if given.get("max_context_len_to_capture") is not None:
        log.warning("max_context_len_to_capture is the older name of max_seq_len_to_capture, which takes precedence")
    for warning in warnings_of(os.environ, str):
        log.warning("%s", warning)
    arguments = _by_setting(given)
    if not prefill and not decode:
        prefill = decode = _num_instances(arguments)
    if given_classes := arguments.get("logits_processors"):
        arguments["logits_processors"] = [_class_name(each, bool(prefill)) for each in given_classes]
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
            why = "the engine runs in this process (prefill, decode)" if is_workers else NO_SERVER
            log.warning("%s has no effect: %s", name, why)
    with in_python_names():
        options = ServeOptions.typed(honoured)
        for remark in options.remarks():
            log.warning("%s", remark)
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
            # A server limits answers to the file's max_new_tokens; offline, only the caller's limit applies.
            sampling_override={"max_new_tokens": None, **answers.sampling_override},
            structured_outputs=answers.structured_outputs,
            arguments=tuple(flags),
        )


def _num_instances(arguments: Mapping[str, Any]) -> int:
    """Returns how many instances of each role are needed for the arguments' ranks; 0: one process is enough."""
    names = "tensor_parallel_size", "data_parallel_size"
    num_ranks, number = (size if isinstance(size := arguments.get(name, 1), int) else 1 for name in names)
    if number > 1:
        log.warning("data_parallel_size=%d: %d prefill and %d decode instances (prefill=%d, decode=%d)", *[number] * 5)
        return number
    if num_ranks > 1:
        log.warning(
            "tensor_parallel_size=%d: a prefill and a decode instance of %d ranks each, both with all the weights "
            "(prefill=1, decode=1)",
            *[num_ranks] * 2,
        )
        return 1
    return 0


def _by_setting(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that differ from their defaults, by setting, in the types that a command line gives."""
    aliases = MISSPELT | {alias: each.name for each in settings().values() for alias in each.names[1:]}
    found: dict[str, Any] = {}
    with in_python_names():
        given = in_own_terms(given)
    for name in sorted(
        given, key=aliases.__contains__, reverse=True
    ):  # aliases come first, so that a setting's own name overrides them
        setting, value = aliases.get(name, name), given[name]
        if value is not None and value != DEFAULTS.get(setting):  # the signature's default does not count as given
            found[setting] = value
    for name, value in found.items():
        each = settings().get(name)
        if isinstance(value, os.PathLike):
            found[name] = os.fspath(value)
        elif each is not None and each.takes_mappings and isinstance(value, Mapping):
            found[name] = _json(name, value)
        elif each is not None and each.setting.is_several and isinstance(value, int | str):
            found[name] = [value]
    return found


@contextmanager
def in_python_names() -> Iterator[None]:
    """Makes errors name arguments instead of flags, also in code that the command line uses."""
    try:
        yield
    except ConfigError as error:
        raise error.named(str) from None


def _class_name(given: Any, is_split: bool) -> Any:
    """Returns a logits processor's class as MODULE:CLASS, and anything else unchanged. Raises ConfigError.

    `is_split`: worker processes import it.
    """
    if not isinstance(given, type):
        return given
    name = f"{given.__module__}:{given.__qualname__}"
    if "<locals>" in name or (is_split and given.__module__ == "__main__"):
        raise ConfigError(f"logits_processors {name}: the engine cannot import it; define the class in a module's body")
    return name


def _json(name: str, value: Mapping[str, Any]) -> str:
    """Encodes a mapping. Raises ConfigError."""
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError):
        raise ConfigError(f"{name} {reprlib.repr(value)}: expected a mapping that JSON can express, or JSON") from None


def _judge(name: str, value: Any) -> None:
    """Checks an argument that is not a flag of serve. Raises ConfigError."""
    flag = flag_of(name)
    known = foreign(flag)
    each = OTHERS.get(flag) or (known[0] if known is not None and not known[1] else None)
    if each is None:
        raise ConfigError(_unknown(name))
    if each.values is None:
        has_warning = value is not False
    else:
        text = str(bool(value)) if each.takes is Takes.SWITCH else str(value)
        is_empty = not value and (not each.values or not isinstance(value, int | float))
        if not is_empty and not each.accepts(text):
            raise ConfigError(told(refusal(each, name, reprlib.repr(value), "; leave it out"), str))
        has_warning = text in each.unmet
    if has_warning:
        log.warning("%s has no effect: %s", name, told(each.why, str))


def _unknown(name: str) -> str:
    published = [flag[2:].replace("-", "_") for flag in (*FOREIGN, *OTHERS)]
    ours = [name for each in settings().values() for name in each.names]
    near = difflib.get_close_matches(name, [*ours, *MISSPELT, *BYTES, *published, "prefill", "decode"], n=1, cutoff=0.6)
    return f"{name}: unknown argument{f'; did you mean {near[0]}?' if near else '; docs/flags.md has those of serve'}"
