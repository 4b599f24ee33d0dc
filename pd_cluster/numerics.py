"""Settings that affect a model's results: both ends of a link must agree on them, and block hashes depend on them.

Imports no torch. model/layers/rope/rope_scaling.py defines how a model uses positions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec

from pd_cluster.errors import ModelError, called

# `rope`, `key_order` and `bf16_way` are missing, because they follow from other settings. `deterministic` comes first,
# because it changes the attention.
SETTINGS = (
    "dtype",
    "quantization",
    "quantize_head",
    "kv_cache_dtype",
    "deterministic",
    "attention_backend",
    "hf_overrides",
    "logits_processors",
)
KEY_ORDER = f"the order of features in keys, which depends on the kind of device and {called('dtype')},"
BF16_WAY = f"the arithmetic in bfloat16, which depends on the processor ({called('dtype')} float32 avoids it),"
WHOLE_ROWS, LONG_SPANS = "codes of whole rows", "sums of up to 256 inputs"
CODES_WAY = f"the arithmetic of {called('quantization')}, which depends on pd-cluster's version (upgrade the older),"
DYNAMIC, LONGROPE, YARN, LINEAR = "dynamic", "longrope", "yarn", "linear"
ALREADY_STRETCHED = ("gemma3", "gemma3_text")  # model types whose max_position_embeddings include the factor
ROPE_FIELDS = ("rope_scaling", "rope_parameters", "rope_theta")
UNBOUNDED = 1 << 30  # tokens; means no maximum, because the dynamic base grows with any length
ROPE_NAMES = {"dynamic": DYNAMIC, "longrope": LONGROPE, "su": LONGROPE}  # "su": longrope's former name


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How positions beyond the trained length are rotated, if that depends on a request's length.

    `kind` "dynamic" (NTK): the base grows with the length. "longrope": one set of factors up to `reach` tokens, another
    beyond. A request's length is its prompt plus its maximum number of output tokens. This length is known on arrival
    and never changes, so all keys of a request are rotated alike, wherever and whenever they are computed.
    """

    kind: str = ""  # "": the rotation does not depend on the request
    reach: int = 0  # tokens; requests up to this length are rotated without scaling
    most: int = 0  # the maximum number of tokens of a request, if more than `reach` are allowed

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RopeScaling:
        """Reads a config.json. transformers names the fields in two ways. Raises ModelError for unsupported values."""
        given = config.get("rope_parameters") or config.get("rope_scaling")
        if not isinstance(given, dict):
            return cls()
        try:
            return cls._of(config, given)
        except (TypeError, ValueError) as error:
            raise ModelError(f"config.json: rope_scaling {reprlib.repr(given)}: {error}") from None

    @classmethod
    def _of(cls, config: Mapping[str, Any], given: Mapping[str, Any]) -> RopeScaling:
        if kinds := [name for name, each in given.items() if isinstance(each, dict) and _kind_of(each) == LONGROPE]:
            raise ModelError(
                f"config.json: rope_parameters.{kinds[0]}: longrope for only one kind of layers is not supported"
            )
        kind, trained = _kind_of(given), int(config.get("max_position_embeddings") or 0)
        if kind == DYNAMIC and given.get("alpha"):  # Hunyuan's: a fixed base, at every length
            float(given["alpha"])
            return cls()
        if kind == DYNAMIC:
            float(given.get("factor") or 1.0)
            return cls(kind=kind, reach=trained, most=UNBOUNDED)
        if kind == LONGROPE:
            name = "original_max_position_embeddings"
            reach = min(trained, int(config.get(name) or given.get(name) or trained))
            return cls(kind=kind, reach=reach, most=trained)
        return cls()

    def length(self, num_tokens: int) -> int:
        """Returns the length that determines the rotation of a request of this many tokens; 0: no scaling."""
        if num_tokens <= self.reach or not self.kind:
            return 0
        return num_tokens if self.kind == DYNAMIC else self.reach + 1


class RopeStretch(msgspec.Struct, frozen=True, kw_only=True):
    """Positions that are rotated more slowly, alike in every request: by YaRN, or linearly.

    `reach`: the number of positions. As in vLLM, it is the factor times the number before stretching, which is
    max_position_embeddings or, for YaRN, original_max_position_embeddings if that is given.
    """

    kind: str
    reach: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RopeStretch | None:
        """Reads a config.json; None: positions are not stretched. Raises ModelError for an invalid factor."""
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        if not isinstance(rope, dict) or not isinstance(positions := config.get("max_position_embeddings"), int):
            return None
        of_kinds = [each for each in rope.values() if isinstance(each, dict)]
        for given in of_kinds or [rope]:
            kind = str(given.get("rope_type", given.get("type")))
            is_stretched = kind == YARN or (kind == LINEAR and not of_kinds)
            if not is_stretched or config.get("model_type") in ALREADY_STRETCHED or given.get("factor") is None:
                continue
            name, factor = "original_max_position_embeddings", given["factor"]
            original = (config.get(name) or given.get(name) or positions) if kind == YARN else positions
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool) and isinstance(original, int)
            if not is_number or not 1 <= factor < UNBOUNDED:
                shown = reprlib.repr(given)
                raise ModelError(
                    f"config.json: rope_scaling {shown}: factor must be a number of at least 1, and {name} whole"
                )
            return cls(kind=kind, reach=int(original * factor))
        return None


