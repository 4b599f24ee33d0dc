"""vLLM's command line flags in this project: honoured, accepted without effect, or refused with a reason.

The three lists are published in docs/flags.md (a test compares them). A flag in none of them is an error that names the
nearest known one. Honoured flags are the settings (options.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_cluster.errors import ConfigError, called, flag_of, told
from pd_cluster.settings.options import settings
from pd_cluster.settings.suggestions import meant_by


@dataclass(frozen=True, slots=True)
class Ignored:
    """`num_values` follow the flag. When `values` is not empty, only these are without effect; others are refused.

    `unmet`: those of the values that ask for what is not here, and so get a warning even in Python.
    """

    why: str
    num_values: int = 1
    values: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()


NO_EFFECT: dict[str, Ignored] = {
    "--data-parallel-size": Ignored("more instances take its place", values=("1",)),
    "--decode-context-parallel-size": Ignored("a sequence's KV cache is not divided", values=("1",)),
    "--prefill-context-parallel-size": Ignored("a prompt is not divided", values=("1",)),
    "--convert": Ignored("one server generates, embeds and scores", values=("auto", "none")),
    "--runner": Ignored("one server generates, embeds and scores", values=("auto", "generate")),
    "--model-impl": Ignored("there is one way to run a model", values=("auto", "transformers")),
    "--logprobs-mode": Ignored("they are computed from the model's own logits", values=("raw_logprobs",)),
    "--prefix-caching-hash-algo": Ignored("blocks are known by SHA-256", values=("sha256", "sha256_cbor")),
    "--max-num-partial-prefills": Ignored("prompts share a step in order", values=("1",)),
    "--max-long-partial-prefills": Ignored("prompts share a step in order", values=("1",)),
    "--long-prefill-token-threshold": Ignored("prompts share a step in order", values=("0",)),
    "--safetensors-load-strategy": Ignored("weights are mapped", values=("lazy", "auto")),
    "--performance-mode": Ignored("there is one mode", values=("balanced",)),
    "--enable-ssl-refresh": Ignored("certificates are read again when they change", 0),
    "--enable-log-deltas": Ignored("an answer is logged once, when it has ended", 0),
    "--no-enable-log-deltas": Ignored("an answer is logged once, when it has ended", 0),
    "--log-error-stack": Ignored("unexpected errors are always logged with their stack", 0),
    "--kv-cache-metrics": Ignored("/metrics has what is measured", 0),
    "--show-hidden-metrics-for-version": Ignored("/metrics has the older names, too"),
    "--skip-mm-profiling": Ignored("images, audio and video are not supported", 0),
    "--enable-scale-out": Ignored("/inference/v1/generate is always there", 0),
    "--tokens-only": Ignored("/inference/v1/generate is always there", 0),
    "--async-scheduling": Ignored("steps are always prepared ahead where the device allows it", 0),
    "--no-async-scheduling": Ignored("steps are always prepared ahead where the device allows it", 0),
    "--compilation-config": Ignored(f"nothing is compiled; see {called('enforce_eager')}"),
    "--optimization-level": Ignored(f"nothing is compiled; see {called('enforce_eager')}"),
    "--no-enable-chunked-prefill": Ignored("prefill is always chunked, which changes no answer", 0),
    "--h11-max-incomplete-event-size": Ignored("a request's line and headers are limited to 64 KiB"),
    "--disable-log-requests": Ignored(f"requests are not logged without {called('enable_log_requests')}", 0),
    "--collect-detailed-traces": Ignored(f"traces always have every part; see {called('otlp_traces_endpoint')}"),
    "--disable-log-stats": Ignored("statistics are not logged", 0),
    "--disable-custom-all-reduce": Ignored("there is no custom all-reduce", 0),
    "--disable-async-output-proc": Ignored("there is no such switch", 0),
    "--disable-frontend-multiprocessing": Ignored("the API always runs in a process of its own", 0),
    "--disable-sliding-window": Ignored("sliding windows follow the model", 0),
    "--enable-chunked-prefill": Ignored("prefill is always chunked", 0),
    "--enable-offline-docs": Ignored("/docs needs nothing from other hosts", 0),
    "--enable-per-request-metrics": Ignored("requests choose them with include_metrics", 0),
    "--enable-prompt-tokens-details": Ignored("usage always has them", 0),
    "--enable-sleep-mode": Ignored("the admin port always has /sleep and /wake_up", 0),
    "--enable-server-load-tracking": Ignored("/load is always there", 0),
    "--engine-use-ray": Ignored("processes are placed by rank tables, not by Ray", 0),
    "--worker-use-ray": Ignored("processes are placed by rank tables, not by Ray", 0),
    "--trust-remote-code": Ignored("code from a model folder is never run", 0),
    "--use-v2-block-manager": Ignored("there is one block manager", 0),
    "--distributed-executor-backend": Ignored("processes are placed by rank tables"),
    "--max-parallel-loading-workers": Ignored("weights are mapped, not loaded by workers"),
    "--num-scheduler-steps": Ignored("steps are always single"),
    "--scheduler-delay-factor": Ignored("the scheduler does not delay"),
    "--load-format": Ignored("weights are always safetensors", values=("auto", "safetensors")),
    "--uvicorn-log-level": Ignored(f"see {called('log_level')}"),
    "--max-prompt-adapters": Ignored("any number of prompt adapters takes part in a step"),
    "--pipeline-parallel-size": Ignored("there is one stage", values=("1",)),
    "--tokenizer-mode": Ignored(
        "fast and slow tokenizers give the same token ids", values=("auto", "slow"), unmet=("slow",)
    ),
}

REFUSED: dict[str, str] = {
    "--all2all-backend": "each rank has a share of every expert",
    "--enable-eplb": "each rank has a share of every expert, so that none is busier",
    "--enable-expert-parallel": "each rank has a share of every expert; leave it out",
    "--headless": "each instance is started by itself, with its place in the rank tables",
    "--logits-processors": "foreign code is not loaded",
    "--ssl-ciphers": "TLS takes OpenSSL's own choice",
    "--tool-server": "calls are answered by clients; the server runs no tools",
    "--code-revision": "code from a model folder is never run",
    "--disable-logprobs-during-spec-decoding": "speculative decoding is not supported",
    "--fully-sharded-loras": "each rank has the whole of one of an adapter's two matrices, which needs no further sums",
    "--kv-transfer-config": f"the handover is part of this project; see {called('kv_transport')}",
    "--long-lora-scaling-factors": "adapters of one context length are supported, others are not",
    "--lora-dtype": "adapters are computed in float32",
    "--lora-extra-vocab-size": "adapters with tokens of their own are not supported",
    "--middleware": "foreign code is not loaded",
    "--model-loader-extra-config": "weights are always safetensors",
    "--ngram-prompt-lookup-max": "speculative decoding is not supported",
    "--ngram-prompt-lookup-min": "speculative decoding is not supported",
    "--num-lookahead-slots": "speculative decoding is not supported",
    "--num-speculative-tokens": "speculative decoding is not supported",
    "--qlora-adapter-name-or-path": f"see {called('lora_modules')}, which any quantization takes",
    "--quantization-param-path": f"each vector of the KV cache has a scale of its own; see {called('kv_cache_dtype')}",
    "--ray-workers-use-nsight": "processes are placed by rank tables, not by Ray",
    "--spec-decoding-acceptance-method": "speculative decoding is not supported",
    "--speculative-config": "speculative decoding is not supported",
    "--speculative-disable-by-batch-size": "speculative decoding is not supported",
    "--speculative-draft-tensor-parallel-size": "speculative decoding is not supported",
    "--speculative-max-model-len": "speculative decoding is not supported",
    "--speculative-model": "speculative decoding is not supported",
    "--speculative-model-quantization": "speculative decoding is not supported",
    "--tokenizer-pool-extra-config": "there is no tokenizer pool",
    "--tokenizer-pool-type": "there is no tokenizer pool",
    "--tokenizer-pool-size": "there is no tokenizer pool",
    "--typical-acceptance-sampler-posterior-alpha": "speculative decoding is not supported",
    "--typical-acceptance-sampler-posterior-threshold": "speculative decoding is not supported",
}
SWITCHES = tuple(each.flag for each in settings().values() if each.default is True)  # accept an explicit True or False
# these accept `--served-model-name a b`, as argparse does with nargs="+"
MANY_VALUES = tuple(flag_of(name) for each in settings().values() if each.setting.is_several for name in each.names)
JSON_FLAGS = ("--compilation-config",)  # without effect, and also given member by member
OPTIMIZATION = re.compile(r"-O=?([0-9])")
ALIASES = {
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
    "-tp": "--tensor-parallel-size",
    "-q": "--quantization",
    "-pp": "--pipeline-parallel-size",
}


def normalize(argv: Sequence[str]) -> list[str]:
    """Translates vLLM's spellings: --max_model_len, -tp, several values after each of MANY_VALUES."""
    result: list[str] = []
    repeated = ""
    for argument in argv:
        if argument.startswith("-") and not _is_number(argument):
            if (level := OPTIMIZATION.fullmatch(argument)) is not None:
                argument = f"--optimization-level={level[1]}"
            flag, equals, value = argument.partition("=")
            short, dot, member = flag.partition(".")
            flag = ALIASES.get(short, short) + dot + member
            if flag.startswith("--"):
                flag = flag.replace("_", "-")
            repeated = flag if flag in MANY_VALUES else ""
            is_first = bool(repeated) and not equals
            is_switch = flag in SWITCHES and value in ("True", "False")
            result.append(_switch(flag, value) if is_switch else flag + equals + value)
            continue
        if repeated and not is_first:
            result.append(repeated)
        is_first = False
        if argument in ("True", "False") and result and result[-1] in SWITCHES:
            argument = _switch(result.pop(), argument)
        result.append(argument)
    return result


