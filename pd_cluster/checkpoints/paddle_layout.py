"""ERNIE 4.5 in Paddle's layout, as in the hub's `-Paddle` folders. Imports no torch.

Linear weights are [inputs, outputs]. Queries, keys and values are columns of one matrix, and so are gate and up
projections. The folders' 16-bit values are bfloat16, although headers may name another type.
Sources: tools/paddle2torch in the repository PaddlePaddle/ERNIE, and transformers' conversion of ERNIE 4.5 VL's config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from pd_cluster.checkpoints.tensor_place import TensorPlace
from pd_cluster.errors import ModelError

PREFIX, HEAD = "ernie.", "lm_head.weight"
DTYPES = {"U16": "BF16"}
DENSE, EXPERTS, PICTURES = "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe"
ARCHITECTURES = {
    "Ernie4_5_ForCausalLM": DENSE,
    "Ernie4_5ForCausalLM": DENSE,
    "Ernie4_5_MoeForCausalLM": EXPERTS,
    "Ernie4_5_VLMoeForConditionalGeneration": PICTURES,
}
OLD_TYPES = {"ernie4_5_moe_vl": PICTURES}  # Paddle's model_type -> transformers'
# Fields that concern only Paddle's training and kernels.
TRAINING = re.compile(
    r"fuse_.*|fused_.*|use_(?:rmsnorm|fast_ln|flash_attention|recompute.*|sparse_.*|var_len.*)|moe_.*(?:loss|lambda).*"
    r"|moe_(?:capacity|gate|use_.*|dropout_prob|multimodal_.*|dense_experts_token_type_id|group.*)|global_aux_loss"
    r"|add_tail_layers|compression_ratio|max_sequence_length|model_name|paddlenlp_version|paddleformers_version"
    r"|tensor_parallel_.*|sequence_parallel|recompute.*|multi_token_pred_.*|num_nextn_predict_layers|auto_map"
)
SPARE = re.compile(r"(?:^|\.)mtp_")  # layers that predict further tokens, for speculation
ROUTER = re.compile(r"\.mlp\.gate\.weight(?:_1)?$")
TOWER = re.compile(r"(?:^|\.)vision_model\.")
ONLY_PICTURES = re.compile(r"(?:^|\.)(?:vision_model|resampler_model)\.|\.weight_1$")
TEXT_FIELDS = (
    *("hidden_size", "intermediate_size", "max_position_embeddings", "moe_intermediate_size", "moe_k"),
    *("moe_num_shared_experts", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("vocab_size", "tie_word_embeddings", "use_bias", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)
TOWER_FIELDS = ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size", "spatial_merge_size")
TIME_SHARE, ROPE_THETA = (
    20,
    500_000.0,
)  # defaults for older files: how many of a head's rotated pairs are for time, and the rotary base


def may_be(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is ERNIE 4.5's, so that its folder may have this layout."""
    return model_type_of(config) in ARCHITECTURES.values()


def model_type_of(config: Mapping[str, Any]) -> object:
    """Returns transformers' model_type; if Paddle's is missing or differs from it, the architecture decides."""
    given = config.get("model_type")
    names = config.get("architectures")
    of_architecture = ARCHITECTURES.get(str(names[0])) if isinstance(names, list) and names else None
    return of_architecture or (OLD_TYPES.get(given, given) if isinstance(given, str) else given)


def is_spare(key: str) -> bool:
    return SPARE.search(key) is not None


def as_transformers(config: Mapping[str, Any], has_head: bool) -> dict[str, Any]:
    """Returns the config.json in transformers' form. `has_head`: whether the output layer has its own weight.

    Raises ModelError for a missing or malformed field.
    """
    found = {name: value for name, value in config.items() if not TRAINING.fullmatch(name)}
    found["model_type"] = model_type = model_type_of(config)
    if found.get("tie_word_embeddings") is None:
        found["tie_word_embeddings"] = not has_head
    try:
        if model_type == PICTURES:
            return found if "text_config" in found else _with_pictures(config, found)
        if model_type == DENSE and found.get("head_dim") is None:
            found["head_dim"] = int(config["hidden_size"]) // int(config["num_attention_heads"])
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"config.json of ERNIE 4.5 in Paddle's layout: {error!r}; copy it again") from None
    return found


