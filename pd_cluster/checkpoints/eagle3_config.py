"""Reads an EAGLE-3 head's config.json, in vLLM's and SGLang's or speculators' format. Knows nothing of tensors.

A head is one decoder layer of Llama's or Qwen3's kind that reads two vectors per token. In the first format, the file
is the config of such a model with further fields, some of them in `eagle_config`. In the second format, the object
`transformer_layer_config` describes the layer and omits defaults. An unsupported field that changes results is an error
that names it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pd_cluster.checkpoints.architectures import defaults_of
from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.errors import ModelError
from pd_cluster.numerics import ROPE_FIELDS

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
LAYER_TYPES = ("llama", "qwen3")  # only qwen3 has norms of queries and keys
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # rotations that do not depend on the request's length
BIASES = ("attention_bias", "qkv_bias", "mlp_bias", "bias")
# NVIDIA's fields -> their only supported value, which is the default
ONLY = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "logit_scale": 1,
}
PARALLEL = (
    "parallel_drafting",
    "pard_token",
    "ptd_token_id",
    "mask_token_id",
)  # fields of heads that draft several tokens at once
USUAL_TAPS = 3
WAY_OUT = "give another head, or method ngram or suffix"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The contents of a head's config.json."""

    file: Path
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int  # 0: the output layer has the whole vocabulary
    eps: float
    activation: str
    window: int | None
    rope: Mapping[str, Any]  # the fields of the rotary embedding
    num_taps: int  # hidden states that `fc` takes; 0: there is no fc, and the head reads the model's last hidden states
    layers: tuple[int, ...] | None  # the layers whose inputs are these states; None: the usual ones
    norms_heads: bool
    norm_before_residual: bool
    norms_before_fc: bool  # whether all states are normed together (`input_norm`)
    norms_each_tap: bool  # whether each state is normed (`fc_norm`)
    norm_output: bool
    is_tied: bool

    @classmethod
    def read(cls, folder: Path) -> Eagle3Config:
        """Raises ModelError that names the file, and the field with its value."""
        file = folder / "config.json"
        given = read_json(file)
        own, layer = _format(file, given)
        _check_layer(layer)
        hidden_size, num_heads = layer.count("hidden_size"), layer.count("num_attention_heads")
        target = own.count("target_hidden_size") if own.has("target_hidden_size") else hidden_size
        num_taps, layers = _taps(own)
        if not num_taps and hidden_size != target:
            raise own.error(
                "use_aux_hidden_state", f"hidden_size {hidden_size} must then equal target_hidden_size {target}"
            )
        return cls(
            file=file,
            hidden_size=hidden_size,
            target_hidden_size=target,
            intermediate_size=layer.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=layer.count("num_key_value_heads") if layer.has("num_key_value_heads") else num_heads,
            head_dim=layer.count("head_dim") if layer.has("head_dim") else hidden_size // num_heads,
            vocab_size=layer.count("vocab_size"),
            draft_vocab_size=own.count("draft_vocab_size") if own.has("draft_vocab_size") else 0,
            eps=layer.number("rms_norm_eps"),
            activation=str(layer.get("hidden_act")),
            window=_window(layer),
            rope=_rope(layer),
            num_taps=num_taps,
            layers=layers,
            norms_heads=layer.get("model_type") == "qwen3",
            norm_before_residual=own.switch("norm_before_residual"),
            norms_before_fc=own.switch("norm_before_fc"),
            norms_each_tap=own.switch("fc_norm"),
            norm_output=own.switch("norm_output"),
            is_tied=own.switch("tie_word_embeddings"),
        )

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are read, ascending, in a model of `num_layers`. Raises ModelError."""
        if not self.num_taps:
            return ()
        if self.layers is None:
            found = usual_taps(num_layers)
            if list(found) != sorted(set(found)):
                raise ModelError(
                    f"{self.file}: eagle_aux_hidden_state_layer_ids: missing, and the usual ones of a model of "
                    f"{num_layers} layers would be {', '.join(map(str, found))}; add those used in the head's training"
                )
            return found
        if self.layers[-1] >= num_layers:
            raise ModelError(
                f"{self.file}: eagle_aux_hidden_state_layer_ids {list(self.layers)}: the model has only layers 0 to "
                f"{num_layers - 1}; {WAY_OUT}"
            )
        return self.layers


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs a head reads if its config names none; vLLM and SGLang choose the same ones."""
    return (2, num_layers // 2, num_layers - 3)


class _Fields(NamedTuple):
    """An object of a config.json. `place`: the file and the object's path. `nested`: a second object with fields."""

    place: str
    values: Mapping[str, Any]
    nested: Mapping[str, Any] = {}

    def get(self, name: str) -> Any:
        found = self.values.get(name)
        return self.nested.get(name) if found is None else found

    def has(self, name: str) -> bool:
        """Whether the field exists and is not null."""
        return self.get(name) is not None

    def error(self, name: str, why: str, way_out: str = WAY_OUT) -> ModelError:
        return ModelError(f"{self.place}: {name} {reprlib.repr(self.get(name))}: {why}; {way_out}")

    def count(self, name: str) -> int:
        value = self.get(name)
        if type(value) is not int or value < 1:
            raise self.error(name, "must be a whole number of at least 1", "copy the file again")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise self.error(name, "must be a number in 0 to 1", "copy the file again")
        return float(value)

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false", "copy the file again")
        return value


def _format(file: Path, given: Mapping[str, Any]) -> tuple[_Fields, _Fields]:
    """Returns the fields of the head and of its layer, with defaults. Raises ModelError for other heads."""
    nested = given.get("eagle_config") or {}
    own = _Fields(str(file), given, nested if isinstance(nested, dict) else {})
    if not isinstance(nested, dict):
        raise own.error("eagle_config", "must be an object", "copy the file again")
    layer: Any = given
    place = str(file)
    if own.has("speculators_model_type"):
        if own.get("speculators_model_type") != "eagle3":
            raise own.error("speculators_model_type", "only eagle3 is supported")
        layer, place = given.get("transformer_layer_config"), f"{file}: transformer_layer_config"
        if not isinstance(layer, dict):
            raise own.error("transformer_layer_config", "must be an object", "copy the file again")
        algorithm = _Fields(f"{file}: speculators_config", _object(own, "speculators_config"))
        if algorithm.get("algorithm") not in (None, "eagle3"):
            raise algorithm.error("algorithm", "only eagle3 is supported")
    else:
        names = given.get("architectures")
        if not isinstance(names, list) or not set(map(str, names)) & {*ARCHITECTURES}:
            raise own.error("architectures", f"not a known EAGLE-3 head; known are {', '.join(ARCHITECTURES)}")
    for name in (*PARALLEL, "quantization_config", "compression_config"):
        if own.get(name) not in (None, False):
            why = "heads that guess several tokens at once are not supported"
            raise own.error(name, why if name in PARALLEL else "quantized heads are not supported")
    for name, only in ONLY.items():
        if own.get(name) not in (None, only):
            raise own.error(name, f"only {only!r} is supported")
    if own.switch("norm_before_fc") and own.switch("fc_norm"):
        raise own.error("fc_norm", "norm_before_fc is true as well, and a head may have only one of the two")
    kind = layer.get("model_type", "llama")
    if kind not in LAYER_TYPES:
        raise _Fields(place, layer).error("model_type", f"only layers of {' and '.join(LAYER_TYPES)} are supported")
    return own, _Fields(place, layer, {"model_type": kind, **_defaults(kind)})


def _object(fields: _Fields, name: str) -> Mapping[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _defaults(kind: str) -> dict[str, Any]:
    return {name: value for name, value in defaults_of(kind).items() if value is not None and name not in ROPE_FIELDS}


def _check_layer(layer: _Fields) -> None:
    """Raises ModelError for unsupported layers."""
    if (number := layer.count("num_hidden_layers")) != 1:
        raise layer.error("num_hidden_layers", f"a head has 1 layer, not {number}")
    for name in BIASES:
        if layer.get(name):
            raise layer.error(name, "biases in a head's layer are not supported")
    num_heads, num_kv_heads = layer.count("num_attention_heads"), layer.get("num_key_value_heads") or 1
    if type(num_kv_heads) is int and num_heads % num_kv_heads:
        raise layer.error("num_attention_heads", f"must be a multiple of num_key_value_heads {num_kv_heads}")
    if layer.get("hidden_act") not in ACTIVATIONS:
        raise layer.error("hidden_act", f"only {' and '.join(ACTIVATIONS)} are supported")


def _window(layer: _Fields) -> int | None:
    kinds = layer.values.get("layer_types")
    kind = kinds[0] if isinstance(kinds, list) and kinds else "full_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise layer.error("layer_types", "only full_attention and sliding_attention are supported")
    return layer.count("sliding_window") if kind == "sliding_attention" else None


def _rope(layer: _Fields) -> dict[str, Any]:
    """Returns the fields of the rotary embedding. Raises ModelError if it depends on the request's length."""
    name = next((each for each in ("rope_parameters", "rope_scaling") if layer.has(each)), "rope_parameters")
    given = layer.get(name) or {}
    if not isinstance(given, dict):
        raise layer.error(name, "must be an object", "copy the file again")
    kind = given.get("rope_type", given.get("type")) or "default"
    if kind not in ROPE_TYPES or "mrope_section" in given:
        raise layer.error(name, f"only the rotations {', '.join(ROPE_TYPES)} are supported")
    if (layer.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1.0) != 1.0:
        raise layer.error(name, "partial_rotary_factor: only whole heads are rotated")
    fields = (*ROPE_FIELDS, "max_position_embeddings")
    return {field: layer.get(field) for field in fields if layer.has(field)}


def _taps(own: _Fields) -> tuple[int, tuple[int, ...] | None]:
    """Returns `num_taps` and `layers` of Eagle3Config. Raises ModelError."""
    name = "eagle_aux_hidden_state_layer_ids"
    if not own.switch("use_aux_hidden_state", default=True):
        return 0, None
    layers = own.get(name) or None  # NVIDIA's files may have [] for none
    number = own.count("num_aux_hidden_states") if own.has("num_aux_hidden_states") else 0
    if layers is None:
        if number not in (0, USUAL_TAPS):
            raise own.error("num_aux_hidden_states", f"without {name} there are {USUAL_TAPS}", f"write {name}")
        return USUAL_TAPS, None
    are_ids = isinstance(layers, list) and layers and all(type(each) is int and each >= 0 for each in layers)
    if not are_ids or len(set(layers)) < len(layers):
        raise own.error(name, "must be different numbers of layers, from 0", "copy the file again")
    if number not in (0, len(layers)):
        raise own.error(name, f"num_aux_hidden_states is {number}", "copy the file again")
    return len(layers), tuple(sorted(layers))
