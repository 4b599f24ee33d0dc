"""Multi-token-prediction layers for a tiny checkpoint, and transformers' own computation of them."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.support.checkpoints import shake

FILE = "model.safetensors"


def add_mtp_layer(folder: Path, seed: int = 0) -> Path:
    """Writes a random prediction layer with a sparse block after the last layer, in DeepSeek's and GLM's format."""
    config = AutoConfig.from_pretrained(folder)
    index, width = config.num_hidden_layers, config.hidden_size
    of_one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
    of_one["layer_types"] = (getattr(config, "layer_types", None) or ())[:1]
    for name, value in of_one.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(seed + 1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shake(model)
    with TemporaryDirectory() as made:
        model.save_pretrained(made)
        stored = load_file(Path(made) / FILE)
    layer = {key.removeprefix("model.layers.0."): value for key, value in stored.items() if ".layers.0." in key}
    layer["shared_head.norm.weight"] = stored["model.norm.weight"]
    layer |= {f"{name}.weight": 1 + 0.3 * torch.randn(width) for name in ("enorm", "hnorm")}
    layer["eh_proj.weight"] = config.initializer_range * torch.randn(width, 2 * width)
    whole = load_file(folder / FILE)
    layer |= {
        "shared_head.head.weight": whole["lm_head.weight"],
        "embed_tokens.weight": whole["model.embed_tokens.weight"],
    }
    whole |= {f"model.layers.{index}.{name}": tensor.clone() for name, tensor in layer.items()}
    save_file(whole, folder / FILE, {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_nextn_predict_layers": 1}))
    return folder


def reference_mtp(folder: Path) -> tuple[Any, Any]:
    """Returns transformers' model and its MtpModel, both float32."""
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # transformers hard-codes the published models' layer index, and some configs do not give this layer's kind.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{main.config.num_hidden_layers}\..*"]
    main.config.num_mtp_layers = 1
    if hasattr(main.config, "mlp_layer_types"):
        main.config.mtp_mlp_layer_types = ["sparse"]
    return main, MtpModel.from_pretrained(main).eval()
