"""Converts InternLM's and InternLM2's weights to a Llama's: other names, and one matrix split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pd_cluster.checkpoints.internlm import llama_names
from pd_cluster.checkpoints.weight_files import weight_files
from pd_cluster.errors import ModelError
from pd_cluster.model.parallel.plan import WHOLE, ParallelPlan
from pd_cluster.model.parallel.shard import take


def read_as_llama(
    folder: Path, config: dict[str, Any], plan: ParallelPlan | None = None, rank: int = 0
) -> dict[str, torch.Tensor]:
    """Maps Llama's names to all weights or a rank's shares. `config`: in Llama's form. Raises ModelError."""
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as stream:
                for key in stream.keys():  # noqa: SIM118  (not a dict)
                    names = llama_names(key)
                    if not names:
                        continue
                    whole = stream.get_tensor(key)
                    parts = apart(whole, config) if len(names) > 1 else (whole,)
                    for name, part in zip(names, parts, strict=True):
                        cut = WHOLE if plan is None else plan.cut(name, tuple(part.shape), rank)
                        weights[name] = take(part, cut)
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
    return weights


def apart(packed: torch.Tensor, config: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Splits [(num_heads + 2 * num_kv_heads) * head_dim, …], stored by groups, into queries, keys and values.

    Each KV head has a group: the queries that share it, its key, its value.
    """
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    grouped = packed.reshape(num_kv_heads, num_heads // num_kv_heads + 2, head_dim, *packed.shape[1:])
    query, key, value = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return tuple(each.reshape(-1, *packed.shape[1:]).contiguous() for each in (query, key, value))
