"""LMDeploy's module `messages`, by its name: configurations and responses. They are made in offline/."""

from pd_cluster.offline.lmdeploy.engine_configs import PytorchEngineConfig, TurbomindEngineConfig
from pd_cluster.offline.lmdeploy.messages import GenerationConfig, GenOut, Response

__all__ = ["GenOut", "GenerationConfig", "PytorchEngineConfig", "Response", "TurbomindEngineConfig"]