class Numerics(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The numerics of one instance."""

    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = "auto"  # the setting on a CPU, the chosen backend on other devices
    deterministic: bool = False  # the setting, on every device
    # The scheme of weights that are quantized at load; a folder's own quantization is part of its identity. A suffix
    # prevents links with instances of earlier versions that computed differently: WHOLE_ROWS if activations are
    # quantized (earlier versions quantized each rank's part of a row), otherwise LONG_SPANS on a CPU (earlier versions
    # summed in another order).
    quantization: str = ""
    kv_cache_dtype: str = "float32"  # the pool's
    hf_overrides: str = "{}"  # canonical JSON
    rope: RopeScaling = RopeScaling()
    key_order: str = "model"  # the order of a head's features in the KV cache (model/layers/rope/rope_tables.py)
    bf16_way: str = ""  # how a CPU multiplies bfloat16 weights (native/packed_products.py); "": it does not
    quantize_head: str = ""  # the scheme of the output layer
    logits_processors: str = ""  # the operator's classes, which change tokens rather than KV
    weights: str = ""  # the digest of the weights that replaced the folder's; "" if they were not replaced

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def difference(self, other: Numerics, mixes_kv: bool = False) -> tuple[str, str, str] | None:
        """Returns the first setting that differs, in `called`'s form, and both values; None if all agree.

        `mixes_kv`: the pools' dtypes may differ. Attention backends may differ between two kinds of devices.
        """
        ignored = {"kv_cache_dtype"} if mixes_kv else set()
        for name in SETTINGS:
            own, others = getattr(self, name), getattr(other, name)
            if own != others and name not in ignored and (name != "attention_backend" or self.device == other.device):
                is_way = name == "quantization" and _scheme(own) == _scheme(others)
                return CODES_WAY if is_way else called(name), _written(own), _written(others)
        if self.rope != other.rope:
            return "rope_scaling", str(self.rope), str(other.rope)
        if self.bf16_way != other.bf16_way:
            return BF16_WAY, self.bf16_way or "none", other.bf16_way or "none"
        return None if self.key_order == other.key_order else (KEY_ORDER, self.key_order, other.key_order)


def _scheme(quantization: str) -> str:
    return quantization.removesuffix(WHOLE_ROWS).removesuffix(LONG_SPANS).removesuffix(", ")


def _written(value: str | bool) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else value or "none"


def canonical(overrides: Mapping[str, Any]) -> str:
    """Returns the same text for equal overrides; 1 and 1.0 are equal."""
    return json.dumps(_plain(overrides), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with `overrides` in place of its own values; mappings are merged into existing ones.

    Positions have two names, `rope_parameters` (with `rope_theta` inside) and `rope_scaling` (with `rope_theta` next to
    it). An override by either name changes the one that config.json has. Raises ModelError for an override without
    effect.
    """
    merged = dict(config)
    for name, value in overrides.items():
        if name not in ROPE_FIELDS:
            before = merged.get(name)
            merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    if any(name in overrides for name in ROPE_FIELDS):
        _override_rope(merged, overrides)
    return merged


def _override_rope(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Changes `config` in place; its fields keep their form."""
    own = config.get("rope_parameters")
    if isinstance(own, dict) and any(isinstance(each, dict) for each in own.values()):
        _override_kinds(config, own, overrides)
        return
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = overrides.get(name, {})
        if value is not None and not isinstance(value, dict):
            given_name = f"{called('hf_overrides')} {name}"
            raise ModelError(f"{given_name} {reprlib.repr(value)}: expected an object, or null for none")
        given |= {"rope_type": "default"} if value is None else value
    if "type" in given:
        given.setdefault("rope_type", given.pop("type"))
    is_new = isinstance(own, dict)
    before = dict(own) if isinstance(own, dict) else dict(config.get("rope_scaling") or {})
    if "type" in before:
        before.setdefault("rope_type", before.pop("type"))
    if "rope_theta" in overrides:
        given["rope_theta"] = overrides["rope_theta"]
    if given.get("rope_type") == "default":
        before = {key: value for key, value in before.items() if key in ("rope_theta", "partial_rotary_factor")}
    found = {**before, **given}
    if found.get("rope_type") == DYNAMIC:
        found.setdefault("factor", 1.0)
    if is_new:
        config["rope_parameters"] = found
        return
    theta = found.pop("rope_theta", None)
    config["rope_theta"] = config.get("rope_theta") if theta is None else theta
    if config["rope_theta"] is None:
        del config["rope_theta"]
    config["rope_scaling"] = None if found.get("rope_type", "default") == "default" else found


def _override_kinds(config: dict[str, Any], own: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Overrides each kind of layers separately, if each has its own rotary embedding."""
    given = overrides.get("rope_parameters")
    others = [name for name in ROPE_FIELDS if name != "rope_parameters" and name in overrides]
    fits = isinstance(given, dict) and all(name in own and isinstance(given[name], dict) for name in given)
    if others or not isinstance(given, dict) or not fits:
        raise ModelError(
            f"{called('hf_overrides')} {', '.join(others) or 'rope_parameters'}: this model has separate rotary "
            f"embeddings for each kind of layer; "
            f'give {{"rope_parameters": {{KIND: {{…}}}}}} with KIND one of {", ".join(own)}'
        )
    config["rope_parameters"] = {name: {**each, **given.get(name, {})} for name, each in own.items()}


def _kind_of(given: Mapping[str, Any]) -> str:
    return ROPE_NAMES.get(str(given.get("rope_type", given.get("type"))), "")
