"""Reads a LoRA adapter's adapter_config.json, as PEFT writes it. Knows nothing of tensors.

An unsupported field that changes results is an error that names it, because wrong answers would look right.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.errors import ModelError

MOST_PATTERNS = 1024
# Names of modules, in which "." is literal and "\d+" matches a number. No digit may follow "\d+", so a match is unique.
PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_]|\\?\.|\\d\+(?![0-9]|\\d)){1,256}")
HARMLESS_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # these leave the base unchanged
# Fields that affect results only through the tensors or other fields.
NO_EFFECT = (
    *("alpha_pattern", "rank_pattern", "r", "lora_alpha", "use_rslora", "fan_in_fan_out", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "target_modules", "exclude_modules", "peft_type", "task_type"),
    *("base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version", "auto_mapping"),
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("runtime_config", "bias", "arrow_config", "modules_to_save", "target_parameters"),
)
WHY_NOT = {
    "use_dora": "DoRA, which also scales the base's products, is not supported",
    "trainable_token_indices": "replacing rows of embeddings is not supported",
    "ensure_weight_tying": "embedding and output layer are adapted separately; train without it",
    "layer_replication": "repeated layers are not supported",
    "lora_bias": "biases of adapters are not supported",
    "alora_invocation_tokens": "an adapter always applies to the whole prompt",
}


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of adapter_config.json that, with the tensors, determine results.

    Patterns map suffixes of module names to ranks or alphas; the first match counts. `layers` None: all layers.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    layers: tuple[int, ...] | None = None

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor of B @ A: alpha / rank, or alpha / sqrt(rank) with rsLoRA (PEFT's `use_rslora`)."""
        rank = self.rank_of(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )


def modules_to_save(file: Path, data: bytes) -> list[str]:
    """Returns name suffixes of the modules that the adapter replaces. `data`: the file's content. Raises ModelError."""
    found = json.loads(data).get("modules_to_save") or []
    if not isinstance(found, list) or len(found) > MOST_PATTERNS or not all(isinstance(each, str) for each in found):
        raise ModelError(f"{file}: modules_to_save {reprlib.repr(found)}: expected names of modules")
    return list(dict.fromkeys(found))


def _matching(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Returns the value of the first key that matches a module's whole name, or its end after a dot."""
    return next((value for key, value in pattern.items() if _ending(key).fullmatch(module)), default)


@lru_cache(4 * MOST_PATTERNS)
def _ending(key: str) -> re.Pattern[str]:
    """Compiles a key that PATTERN accepts; matching takes linear time."""
    body = re.sub(r"\\?\.", r"\\.", key.removeprefix("^")).replace(r"\d+", r"\d++")
    return re.compile(body if key.startswith("^") else rf"(?:.*\.)?{body}")


def read_settings(file: Path, data: bytes) -> LoraSettings:
    """Reads the file's content. Raises ModelError that names the field."""
    try:
        given = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ModelError(f"{file}: expected a JSON object")
    if (kind := given.get("peft_type")) != "LORA":
        raise ModelError(f"{file}: peft_type {reprlib.repr(kind)} is not supported here; only LORA is")
    _check_supported(file, given)
    layers = given.get("layers_to_transform")
    return LoraSettings(
        rank=_whole(file, "r", given.get("r", 8)),
        alpha=_number(file, "lora_alpha", given.get("lora_alpha", 8)),
        is_rank_stabilized=_switch(file, given, "use_rslora"),
        rank_pattern={key: _whole(file, f"rank_pattern {key}", n) for key, n in _pattern(file, given, "rank_pattern")},
        alpha_pattern={
            key: _number(file, f"alpha_pattern {key}", n) for key, n in _pattern(file, given, "alpha_pattern")
        },
        layers=None if layers is None or layers == [] else _layers(file, layers),
    )


def _check_supported(file: Path, given: Mapping[str, Any]) -> None:
    """Raises ModelError for an unsupported field that changes results."""
    if (bias := given.get("bias", "none")) != "none":
        raise ModelError(
            f"{file}: bias {reprlib.repr(bias)}: biases of the base are not replaced; train with bias none"
        )
    init = given.get("init_lora_weights")
    if not any(init is each if isinstance(each, bool | None) else init == each for each in HARMLESS_INITS):
        raise ModelError(
            f"{file}: init_lora_weights {reprlib.repr(init)}: these tensors are right only with the changed base from "
            f"which training began; save the adapter converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    _switch(file, given, "fan_in_fan_out")  # checked only: it does not change the layout of A and B
    for name, value in given.items():
        if name not in NO_EFFECT and value:
            why = WHY_NOT.get(name, "this field is not known here, and may change what is computed")
            raise ModelError(f"{file}: {name} {reprlib.repr(value)}: {why}")


def _switch(file: Path, given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name) or False
    if not isinstance(value, bool):
        raise ModelError(f"{file}: {name} {reprlib.repr(value)}: expected true or false")
    return value


def _pattern(file: Path, given: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    pattern = given.get(name) or {}
    if not isinstance(pattern, dict) or len(pattern) > MOST_PATTERNS:
        raise ModelError(f"{file}: {name}: expected an object with at most {MOST_PATTERNS} names of modules")
    for key in pattern:
        if PATTERN.fullmatch(key) is None:
            raise ModelError(
                f"{file}: {name} {reprlib.repr(key)}: expected the end of a module's name, with \\d+ for a whole "
                f"number; write one key for each module"
            )
    return list(pattern.items())


def _layers(file: Path, layers: Any) -> tuple[int, ...]:
    found = [layers] if isinstance(layers, int) else layers
    if not isinstance(found, list) or not all(type(each) is int and each >= 0 for each in found):
        raise ModelError(f"{file}: layers_to_transform {reprlib.repr(layers)}: expected layers' numbers")
    return tuple(sorted(set(found)))


def _whole(file: Path, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{file}: {name} {reprlib.repr(value)}: expected a whole number of at least 1")
    return value


def _number(file: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise ModelError(f"{file}: {name} {reprlib.repr(value)}: expected a finite number")
    return float(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
