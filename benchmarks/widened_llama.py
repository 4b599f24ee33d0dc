"""Pads a small Llama, for `benchmarks speculative`: steps then cost as much as a larger model's, and answers stay the
same.

Hidden values beyond the small model's width stay zero, because nothing writes to them. New heads, inner values and
layers compute with random weights, and their results are multiplied by zero or by `noise`. Imports torch.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.model_shapes import ModelShape
from pd_cluster.errors import ConfigError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
NUM_HALVINGS, NUM_TOKENS = 10, 48
Weights = dict[str, torch.Tensor]


def widened(folder: Path, out: Path, shape: ModelShape, noise: float = 0.0) -> Path:
    """Writes the model in `folder`, padded to `shape` and in float32, to `out`. Returns `out`.

    A norm divides by the root of the mean of squares. The additional zeros lower this mean, so weights and epsilon are
    corrected. Ids beyond the small vocabulary have logit 0. `noise`: the scale of the new layers' results. Raises
    ConfigError.
    """
    config = json.loads((folder / CONFIG).read_text())
    small = {name: weight.float() for name, weight in load_file(folder / WEIGHTS).items()}
    _check(config, shape)
    torch.manual_seed(0)
    share = config["hidden_size"] / shape.hidden_size
    wide: Weights = {"model.embed_tokens.weight": _padded(small["model.embed_tokens.weight"], *shape.head)}
    wide["lm_head.weight"] = _padded(small.get("lm_head.weight", small["model.embed_tokens.weight"]), *shape.head)
    wide["model.norm.weight"] = _norm(small["model.norm.weight"], shape, share)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        given = {name.removeprefix(prefix): weight for name, weight in small.items() if name.startswith(prefix)}
        made = _layer(given, config, shape, share) if given else _new_layer(config["hidden_size"], shape, share, noise)
        wide |= {prefix + name: weight for name, weight in made.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in wide.items()}, out / WEIGHTS, {"format": "pt"})
    other = {"rms_norm_eps": config["rms_norm_eps"] * share, "tie_word_embeddings": False, "dtype": "float32"}
    (out / CONFIG).write_text(json.dumps({**config, **_sizes(shape), **other}, indent=2))
    for name in TOKENIZER:
        shutil.copy(folder / name, out / name)
    return out


def agreement(small: Any, wide: Any, prompts: Sequence[Sequence[int]]) -> float:
    """Returns the share of the wide model's greedy tokens that the small model would choose at the same position."""
    num_equal = 0
    for prompt in prompts:
        given = torch.tensor([prompt])
        how = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
        made = wide.generate(given, attention_mask=torch.ones_like(given), **how)
        said = small(made[:, :-1]).logits.argmax(-1)  # [1, num_tokens - 1]
        num_equal += int((said == made[:, 1:])[:, len(prompt) - 1 :].sum())
    return num_equal / (NUM_TOKENS * len(prompts))


@torch.inference_mode()
def noise_for(wanted: float, folder: Path, shape: ModelShape, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Returns, by bisection, the noise with which both agree in about `wanted` of the tokens, and the actual share."""
    small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as place:
        widened(folder, Path(place), shape, noise=1.0)
        wide = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    layers = wide.model.layers[small.config.num_hidden_layers :]
    added = [each.weight for layer in layers for each in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    units = [weight.clone() for weight in added]
    low, high, best = 2.0**-8, 2.0**8, (0.0, 1.0)
    for _ in range(NUM_HALVINGS):
        noise = math.sqrt(low * high)
        for weight, unit in zip(added, units, strict=True):
            weight.copy_(noise * unit)
        found = agreement(small, wide, prompts)
        if abs(found - wanted) < abs(best[1] - wanted):
            best = noise, found
        low, high = (noise, high) if found > wanted else (low, noise)
    return best


def _check(config: dict[str, Any], shape: ModelShape) -> None:
    for name, value in _sizes(shape).items():
        if config[name] > value:
            raise ConfigError(f"{name} {value}: the small model has {config[name]}; give at least that")
    if config["head_dim"] != shape.head_dim:
        raise ConfigError(f"head_dim {shape.head_dim}: the small model has {config['head_dim']}; give that")
    assert config["num_attention_heads"] * shape.num_kv_heads <= config["num_key_value_heads"] * shape.num_heads


def _layer(given: Weights, config: dict[str, Any], shape: ModelShape, share: float) -> Weights:
    """Returns a layer of the small model, padded. Query heads keep their KV heads."""
    width = config["hidden_size"]
    made = _new_layer(width, shape, share, 0.0)
    per_group = config["num_attention_heads"] // config["num_key_value_heads"]
    groups = torch.arange(config["num_key_value_heads"])
    heads = (groups[:, None] * (shape.num_heads // shape.num_kv_heads) + torch.arange(per_group)).flatten()
    places = {"q": _rows(heads, shape), "k": _rows(groups, shape), "v": _rows(groups, shape)}
    rows = {f"self_attn.{name}_proj.weight": at for name, at in places.items()}
    inner = torch.arange(config["intermediate_size"])
    rows |= {"mlp.gate_proj.weight": inner, "mlp.up_proj.weight": inner}
    for name, at in rows.items():
        made[name][at] = torch.nn.functional.pad(given[name], (0, shape.hidden_size - width))
    made["self_attn.o_proj.weight"][:width, places["q"]] = given["self_attn.o_proj.weight"]
    made["mlp.down_proj.weight"][:width, inner] = given["mlp.down_proj.weight"]
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        made[name] = _norm(given[name], shape, share)
    return made


def _new_layer(width: int, shape: ModelShape, share: float, noise: float) -> Weights:
    """Returns a layer of random weights that adds its results, times `noise`, to the first `width` values."""
    hidden, attention, kv = shape.hidden_size, *(n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
    sizes = {"q": attention, "k": kv, "v": kv}
    made = {f"self_attn.{name}_proj.weight": _random(size, hidden, width) for name, size in sizes.items()}
    made |= {f"mlp.{name}_proj.weight": _random(shape.intermediate_size, hidden, width) for name in ("gate", "up")}
    for name, size in (("self_attn.o_proj", attention), ("mlp.down_proj", shape.intermediate_size)):
        made[f"{name}.weight"] = torch.zeros(hidden, size)
        made[f"{name}.weight"][:width] = noise * _random(width, size, size)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        made[name] = _norm(torch.ones(width), shape, share)
    return made


def _rows(heads: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    return (heads[:, None] * shape.head_dim + torch.arange(shape.head_dim)).flatten()


def _random(rows: int, columns: int, num_inputs: int) -> torch.Tensor:
    return torch.randn(rows, columns) / math.sqrt(num_inputs)


def _padded(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))


def _norm(weight: torch.Tensor, shape: ModelShape, share: float) -> torch.Tensor:
    return torch.nn.functional.pad(weight * math.sqrt(share), (0, shape.hidden_size - len(weight)), value=1.0)


def _sizes(shape: ModelShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
    }
