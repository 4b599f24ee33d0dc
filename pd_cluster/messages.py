"""LMDeploy's module `messages` under its own name: configurations and responses, which are defined in offline/."""

from pd_cluster.offline.lmdeploy.engine_configs import PytorchEngineConfig, TurbomindEngineConfig
from pd_cluster.offline.lmdeploy.generation_config import GenerationConfig, GenOut, Response

__all__ = ["GenOut", "GenerationConfig", "PytorchEngineConfig", "Response", "TurbomindEngineConfig"]
