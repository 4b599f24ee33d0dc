"""Adapters for benchmarks: of all linear layers of a Llama, with random numbers."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pd_cluster.checkpoints.lora_folder import CONFIG_FILE, WEIGHTS_FILE

MODULES = (*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
DEVIATION = 0.02


class LoraFolders:
    """Adapters that share one file of weights, under other settings and so with other digests."""

    def __init__(self, place: Path, model: Path, rank: int) -> None:
        """`place`: the folder for them."""
        self._place, self._rank = place, rank
        self._num = 0
        config = json.loads((model / "config.json").read_text())
        numbers = np.random.default_rng(0)
        header: dict[str, Any] = {}
        parts: list[bytes] = []
        at = 0
        for layer in range(config["num_hidden_layers"]):
            for module in MODULES:
                out_features, in_features = _shapes(config)[module.partition(".")[2]]
                name = f"base_model.model.model.layers.{layer}.{module}"
                for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                    data = (numbers.standard_normal(shape, dtype=np.float32) * DEVIATION).tobytes()
                    offsets = [at, at + len(data)]
                    header[f"{name}.lora_{side}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
                    parts.append(data)
                    at += len(data)
        place.mkdir(exist_ok=True)
        text = json.dumps(header).encode()
        (place / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))

    def next(self) -> Path:
        """Makes one that was not there before."""
        self._num += 1
        folder = self._place / str(self._num)
        folder.mkdir()
        os.link(self._place / WEIGHTS_FILE, folder / WEIGHTS_FILE)
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self._rank, "lora_alpha": self._num}
        settings["target_modules"] = sorted(module.partition(".")[2] for module in MODULES)
        (folder / CONFIG_FILE).write_text(json.dumps(settings))
        return folder


def _shapes(config: Any) -> dict[str, tuple[int, int]]:
    """Returns out_features and in_features by the last part of a module's name."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
