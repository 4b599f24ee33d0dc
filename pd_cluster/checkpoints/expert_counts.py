"""Reads the number of experts per sparse block from a config.json, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_cluster.checkpoints.architectures import defaults_of

FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Returns the number of routed experts, without shared ones; 0: none.

    `config`: a text model's config, or a whole config.json with a `text_config`. Missing fields have transformers'
    defaults.
    """
    if isinstance(text := config.get("text_config"), Mapping):
        return num_experts_of(text)
    for fields in (config, defaults_of(str(config.get("model_type")))):
        for name in FIELDS:
            if isinstance(value := fields.get(name), int) and not isinstance(value, bool):
                return value
    return 0
