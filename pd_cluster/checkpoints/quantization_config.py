"""Reads the quantization that a model folder declares: its method, and details that the tensors do not show.

Each method is an entry of `METHODS`. model/weights decodes tensors. Imports no torch.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.plain_files import read_plain
from pd_cluster.checkpoints.weight_files import QUANTIZERS_FIELDS, QUANTIZERS_FILES, method_of, quantized
from pd_cluster.errors import ModelError, called
from pd_cluster.numerics import LONG_SPANS, WHOLE_ROWS
from pd_cluster.settings.engine_config import ALSO_AT_LOAD, AT_LOAD

Settings = Mapping[str, Any]
FP8_BLOCK = (128, 128)
GPTQ_BITS = (2, 3, 4, 8)
ASCEND_CODES = ("W8A8", "W8A8_DYNAMIC")  # types whose activations are quantized, too
CODES_AT_LOAD = ("int8", "w4a8")
ASCEND_TYPES = ("FLOAT", *ASCEND_CODES, "W8A16", "W4A16")
CT_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "dense"),
)
PACKINGS = ("auto_gptq", "auto_awq", "llm_compressor", "auto_round", "gptqmodel")
OWN_PACKINGS = ("auto_round", "gptqmodel")  # AutoRound's packings with unchanged zero points
AUTO_ROUND, COMPRESSED, ASCEND = "auto-round", "compressed-tensors", "msmodelslim"


@dataclass(frozen=True, slots=True)
class Quantization:
    """A declared quantization, with what the tensors' shapes do not show."""

    method: str
    place: str  # the file and field of the declaration
    zero_offset: int = 0  # is added to stored zero points
    is_by_rows: bool = False  # a word holds input features of one output row (AWQ's gemv)
    group_size: int = -1  # input features that share a scale (the last group may have fewer); -1: unknown, or all
    block: tuple[int, int] | None = None  # the outputs and inputs that share a scale, if scales apply to blocks
    has_int8_activations: bool = False  # layers with int8 weights also take int8 activations
    input_parts: tuple[str, ...] = ()  # the tensors that these layers have for activations
    is_w4a8: bool = False  # layers with int4 weights take int8 activations
    types: Mapping[str, str] = field(default_factory=dict, hash=False)  # tensor -> its type in Ascend's file
    at_load: str = ""  # the scheme by which plain weights are quantized when they are read
    kinds: tuple[str, ...] = ()  # the kinds of weights, such as int4, if a method has several

    def numerics_name(self, is_on_cpu: bool) -> str:
        """Returns the name of the quantization in `Numerics`."""
        if self.method == ASCEND:
            has_codes = any(kind in ASCEND_CODES for kind in self.types.values())
        else:
            has_codes = self.has_int8_activations or self.is_w4a8 or self.at_load in CODES_AT_LOAD
        return ", ".join(filter(None, (self.at_load, WHOLE_ROWS if has_codes else LONG_SPANS if is_on_cpu else "")))


def quantization_of(path: Path, config: Settings) -> Quantization | None:
    """Returns a model folder's quantization; None: plain weights. Raises ModelError that names the field or file.

    `config`: the folder's config.json, or the part of it that is served.
    """
    found = list(_declared(path, config))
    if not found:
        return None
    place, method, settings = found[0]
    if (read := METHODS.get(method)) is None:
        raise quantized(place, method or "without a quant_method")
    try:
        return read(Quantization(method, place), settings)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ModelError(f"{place}: not the settings of {method}: {error}") from None


def _declared(path: Path, config: Settings) -> Iterator[tuple[str, str, Settings]]:
    """Yields each declaration's place, method and settings. Other files count only if config.json has none."""
    for name in QUANTIZERS_FIELDS:
        if (value := config.get(name)) is not None:
            settings = value if isinstance(value, dict) else {}
            own = settings.get("quant_method")
            if own is None and name == "compression_config" and "config_groups" in settings:
                own = COMPRESSED  # older versions of this method named themselves by this field
            yield f"{path / 'config.json'}: {name}", _method(own) or method_of(value), settings
    for pattern, method in QUANTIZERS_FILES.items():
        for file in sorted(path.glob(pattern)):
            try:
                settings = json.loads(read_plain(file))
            except (OSError, ValueError) as error:
                raise ModelError(f"{file}: cannot be read as JSON: {error}") from None
            if not isinstance(settings, dict):
                raise ModelError(f"{file}: expected a JSON object")
            yield str(file), _method(settings.get("quant_method") or method) or method_of(settings), settings


