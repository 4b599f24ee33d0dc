"""LMDeploy's module `messages` under its own name: configurations and responses, which this folder defines."""

from pd_cluster.extras.lmdeploy.engine_configs import PytorchEngineConfig, TurbomindEngineConfig
from pd_cluster.extras.lmdeploy.generation_config import GenerationConfig, GenOut, Response

__all__ = ["GenOut", "GenerationConfig", "PytorchEngineConfig", "Response", "TurbomindEngineConfig"]
