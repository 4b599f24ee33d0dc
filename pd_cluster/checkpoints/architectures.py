"""Decides from a config.json, without torch, whether an architecture can be served, and why not.

Reads the installed transformers package as text, without importing it. Knows nothing of weights, or of the list of
tested types (checkpoint.py).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import reprlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
_parsing = threading.Lock()

STATE = "keeps a state besides keys and values ({what}) that no listed type has"
ENCODER_DECODER = "is an encoder-decoder model ({what}): its decoder attends to what an encoder made"
CROSS = "has cross attention ({what}): it attends to inputs that no prompt of tokens has"
LATENT = "has latent attention ({what}) of a type that is not listed, and no test compares it with transformers"
CHOSEN = "attends to tokens that it chooses ({what}), but the paged attention reads all or a window of them"
CHUNKS = "attends within chunks ({what}), which the paged attention does not support"
MROPE = "has positions of several dimensions ({what}, mrope)"
BIAS = "adds a bias by distance to its scores ({what}), which the paged attention does not support"
UNKNOWN = "has {what}, which is not known to leave attention and KV cache as they are"
MORE_THAN_TEXT = "takes more than text ({what})"
MULTIMODAL = "takes more than text, which is not supported"
ENCODER = "is an encoder: its tokens see later ones, and nothing is generated"

MAMBA_1 = (
    "has layers of Mamba-1, whose modules in transformers begin every chunk of a prompt without a past; take a hybrid "
    "of Mamba-2, such as granitemoehybrid or nemotron_h"
)
# model_type -> why it is always refused, and which type to use instead
BY_NAME = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), MAMBA_1),
    "mamba2": "keeps states and no keys and values; take a hybrid of it, such as granitemoehybrid or nemotron_h",
    "zamba2": "shares one attention between layers, in a cache of its own; take granitemoehybrid or nemotron_h",
    "deepseek_v4": "keeps windows of compressed tokens, in caches of its own; take deepseek_v32",
    **dict.fromkeys(
        ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
        "chooses blocks of keys for each group of heads; take minimax_m2",
    ),
    **dict.fromkeys(
        ("mistral4", "mistral_large4", "mistral_large4_text"),
        "scales the queries of latent attention by their positions; take deepseek_v3",
    ),
    **dict.fromkeys(
        ("glm5_next", "glm5_next_text"),
        "has states, and chooses keys by pooled keys, in caches of its own; take glm_moe_dsa or kimi_linear",
    ),
}

# Pattern of names of fields or kinds of layers -> reason; the first match counts.
REASONS = (
    (re.compile(r"is_encoder_decoder"), ENCODER_DECODER),
    (re.compile(r"cross_att"), CROSS),
    (re.compile(r"mamba|ssm|conv|recurr|rwkv|xlstm|lru_|state|time_step|linear_|delta|hybrid|retention"), STATE),
    (re.compile(r"kv_lora|q_lora|qk_rope_head|qk_nope_head|latent|compress"), LATENT),
    (re.compile(r"index_|indexe[dr]|sparse|topk|top_k"), CHOSEN),
    (re.compile(r"chunk"), CHUNKS),
    (re.compile(r"mrope"), MROPE),
    (re.compile(r"alibi"), BIAS),
)
# Fields with such names may change attention or the cache, except those in HARMLESS.
SUSPICIOUS = re.compile(
    r"attn|attention|cache|window|chunk|index_|indexe[dr]|sparse|mamba|ssm|conv|state|recurr|linear|memor|cross|encoder|kv|latent"
    r"|lora|compress|alibi|hybrid|position|block|time_step|retention|rwkv|delta|mrope|v_head_dim"
)
HARMLESS = frozenset(
    (
        *("num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_attention_heads_per_layer"),
        *("attention_bias", "attention_out_bias", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"),
        *("attention_multiplier", "attn_logit_softcapping", "query_pre_attn_scalar", "use_attention_bias"),
        *("attention_heads", "kv_channels", "qkv_bias", "parallel_attn", "num_ln_in_parallel_attn"),
        *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
        *("attn_implementation", "cache_implementation", "use_cache", "output_attentions", "output_hidden_states"),
        *("max_position_embeddings", "n_positions", "original_max_position_embeddings", "layer_types"),
        *("sliding_window", "sliding_window_pattern", "use_sliding_window", "max_window_layers"),
        *("global_attn_every_n_layers", "decoder_sparse_step", "mlp_layer_types", "chunk_size_feed_forward"),
    )
)  # the check at load compares their effect on attention with transformers
PLAIN_POSITIONS = {"position_embedding_type": ("rope", "rotary", "absolute"), "is_causal": (True,)}
LAYER_TYPES = ("full_attention", "sliding_attention")
PARTS = ("vision_config", "audio_config", "thinker_config", "talker_config", "vision_tower", "mm_vision_tower")
# Text models with three-dimensional rotary positions, equal in all dimensions for text -> the plain equivalent
PLAIN_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "ernie4_5_vl_moe_text": "ernie4_5_moe",
}
# Fields of the plain equivalent that express behaviour which the text model always has
PLAIN_FIELDS: Mapping[str, Mapping[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
NO_HEAD_DIM = ("glm4v_text",)  # types whose head_dim is hidden_size / num_heads, unlike the plain equivalent's default
FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}  # may have text fields at the top level
INHERITED = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
# Fields with such names hold a length in tokens beyond which a sequence is computed differently.
LENGTHS = re.compile(r"window|chunk_size|block_size|block_length|local_attention|floor_scale|original_max_position")
COUNTS = re.compile(r"^num_|^max_|pattern|every|layers")  # exceptions to LENGTHS


def why_not(config: Config) -> str | None:
    """Returns why transformers' model cannot be served, as a sentence without its subject "it"; None if it may be."""
    model_type = str(config.get("model_type"))
    if model_type in BY_NAME:
        return BY_NAME[model_type]
    parts = [name for name in PARTS if config.get(name)]
    if parts:
        return MORE_THAN_TEXT.format(what=parts[0])
    if config.get("is_encoder_decoder") or model_type in _table("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"):
        return ENCODER_DECODER.format(what="is_encoder_decoder")
    is_causal = model_type in _table("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if model_type in _table("MODEL_FOR_MASKED_LM_MAPPING_NAMES") and not (is_causal and config.get("is_decoder")):
        return ENCODER
    if model_type in _table("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        return MORE_THAN_TEXT.format(what="images")
    if is_known() and not is_causal:
        return "is not a language model: transformers has no causal model of this type"
    return why_not_by_fields(config, _is_stateful(model_type))


def why_not_by_fields(config: Config, is_stateful: bool = False) -> str | None:
    """Like `why_not`, but from the fields of a config.json or of transformers' config alone."""
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list | tuple) else ():
        if kind not in LAYER_TYPES:
            return _reason(str(kind)).format(what=f"layer_types has {kind}")
    doubtful = {name: value for name, value in _fields(config) if _is_doubtful(name, value)}
    reasons = {name: _reason(name.rpartition(".")[2]) for name in doubtful}
    if is_stateful:
        return STATE.format(what=next((name for name in reasons if reasons[name] == STATE), "its class is stateful"))
    for name in sorted(doubtful, key=lambda name: reasons[name] == UNKNOWN):
        what = f"{name} {reprlib.repr(doubtful[name])}" if reasons[name] == UNKNOWN else name
        return reasons[name].format(what=what)
    return None


def text_part(whole: Config) -> dict[str, Any] | None:
    """Returns the config of a multimodal model's text model with defaults filled in; None if there is no text model."""
    text = whole.get("text_config")
    if text is None and (flat := FLAT.get(str(whole.get("model_type")))):
        text = {**whole, "model_type": flat, "vision_config": None}
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        return None
    inherited = {name: whole[name] for name in INHERITED if name in whole}
    filled = {**defaults_of(text["model_type"]), **inherited, **text}
    filled |= plain_fields(text["model_type"], filled)
    return {**filled, "model_type": PLAIN_TYPES.get(text["model_type"], text["model_type"])}


def plain_fields(model_type: str, config: Config) -> dict[str, Any]:
    """Returns the plain equivalent's fields that express behaviour which the text model always has."""
    found = dict(PLAIN_FIELDS.get(model_type, {}))
    if model_type in NO_HEAD_DIM:
        found["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if model_type == "ernie4_5_vl_moe_text":
        found |= _ernie_fields(config)
    return found


def _ernie_fields(config: Config) -> dict[str, Any]:
    """Returns ERNIE 4.5 MoE's fields for sparse layers and for the sizes of text and picture experts."""
    num_layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    sparse = [index for index, kind in enumerate(kinds) if kind == "sparse"] or [num_layers]
    widths = config.get("moe_intermediate_size") or (1536, 512)
    widths = widths if isinstance(widths, list | tuple) else (widths, config.get("picture_intermediate_size", widths))
    return {
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_intermediate_size": widths[0],
        "picture_intermediate_size": widths[1],
    }


def thresholds(config: Config) -> dict[int, str]:
    """Maps each length beyond which the model computes differently to its field, in ascending order."""
    found: dict[int, str] = {}
    for name, value in _fields(config):
        last = name.rpartition(".")[2]
        if isinstance(value, int) and value > 1 and LENGTHS.search(last) and not COUNTS.search(last):
            found.setdefault(value, name)
    return dict(sorted(found.items()))


def is_known() -> bool:
    """Whether the transformers package is installed."""
    return _folder() is not None


def is_native(model_type: object) -> bool:
    """Whether transformers has the type; True if transformers is not installed."""
    return not is_known() or model_type in _table("CONFIG_MAPPING_NAMES", "auto_mappings")


def defaults_of(model_type: str) -> dict[str, Any]:
    """Returns the plain values that transformers assigns to fields missing from a config.json."""
    folder, name = _folder(), _table("CONFIG_MAPPING_NAMES", "auto_mappings").get(model_type)
    if folder is None or name is None:
        return {}
    module = _module_of(model_type)
    statements = _parse(folder / "models" / module / f"configuration_{module}.py")
    classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
    return _class_defaults(classes, name)


def _class_defaults(classes: Mapping[str, ast.ClassDef], name: str) -> dict[str, Any]:
    if name not in classes:
        return {}
    found: dict[str, Any] = {}
    for base in classes[name].bases:
        found |= _class_defaults(classes, base.id) if isinstance(base, ast.Name) else {}
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            try:
                found[node.target.id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # skips defaults that transformers computes by a call
    return found


def null_fields(config: Config) -> str:
    """Returns a hint for an error that a null may have caused; "" if there is no null."""
    names = [name for name, value in _fields(config) if value is None]
    return f"; config.json has null for {', '.join(names)}: leave them out, or give values" if names else ""


def _fields(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every field, with nested names such as `rope_parameters.rope_type`."""
    for name, value in config.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")


def _is_doubtful(name: str, value: Any) -> bool:
    name = name.rpartition(".")[2]
    if not value or isinstance(value, dict) or name.startswith("_") or name in HARMLESS:
        return False
    if value in PLAIN_POSITIONS.get(name, ()):
        return False
    return SUSPICIOUS.search(name.lower()) is not None and name not in LAYER_TYPES


def _reason(name: str) -> str:
    return next((reason for pattern, reason in REASONS if pattern.search(name.lower())), UNKNOWN)


def _is_stateful(model_type: str) -> bool:
    """Whether the source of the model's class says that it is stateful."""
    folder, module = _folder(), _module_of(model_type)
    if folder is None:
        return False
    try:
        text = (folder / "models" / module / f"modeling_{module}.py").read_text("utf-8")
    except OSError:
        return False
    return "_is_stateful = True" in text


def _module_of(model_type: str) -> str:
    special = _table("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", "auto_mappings")
    return str(special.get(model_type, model_type.replace("-", "_")))


@functools.cache
def _folder() -> Path | None:
    """Finds the transformers package."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@functools.cache
def _table(name: str, module: str = "modeling_auto") -> dict[str, Any]:
    """Reads a table of transformers.models.auto; empty if it is not found."""
    for node in _statements(module):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value if isinstance(node, ast.Assign) else None
            if isinstance(value, ast.Call) and value.args:
                return dict(ast.literal_eval(value.args[0]))
    return {}


@functools.cache
def _statements(module: str) -> list[ast.stmt]:
    folder = _folder()
    return _parse(folder / "models" / "auto" / f"{module}.py") if folder else []


def _parse(file: Path) -> list[ast.stmt]:
    """Returns a file's statements; empty if it cannot be read.

    One thread at a time, because concurrent parsing raises SystemError in CPython 3.11.
    """
    try:
        text = file.read_text("utf-8")
        with _parsing:
            return ast.parse(text).body
    except (OSError, SyntaxError):
        return []