def _method(name: object) -> str:
    """Returns the method of `METHODS` with this name; "" for an unknown name."""
    found = SPELLINGS.get(name, name) if isinstance(name, str) else ""
    return found if found in METHODS else ""


def _refused(found: Quantization, what: str, way_out: str) -> ModelError:
    return ModelError(f"{found.place}: {what}; {way_out}")


def _whole(found: Quantization, settings: Settings, name: str, default: int) -> int:
    """Returns an integer setting; `default` if missing. Raises ModelError."""
    if (value := settings.get(name)) is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(found, f"{name} {reprlib.repr(value)} is not a whole number", "give the quantizer's own file")
    return value


def _only(found: Quantization, settings: Settings, name: str, allowed: tuple[Any, ...]) -> None:
    if (value := settings.get(name)) not in allowed:
        known = ", ".join(str(each) for each in allowed if each is not None)
        raise _refused(found, f"{name} {reprlib.repr(value)} is not supported", f"give a folder with {known}")


def _awq(found: Quantization, settings: Settings) -> Quantization:
    version = str(settings.get("version") or "gemm").lower()
    _only(found, {"version": version}, "version", ("gemm", "gemv"))
    _only(found, {"bits": settings.get("bits", settings.get("w_bit"))}, "bits", (4, None))
    name = "q_group_size" if settings.get("group_size") is None else "group_size"
    if version == "gemv" and settings.get(name) is None:
        raise _refused(found, "version gemv needs group_size, which its tensors do not show", "add it")
    return replace(found, is_by_rows=version == "gemv", group_size=_whole(found, settings, name, -1))


def _gptq(found: Quantization, settings: Settings) -> Quantization:
    _only(found, settings, "bits", GPTQ_BITS)
    _only(found, settings, "checkpoint_format", (None, "gptq", "gptq_v2"))
    _only(found, settings, "is_marlin_format", (None, False))
    first = settings.get("checkpoint_format") != "gptq_v2"
    return replace(found, zero_offset=1 if first else 0, group_size=_whole(found, settings, "group_size", -1))


def _auto_round(found: Quantization, settings: Settings) -> Quantization:
    packing = str(settings.get("packing_format") or "auto_round:auto_gptq").removeprefix("auto_round:")
    _only(found, {"packing_format": packing}, "packing_format", PACKINGS)
    own = {name: settings[name] for name in ("bits", "group_size") if name in settings}
    if packing == "auto_awq":
        return _awq(replace(found, method="awq"), own)
    if packing != "llm_compressor":
        own["checkpoint_format"] = "gptq_v2" if packing in OWN_PACKINGS else "gptq"
        return _gptq(replace(found, method="gptq"), own)
    return replace(found, method=COMPRESSED)