def _with_pictures(config: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Splits Paddle's config into the text model's and the vision tower's."""
    own = {name: found[name] for name in TEXT_FIELDS if found.get(name) is not None}
    tower = config["vision_config"]
    num_layers, half = config["num_hidden_layers"], config["hidden_size"] // config["num_attention_heads"] // 2
    by_time = config.get("freq_allocation", TIME_SHARE)
    first, last = _ends(config, "moe_layer_start_index", min), _ends(config, "moe_layer_end_index", max)
    last = num_layers - 1 if last == -1 else last
    every = config.get("moe_layer_interval") or 1
    sparse = [first <= index <= last and (index + 1) % every == 0 for index in range(num_layers)]
    text = own | {
        "model_type": f"{PICTURES}_text",
        "moe_num_experts": _ends(config, "moe_num_experts", max),
        "moe_num_shared_experts": config.get("moe_num_shared_experts") or 0,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.get("rope_theta") or ROPE_THETA,
            "mrope_section": [(half - by_time) // 2, (half - by_time) // 2, by_time],
        },
    }
    vision = {name: tower[name] for name in TOWER_FIELDS if name in tower} | {
        "intermediate_size": int(tower["hidden_size"] * tower.get("mlp_ratio", 4)),
        "spatial_merge_size": config.get("spatial_conv_size", tower.get("spatial_merge_size", 2)),
        "temporal_merge_size": config.get("temporal_conv_size", 2),
        "rms_norm_eps": 1e-6,
    }
    kept = {name: value for name, value in found.items() if name.endswith("_token_id") or name == "architectures"}
    if config.get("im_patch_id") is not None:
        kept["image_token_id"] = config["im_patch_id"]
    more = {"model_type": PICTURES, "tie_word_embeddings": found["tie_word_embeddings"]}
    return {**kept, **more, "text_config": text, "vision_config": vision}


def _ends(config: Mapping[str, Any], name: str, choose: Any) -> int:
    """Returns a field that may have separate values for text and pictures."""
    value = config[name]
    return int(choose(value) if isinstance(value, list) else value)


class PaddleSizes(NamedTuple):
    """The sizes by which stored tensors are split. `hidden_size` and numbers of heads are the text model's."""

    takes_pictures: bool
    is_tied: bool
    hidden_size: int
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config in transformers' form. Raises ModelError."""
        text = config.get("text_config", config)
        try:
            num_heads = int(text["num_attention_heads"])
            num_kv_heads = int(text.get("num_key_value_heads") or num_heads)
            takes_pictures, is_tied = config["model_type"] == PICTURES, bool(config.get("tie_word_embeddings"))
            return cls(takes_pictures, is_tied, int(text["hidden_size"]), num_heads, num_kv_heads)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"config.json of ERNIE 4.5 in Paddle's layout: {error!r}; copy it again") from None

    def names(self, key: str) -> tuple[str, ...]:
        """Returns a tensor's names in the `-PT` folder; empty for an unused tensor."""
        if is_spare(key) or (not self.takes_pictures and ONLY_PICTURES.search(key)):
            return ()
        name = f"model.{key.removeprefix(PREFIX)}" if key.startswith(PREFIX) else key
        if TOWER.search(key):
            return (name,)
        if ".qkv_proj." in key:
            return tuple(name.replace(".qkv_proj.", f".{each}_proj.") for each in "qkv")
        if ".up_gate_proj." in key:  # despite its name, the gates come first
            return tuple(name.replace(".up_gate_proj.", f".{each}_proj.") for each in ("gate", "up"))
        return (name,)

    def places(self, key: str, shape: tuple[int, ...]) -> tuple[TensorPlace, ...]:
        """Returns the places of tensors in a stored tensor of this shape. Raises ModelError for a wrong shape."""
        names, is_turned = self.names(key), self._is_turned(key, shape)
        if len(names) < 2:
            return tuple(TensorPlace(name, is_turned=is_turned) for name in names)
        dim = len(shape) - 1
        shares = (1, 1) if len(names) == 2 else (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        unit, rest = divmod(shape[dim], sum(shares))
        if rest:
            raise ModelError(
                f"{key}: {shape[dim]} outputs cannot be split into {' + '.join(map(str, shares))} equal parts"
            )
        starts = [unit * sum(shares[:index]) for index in range(len(shares))]
        return tuple(
            TensorPlace(name, ((start, start + unit * share),), dim, is_turned)
            for name, start, share in zip(names, starts, shares, strict=True)
        )

    def _is_turned(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether the stored weight is transposed, with inputs first. In some folders, routers and output layers differ
        from other layers in this; their shapes show it.
        """
        if len(shape) != 2 or key.endswith("embed_tokens.weight"):
            return False
        if ROUTER.search(key):  # transformers' routers have inputs first in models that take images
            return (shape[0] == self.hidden_size) != self.takes_pictures
        if key.endswith(HEAD):
            is_square = shape[0] == shape[1]
            is_linear = not self.takes_pictures and not self.is_tied
            return is_linear if is_square else shape[1] != self.hidden_size
        return key.endswith(".weight")
