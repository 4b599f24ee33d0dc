"""LMDeploy's `VisionConfig`: how many pictures its tower computes at once. Here each is computed by itself."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

from pd_cluster.errors import ConfigError
from pd_cluster.offline.lmdeploy.argument_checks import count


@dataclass
class VisionConfig:
    """Changes nothing: a picture's numbers never depend on the pictures beside it."""

    max_batch_size: int = 1
    thread_safe: bool = False


def vision_remarks(config: object) -> list[str]:
    """Returns what has no effect of it. Raises ConfigError."""
    if config is None:
        return []
    if not isinstance(config, VisionConfig):
        raise ConfigError(f"pipeline.vision_config {reprlib.repr(config)}: expected a VisionConfig")
    if count("VisionConfig", "max_batch_size", config.max_batch_size, 1) == 1:
        return []
    return [f"vision_config.max_batch_size={config.max_batch_size} (images are computed one at a time)"]
