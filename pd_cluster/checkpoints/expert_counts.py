"""Reads from a config.json, without torch, how many experts each sparse block of a model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_cluster.checkpoints.architectures import defaults_of

FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Returns the experts that a router chooses from, shared ones apart; 0: the model has none.

    `config`: that of a text model, or a whole config.json with its `text_config`. A field that is missing has
    transformers' default.
    """
    if isinstance(text := config.get("text_config"), Mapping):
        return num_experts_of(text)
    for fields in (config, defaults_of(str(config.get("model_type")))):
        for name in FIELDS:
            if isinstance(value := fields.get(name), int) and not isinstance(value, bool):
                return value
    return 0
