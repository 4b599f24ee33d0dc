"""`--speculative-config`: vLLM's keys (0.32), as one JSON object.

    {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}

`method` may also be a list, whose methods are tried in order; a `model` without a method is a draft model. At most one
method may have weights. Errors name unsupported methods and keys.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.flags_without_setting import NOTHING
from pd_cluster.settings.setting import Check, Form, one_of
from pd_cluster.settings.speculation import (
    METHODS,
    MOST_DRAFTS,
    MTP_TYPES,
    SAMPLE_METHODS,
    WITH_WEIGHTS,
    Method,
    Speculation,
)
from pd_cluster.types import INT32_MAX

Place = Callable[[str], str]  # maps a key to its name in errors

METHOD, MODEL, BATCHES = "method", "model", "num_speculative_tokens_per_batch_size"
LEAST, MOST = "prompt_lookup_min", "prompt_lookup_max"
SERVED = f"give {' or '.join(METHODS)}"
NGRAM_AS_MODEL = ("ngram", "[ngram]")  # vLLM also accepts the method as a model
NEEDS_MODEL: dict[str, str] = {"draft_model": "a draft model", "eagle3": "an EAGLE-3 head"}
MTP: Method = "mtp"
REFUSED = {
    "eagle": "only EAGLE-3 heads are supported; give eagle3 and such a head, or another method",
    **dict.fromkeys(("medusa", "mlp_speculator", "dflash", "dspark"), f"not supported; {SERVED}"),
    "ngram_gpu": "prompts are searched on the host; give ngram",
    "custom_class": f"foreign code is not loaded; {SERVED}",
    "extract_hidden_states": f"drafts nothing; {SERVED}, and use /v1/embeddings for vectors",
}
REVISION, QUANTIZATION, MAX_LEN = "revision", "quantization", "max_model_len"
TP_SIZE, SAMPLE = "draft_tensor_parallel_size", "draft_sample_method"
OF_A_MODEL = (MODEL, REVISION, QUANTIZATION, MAX_LEN, TP_SIZE, SAMPLE)
OF_A_HEAD = {"eagle3": (MODEL, REVISION, TP_SIZE, SAMPLE), "mtp": (MODEL, TP_SIZE, SAMPLE)}
NOT_OF_A_MODEL = (
    *("code_revision", "enforce_eager", "moe_backend", "attention_backend", "kv_cache_dtype"),
    *("disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction"),
    *("use_heterogeneous_vocab", "parallel_drafting", "enable_adaptive_verification", "dspark_draft_topk"),
    "index_share_for_mtp_iteration",
)
REFUSED_KEYS = {
    **dict.fromkeys(NOT_OF_A_MODEL, "not supported; leave it out: the draft model follows the engine's own flag"),
    "synthetic_acceptance_rates": "would change answers; leave it out",
    "synthetic_acceptance_length": "would change answers; leave it out",
    "disable_by_batch_size": f"give {BATCHES}, such as [[1, 4, 8], [5, 256, 0]]",
}
# a draft is accepted only if it equals the token that would be sampled
ACCEPTANCE, EXACT = "rejection_sample_method", ("standard", "block")
NUMBERS: dict[str, tuple[type, tuple[Check, ...]]] = {
    name: (get_args(hint)[0], tuple(each for each in get_args(hint)[1:] if isinstance(each, Check)))
    for name, hint in get_type_hints(Speculation, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
KEYS = (METHOD, *OF_A_MODEL, *(name for name in NUMBERS if name not in OF_A_MODEL), BATCHES, ACCEPTANCE)


def speculation_of(given: Mapping[str, Any], place: Place) -> Speculation:
    """Reads the keys; null means not given. Raises ConfigError."""
    given = {key: value for key, value in given.items() if not (value is None or _is_unset_of_model(key, value))}
    methods, mtp_type = _methods(given, place)
    for key in given:
        if key not in KEYS and not (key in REFUSED_KEYS and _is_unset(given[key])):
            raise ConfigError(f"{place(key[:80])}: {REFUSED_KEYS.get(key) or _no_such('key', key, KEYS)}")
    if (acceptance := given.get(ACCEPTANCE, EXACT[0])) not in EXACT:
        why = "would change answers; give" if acceptance == "synthetic" else "expected"
        raise ConfigError(f"{place(ACCEPTANCE)} {reprlib.repr(acceptance)}: {why} {' or '.join(EXACT)}")
    model = _model_keys(given, methods, place)
    numbers: dict[str, Any] = {key: _number(given[key], key, place) for key in NUMBERS if key in given}
    return Speculation(
        methods=methods,
        mtp_type=mtp_type,
        num_speculative_tokens_per_batch_size=_ranges(given[BATCHES], place) if BATCHES in given else (),
        **{**model, **numbers, **_lookup(numbers, place)},
    )


def _methods(given: Mapping[str, Any], place: Place) -> tuple[tuple[Method, ...], str]:
    """Returns the methods, and the name of MTP_TYPES that was given for mtp, or "".

    Raises ConfigError for an unsupported method, for no method, for two methods with weights, and for a model without a
    method that uses it.
    """
    method, model = given.get(METHOD), given.get(MODEL)
    if method is None and model is not None:
        method = "ngram" if model in NGRAM_AS_MODEL else "draft_model"
    names: list[Any] = method if isinstance(method, list) else [] if method is None else [method]
    if not names:
        raise ConfigError(f"{place(METHOD)}: missing; {SERVED}")
    for each in names:
        if not isinstance(each, str) or each not in (*METHODS, *MTP_TYPES):
            raise ConfigError(f"{place(METHOD)} {reprlib.repr(each)}: {_no_method(each)}")
    several: list[Method] = [MTP if each in MTP_TYPES else each for each in names]
    if len(set(several)) < len(several):
        raise ConfigError(f"{place(METHOD)} {reprlib.repr(names)}: give each method once")
    if len(weighty := [each for each in several if each in WITH_WEIGHTS]) > 1:
        raise ConfigError(f"{place(METHOD)}: only one method may have weights; give one of {' and '.join(weighty)}")
    _check_model(model, several, place)
    return tuple(several), next((each for each in names if each in MTP_TYPES), "")


def _check_model(model: Any, methods: list[Method], place: Place) -> None:
    """Raises ConfigError for a model that no method uses, and for a missing model."""
    needed = next((what for method, what in NEEDS_MODEL.items() if method in methods), "")
    if needed and (not isinstance(model, str) or model in NGRAM_AS_MODEL):
        missing = "missing" if model is None else f"{reprlib.repr(model)}: not {needed}"
        where = f"{place(MODEL)}{':' if model is None else ''}"
        raise ConfigError(f"{where} {missing}; give {needed}: a folder, or a hub's model")
    is_asked_for = needed or MTP in methods or ("ngram" in methods and model in NGRAM_AS_MODEL)
    if model is not None and not is_asked_for:
        raise ConfigError(f"{place(MODEL)} {reprlib.repr(model)}: {' and '.join(methods)} needs no model; leave it out")


def _model_keys(given: Mapping[str, Any], methods: tuple[Method, ...], place: Place) -> dict[str, str]:
    """Returns the text values for the method that has weights; {} without one. Raises ConfigError."""
    told = {key: given[key] for key in OF_A_MODEL if key in given}
    method = next((each for each in methods if each in WITH_WEIGHTS), None)
    if method is None:
        for key in told:
            if key != MODEL:
                raise ConfigError(f"{place(key)}: applies to a draft model; give {MODEL} with it, or leave it out")
        return {}
    if other := [key for key in told if key not in OF_A_HEAD.get(method, OF_A_MODEL)]:
        raise ConfigError(f"{place(other[0])}: applies to a draft model, and {method} has none; leave it out")
    if (size := told.pop(TP_SIZE, 1)) != 1 or isinstance(size, bool):
        what = "a draft model is not split" if method == "draft_model" else f"{method} is not split"
        raise ConfigError(f"{place(TP_SIZE)} {reprlib.repr(size)}: {what}; give 1, or leave it out")
    texts = {key: value for key, value in told.items() if key != MAX_LEN}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{place(key)} {reprlib.repr(value)}: expected a text")
    rule = one_of(SAMPLE_METHODS)
    if SAMPLE in texts and not rule.accepts(texts[SAMPLE]):
        raise ConfigError(f"{place(SAMPLE)} {reprlib.repr(texts[SAMPLE])}: {rule.says}")
    return texts


def _is_unset(value: Any) -> bool:
    """Returns whether this value of a key is the same as leaving the key out."""
    return value is False or value in ("", "auto")


def _is_unset_of_model(key: str, value: Any) -> bool:
    return value == "" if key == MODEL else key in OF_A_MODEL and _is_unset(value)


def _no_method(method: Any) -> str:
    """Returns why a method is not supported."""
    if not isinstance(method, str):
        return f"expected {' or '.join(METHODS)}, or a list of them"
    if method.endswith("_mtp"):
        types = ", ".join(each for several in MTP_TYPES.values() for each in several)
        return f"no model of that type is served with MTP layers; give {MTP} with one of {types}"
    return REFUSED.get(method) or _no_such("method", method, METHODS)


def _no_such(kind: str, given: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return f"no such {kind}; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")


def _number(value: Any, key: str, place: Place) -> Any:
    """Raises ConfigError."""
    kind, checks = NUMBERS[key]
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        what = "a number" if kind is float else "a whole number"
        raise ConfigError(f"{place(key)} {reprlib.repr(value)}: expected {what}")
    for each in checks:
        if not each.accepts(value):
            raise ConfigError(f"{place(key)} {value}: {each.says}")
    return kind(value)


def _lookup(numbers: Mapping[str, Any], place: Place) -> dict[str, int]:
    """Returns the minimum and maximum length to look up; if one is missing it equals the other. Raises ConfigError."""
    found = {key: numbers[key] for key in (LEAST, MOST) if key in numbers}
    if len(found) == 1:
        (only,) = found.values()
        return {LEAST: only, MOST: only}
    if found and found[LEAST] > found[MOST]:
        raise ConfigError(f"{place(LEAST)} {found[LEAST]}: is above {place(MOST)} {found[MOST]}; give a lower value")
    return found


def _ranges(given: Any, place: Place) -> tuple[tuple[int, int, int], ...]:
    """Returns the ranges in order. Raises ConfigError."""
    where = f"{place(BATCHES)} {reprlib.repr(given)}"
    try:
        ranges = tuple(sorted(msgspec.convert(given, tuple[tuple[int, int, int], ...])))
    except msgspec.ValidationError:
        raise ConfigError(f"{where}: expected ranges [first, last, drafts], such as [[1, 4, 8], [5, 256, 0]]") from None
    before = 0
    for first, last, most in ranges:
        if not 1 <= first <= last <= INT32_MAX or not 0 <= most <= MOST_DRAFTS:
            what = f"numbers of sequences from 1 on, and 0 to {MOST_DRAFTS} drafts"
            raise ConfigError(f"{where}: [{first}, {last}, {most}]: expected {what}")
        if first <= before:
            raise ConfigError(f"{where}: ranges overlap at {first}; give each number of sequences once")
        if not before and first > 1:
            raise ConfigError(f"{where}: begins at {first}; the first range must begin at 1")
        before = last
    return ranges


def _read(name: str, written: str) -> Speculation:
    if written.lower() in NOTHING:
        return Speculation()
    try:
        given = json.loads(written)
    except ValueError as error:
        raise ConfigError(f"{called(name)} {written[:80]!r}: is not JSON ({error})") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{called(name)} {written[:80]!r}: expected an object with {', '.join(KEYS)}")
    return speculation_of(given, lambda key: f"{called(name)}: {key}")


def _write(speculation: Speculation) -> str:
    """Returns "" for the default, which drafts only from predictions and guides."""
    if not speculation.methods:
        return ""
    plain = Speculation()
    names = dict.fromkeys((*OF_A_MODEL, *NUMBERS, BATCHES))
    given = {name: getattr(speculation, name) for name in names if name != TP_SIZE}
    told = {name: value for name, value in given.items() if value != getattr(plain, name)}
    if LEAST in told or MOST in told:  # a single value would also set the other one
        told |= {name: given[name] for name in (LEAST, MOST)}
    methods = [speculation.mtp_type or each if each == MTP else each for each in speculation.methods]
    return msgspec.json.encode({METHOD: methods, **told}).decode()


SPECULATION = Form(str, _read, _write, takes_mappings=True)
