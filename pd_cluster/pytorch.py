"""LMDeploy's module `pytorch` under its own name: the configuration of its backend, defined in offline/."""

from pd_cluster.offline.lmdeploy.engine_configs import PytorchEngineConfig as EngineConfig

__all__ = ["EngineConfig"]