def _compressed_tensors(found: Quantization, settings: Settings) -> Quantization:
    _only(found, settings, "format", (None, *CT_FORMATS))
    has_int8: set[bool] = set()
    has_w4a8: set[bool] = set()
    input_parts: set[tuple[str, ...]] = set()
    kinds = set()
    sizes, blocks = set(), set()
    _check_transforms(found, settings)
    for name, group in dict(settings.get("config_groups") or {}).items():
        place = replace(found, place=f"{found.place}.config_groups.{name}")
        if not isinstance(group, dict):
            raise _refused(place, f"{reprlib.repr(group)} is not a scheme", "write its weights and input_activations")
        weights, inputs = group.get("weights"), group.get("input_activations") or {}
        if weights is None:  # as in vLLM, such a group's layers are not quantized
            continue
        sizes.add(_whole(place, weights, "group_size", -1))
        if (block := weights.get("block_structure")) is not None:
            blocks.add(_block(place, block, "block_structure"))
        _only(place, {"num_bits": weights.get("num_bits", 8)}, "num_bits", (2, 3, 4, 8))
        kinds.add(f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}")
        if weights.get("type", "int") == "int" and weights.get("num_bits", 8) == 4:
            has_w4a8.add(inputs.get("type", "int") == "int" if inputs else False)
            if has_w4a8 == {True}:
                _check_w4a8(place, weights, inputs)
        if weights.get("type", "int") != "int" or weights.get("num_bits", 8) != 8:
            continue
        has_int8.add(bool(inputs))
        if inputs:
            input_parts.add(_w8a8_parts(place, inputs))
    if len(has_int8) > 1:
        raise _refused(found, "groups of int8 weights with and without int8 activations", "give a folder with one kind")
    if len(input_parts) > 1:
        raise _refused(found, "groups of int8 weights with different input_activations", "give a folder with one kind")
    if len(has_w4a8) > 1 or (has_w4a8 == {True} and has_int8):
        raise _refused(found, "groups of int4 weights with int8 activations, and others", "give a folder with one kind")
    if len(blocks) > 1:
        raise _refused(found, f"groups with several block_structure: {sorted(blocks)}", "give a folder with one")
    return replace(
        found,
        has_int8_activations=has_int8 == {True},
        input_parts=input_parts.pop() if input_parts else (),
        is_w4a8=has_w4a8 == {True},
        group_size=sizes.pop() if len(sizes) == 1 else -1,
        block=blocks.pop() if blocks else FP8_BLOCK,
        kinds=tuple(sorted(kinds)),
    )


def _check_transforms(found: Quantization, settings: Settings) -> None:
    """Raises ModelError for rotations that must be computed at run time, because they are not merged into the
    weights.
    """
    transforms = (settings.get("transform_config") or {}).get("config_groups") or {}
    for name, transform in transforms.items():
        for each in transform.get("apply") or ():
            if not str(each.get("location")).startswith("weight_"):
                place = replace(found, place=f"{found.place}.transform_config.config_groups.{name}")
                _only(place, each, "location", ("weight_input", "weight_output"))


