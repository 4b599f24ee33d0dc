"""Random EAGLE-3 heads for tiny checkpoints, in both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)
NESTED = ("use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids")  # nested by the first format in `eagle_config`


def make_eagle3_head(
    folder: Path,
    target_folder: Path,
    *,
    is_speculators: bool = False,
    embedding: str = "",
    has_output_layer: bool = True,
    prefix: str = "",
    layer: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Writes config.json and model.safetensors of a head for the model in `target_folder`; returns the folder.

    `fields` are the head's config fields, such as draft_vocab_size, norm_output or eagle_aux_hidden_state_layer_ids;
    they are written where the format has them. `layer` changes fields of its decoder layer; the rest are the model's.
    `embedding`: a "copy" of the model's, the head's "own", or none (""). Without `has_output_layer`, the head uses the
    model's. `prefix` precedes all tensor names except d2t and t2d.
    """
    target = json.loads((target_folder / "config.json").read_text())
    target = target.get("text_config", target)
    own = {name: target[name] for name in LAYER_FIELDS if name in target}
    own |= {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", **(layer or {})}
    nested = {name: fields.pop(name) for name in NESTED if name in fields}
    if own["hidden_size"] != target["hidden_size"]:
        fields["target_hidden_size"] = target["hidden_size"]
    if is_speculators:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": str(target_folder)},
            },
            "transformer_layer_config": own,
            "eagle_aux_hidden_state_layer_ids": nested.get("eagle_aux_hidden_state_layer_ids"),
            **fields,
        }
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **own, **fields, "eagle_config": nested}
    weights = _random_weights(own, {**fields, **nested}, target, seed)
    if not has_output_layer:
        del weights["lm_head.weight"]
    if embedding == "copy":
        with safe_open(target_folder / "model.safetensors", framework="pt") as stored:
            weights["embed_tokens.weight"] = stored.get_tensor("model.embed_tokens.weight")
    elif embedding == "own":
        weights["embed_tokens.weight"] = torch.randn(own["vocab_size"], own["hidden_size"])
    name_of = (lambda key: key) if is_speculators else (lambda key: key.replace("layers.0.", "midlayer."))
    named = {name_of(key): value.to(dtype) if value.is_floating_point() else value for key, value in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key if key in ("d2t", "t2d") else prefix + key: value.contiguous() for key, value in named.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _random_weights(
    layer: dict[str, Any], fields: dict[str, Any], target: dict[str, Any], seed: int
) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    size, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    read = len(fields.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)) * target["hidden_size"]
    vocab_size, own = layer["vocab_size"], fields.get("draft_vocab_size") or layer["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (size,),
        "lm_head": (own, size),
        **{f"layers.0.{name}": (size,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"layers.0.self_attn.{name}_proj": (keys, 2 * size) for name in "kv"},
        "layers.0.self_attn.q_proj": (queries, 2 * size),
        "layers.0.self_attn.o_proj": (size, queries),
        **{f"layers.0.mlp.{name}_proj": (inner, size) for name in ("gate", "up")},
        "layers.0.mlp.down_proj": (size, inner),
    }
    if layer["model_type"] == "qwen3":
        shapes |= {f"layers.0.self_attn.{name}_norm": (dim,) for name in "qk"}
    if fields.get("use_aux_hidden_state", True):
        shapes["fc"] = (size, read)
        shapes |= {"input_norm": (read,)} if fields.get("norm_before_fc") else {}
        each = range(read // target["hidden_size"] if fields.get("fc_norm") else 0)
        shapes |= {f"fc_norm.{at}": (target["hidden_size"],) for at in each}
    weights = {f"{name}.weight": _random(shape) for name, shape in shapes.items()}
    if own != vocab_size:
        chosen = torch.randperm(vocab_size)[:own].sort().values
        weights["d2t"] = chosen - torch.arange(own)
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return weights


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns norm weights around 1, or a matrix that roughly preserves the magnitude of its inputs."""
    if len(shape) == 1:
        return 1.0 + 0.2 * torch.randn(shape)
    return torch.randn(shape) * (1.5 / shape[-1] ** 0.5)
