"""LMDeploy's module `turbomind` under its own name: the configuration of its backend."""

from pd_cluster.extras.lmdeploy.engine_configs import EarlyTurbomindConfig as EngineConfig

__all__ = ["EngineConfig"]
