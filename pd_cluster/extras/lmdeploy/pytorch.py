"""LMDeploy's module `pytorch` under its own name: the configuration of its backend."""

from pd_cluster.extras.lmdeploy.engine_configs import PytorchEngineConfig as EngineConfig

__all__ = ["EngineConfig"]