def _block(found: Quantization, value: object, name: str) -> tuple[int, int]:
    """Returns the output and input features of a block. Raises ModelError."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int and each > 0 for each in value):
        raise _refused(found, f"{name} {reprlib.repr(value)} is not a size", "give two whole numbers")
    return value[0], value[1]


def _w8a8_parts(found: Quantization, inputs: Settings) -> tuple[str, ...]:
    """Returns the tensors for static quantization of activations; empty if it is dynamic. Missing settings have the
    format's defaults.

    Raises ModelError for unsupported rounding of activations.
    """
    given: dict[str, Any] = {"num_bits": 8, "type": "int", "dynamic": False, "symmetric": True}
    given |= {name: value for name, value in inputs.items() if value is not None}
    strategy = "token" if given["dynamic"] else "tensor"
    symmetric = (True,) if given["dynamic"] else (True, False)
    given.setdefault("strategy", strategy)
    of = f" of {'dynamic' if given['dynamic'] else 'static'} activations"
    for name, of_which, allowed in (
        *(("num_bits", "", (8,)), ("type", "", ("int",)), ("dynamic", "", (True, False))),
        *(("strategy", of, (strategy,)), ("symmetric", of, symmetric)),
    ):
        field_name = f"input_activations.{name}{of_which}"
        _only(found, {field_name: given[name]}, field_name, allowed)
    if given["dynamic"]:
        return ()
    return ("input_scale",) if given["symmetric"] else ("input_scale", "input_zero_point")


def _check_w4a8(found: Quantization, weights: Settings, inputs: Settings) -> None:
    """Raises ModelError unless activations have a scale per row, and nothing has a zero point."""
    for name, default, allowed in (("num_bits", 8, 8), ("strategy", "token", "token"), ("symmetric", True, True)):
        field_name = f"input_activations.{name}"
        _only(found, {field_name: inputs.get(name, default)}, field_name, (allowed,))
    _only(found, {"input_activations.dynamic": inputs.get("dynamic", True)}, "input_activations.dynamic", (True,))
    _only(found, {"weights.symmetric": weights.get("symmetric", True)}, "weights.symmetric", (True,))


def _fp8(found: Quantization, settings: Settings) -> Quantization:
    _only(found, settings, "fmt", (None, "e4m3", "float8_e4m3fn"))
    block = _block(found, settings.get("weight_block_size") or list(FP8_BLOCK), "weight_block_size")
    return replace(found, block=block)


def _smooth_quant(found: Quantization, settings: Settings) -> Quantization:
    _only(found, settings, "quant_dtype", (None, "int8", "float8_e4m3fn"))
    return replace(found, has_int8_activations=settings.get("quant_dtype") != "float8_e4m3fn")


def _modelopt(found: Quantization, settings: Settings) -> Quantization:
    own = settings.get("quantization", settings)
    _only(found, own, "quant_algo", ("FP8", "NVFP4"))
    return replace(found, block=FP8_BLOCK, kinds=("float8" if own["quant_algo"] == "FP8" else "float4",))


def _ascend(found: Quantization, settings: Settings) -> Quantization:
    types = {name: value for name, value in settings.items() if name.endswith((".weight", ".bias")) and value}
    for name, value in types.items():
        if value not in ASCEND_TYPES:
            known = ", ".join(ASCEND_TYPES)
            raise _refused(found, f"{name} {reprlib.repr(value)} is not supported", f"give a folder with {known}")
    group_size = int(settings.get("group_size") or -1)
    return replace(found, has_int8_activations=True, types=types, group_size=group_size)


def _as_it_is(found: Quantization, settings: Settings) -> Quantization:
    return found


METHODS: dict[str, Callable[[Quantization, Settings], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    AUTO_ROUND: _auto_round,
    COMPRESSED: _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _as_it_is,
    "modelopt": _modelopt,
    "smooth_quant": _smooth_quant,
    ASCEND: _ascend,
}
SPELLINGS = {"auto_round": AUTO_ROUND, "intel/auto-round": AUTO_ROUND, "ascend": ASCEND}
# method -> its name for --quantization, if that differs
CALLED = {
    "fp8": ("fp8", "fbgemm_fp8", COMPRESSED, "modelopt"),
    "smoothquant": ("smooth_quant", COMPRESSED, ASCEND),
    "ascend": (ASCEND,),
    "mxfp4": ("mxfp4", COMPRESSED),
    AUTO_ROUND: ("gptq", "awq", COMPRESSED),
}
KINDS = {"fp8": "float8", "mxfp4": "float4"}  # name of a quantization -> kind of weights


def at_load(scheme: str) -> str:
    """Returns our name of a scheme for plain weights."""
    return ALSO_AT_LOAD.get(scheme, scheme)


def asked(path: Path, wanted: str | None, found: Quantization | None) -> Quantization | None:
    """Compares --quantization with the folder's own; if the folder has plain weights, the setting says how to quantize
    them at load.

    Raises ModelError if they conflict.
    """
    if wanted is None:
        return found
    flag = f"{called('quantization')} {wanted}"
    if found is not None:
        is_kind = not found.kinds or KINDS.get(wanted, found.kinds[0]) in found.kinds
        takes_int8 = wanted != "smoothquant" or found.has_int8_activations
        if found.method not in CALLED.get(wanted, (wanted,)) or not is_kind or not takes_int8:
            kinds = f" ({', '.join(found.kinds)})" if found.kinds else ""
            raise ModelError(f"{flag}: {found.place} says {found.method}{kinds}; leave it out")
        return found
    if (scheme := at_load(wanted)) not in AT_LOAD:
        ways = ", ".join(AT_LOAD)
        raise ModelError(f"{flag}: {path} has plain weights; give a folder that is quantized so, or one of {ways}")
    return Quantization("", flag, at_load=scheme)
