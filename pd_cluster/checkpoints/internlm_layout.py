"""InternLM and InternLM2, which are Llamas under other names. transformers has no code for them. Imports no torch.

InternLM is a Llama whose attention has biases. InternLM2 keeps queries, keys and values in one matrix, group by group.
Sources: configuration_internlm*.py and modeling_internlm*.py in the models' own repositories on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_cluster.checkpoints.tensor_place import TensorPlace
from pd_cluster.errors import ModelError

TYPES = ("internlm", "internlm2")
LEFT_OUT = ("architectures", "auto_map", "attn_implementation", "rotary", "bias", "pretraining_tp")
# InternLM2's names in a layer -> Llama's; `attention.wqkv` becomes three weights.
RENAMED = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTER = {"model.tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
PACKED = "attention.wqkv"


def as_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a Llama's config.json that describes the same architecture."""
    found = {name: value for name, value in config.items() if name not in LEFT_OUT}
    has_bias = bool(config.get("bias", config["model_type"] == "internlm"))
    found |= {"model_type": "llama", "attention_bias": has_bias, "mlp_bias": False}
    found.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    rotary = config.get("rotary")  # InternLM's field; InternLM2 has rope_scaling, like other models
    if isinstance(rotary, dict):
        found["rope_theta"] = rotary.get("base", 10000)
        if rotary.get("type") == "dynamic":
            factor = float(rotary.get("scaling_factor", 1.0))
            found["rope_scaling"] = {"rope_type": "dynamic", "factor": factor}
    return found


def llama_names(key: str) -> tuple[str, ...]:
    """Returns a weight's names in a Llama: three for a packed weight, none for one that a Llama computes."""
    if key in OUTER:
        return (OUTER[key],)
    if key.endswith(".rotary_emb.inv_freq"):
        return ()
    head, dot, rest = key.partition(".layers.")
    number, _, name = rest.partition(".")
    name, _, kind = name.rpartition(".")
    if not dot:
        return (key,)
    if name == PACKED:
        return tuple(f"{head}.layers.{number}.self_attn.{each}_proj.{kind}" for each in "qkv")
    return (f"{head}.layers.{number}.{RENAMED.get(name, name)}.{kind}",)


def places(key: str, shape: tuple[int, ...], num_heads: Any, num_kv_heads: Any) -> tuple[TensorPlace, ...]:
    """Returns the places of a Llama's tensors in a stored tensor of this shape. Raises ModelError for a wrong shape.

    A packed tensor is [(num_heads + 2 * num_kv_heads) * head_dim, …], in groups: each KV head has one group with its
    queries, key and value.
    """
    names = llama_names(key)
    if len(names) < 2:
        return tuple(TensorPlace(name) for name in names)
    share = num_heads // num_kv_heads
    unit, rest = divmod(shape[0], (share + 2) * num_kv_heads)
    if rest:
        raise ModelError(f"{key}: {shape[0]} outputs are not those of {num_heads} heads and {num_kv_heads} KV heads")
    first = [group * (share + 2) * unit for group in range(num_kv_heads)]
    ends = (0, share * unit), (share * unit, (share + 1) * unit), ((share + 1) * unit, (share + 2) * unit)
    return tuple(
        TensorPlace(name, tuple((at + start, at + stop) for at in first))
        for name, (start, stop) in zip(names, ends, strict=True)
    )
