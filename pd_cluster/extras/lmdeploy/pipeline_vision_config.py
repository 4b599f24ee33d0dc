"""LMDeploy's `VisionConfig`, the number of images that the tower computes at once; here it is always one."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

from pd_cluster.errors import ConfigError
from pd_cluster.extras.lmdeploy.argument_checks import count


@dataclass
class VisionConfig:
    """Has no effect: an image's features never depend on other images."""

    max_batch_size: int = 1
    thread_safe: bool = False


def vision_remarks(config: object) -> list[str]:
    """Returns remarks on settings without effect. Raises ConfigError."""
    if config is None:
        return []
    if not isinstance(config, VisionConfig):
        raise ConfigError(f"pipeline.vision_config {reprlib.repr(config)}: expected a VisionConfig")
    if count("VisionConfig", "max_batch_size", config.max_batch_size, 1) == 1:
        return []
    return [f"vision_config.max_batch_size={config.max_batch_size} (images are computed one at a time)"]