def _switch(flag: str, value: str) -> str:
    """Translates `--enable-prefix-caching False` to `--no-enable-prefix-caching`."""
    return flag if value == "True" else f"--no-{flag[2:]}"


def split_keys(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns normalized flags without --api-key, and its values."""
    return split_values(flags, "--api-key")


def split_values(flags: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Returns normalized flags without the one of this name, and its values."""
    rest: list[str] = []
    values: list[str] = []
    following = iter(flags)
    for argument in following:
        flag, equals, value = argument.partition("=")
        if flag != name:
            rest.append(argument)
        else:
            values.append(value if equals else next(following, ""))
    return rest, values


def choice_of_model(try_unlisted: Sequence[str], language_model_only: bool) -> list[str]:
    """Returns the flags that choose the model to serve."""
    given = {"try_unlisted": list(try_unlisted), "language_model_only": language_model_only}
    return ["=".join(flag) for name, written in given.items() for flag in settings()[name].flags(written)]


def judge(extras: Sequence[str], honoured: Iterable[str]) -> list[str]:
    """Judges arguments without a parameter of `serve`. Returns warnings; raises ConfigError."""
    warnings: list[str] = []
    rest = list(extras)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if (whole := flag.partition(".")[0]) in JSON_FLAGS:  # vLLM's `--compilation-config.mode 3`
            flag = whole
        if flag in NO_EFFECT:
            ignored = NO_EFFECT[flag]
            if ignored.num_values and not equals:
                if not rest or rest[0].startswith("--"):
                    raise ConfigError(f"{flag}: needs a value")
                value = rest.pop(0)
            elif rest[:1] in (["True"], ["False"]):  # vLLM's `--enable-chunked-prefill False`
                rest.pop(0)
            if ignored.values and value not in ignored.values:
                raise ConfigError(f"{flag} {value}: not supported ({ignored.why}); leave it out")
            warnings.append(f"{flag} has no effect: {told(ignored.why)}")
        elif flag in REFUSED:
            if not equals and rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            raise ConfigError(f"{flag}{f' {value}' if value else ''}: {REFUSED[flag]}")
        else:
            raise ConfigError(unknown(argument, [*honoured, *NO_EFFECT, *REFUSED]))
    return warnings


def unknown(argument: str, known: Sequence[str]) -> str:
    """Returns the error for a flag in none of the lists, with the nearest known one."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {argument!r}"
    near = meant_by(flag, known)
    return f"unknown flag {flag}{f'; did you mean {near}?' if near else '; see pd-cluster serve --help'}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
