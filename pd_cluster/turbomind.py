"""LMDeploy's module `turbomind` under its own name: the configuration of its backend, defined in offline/."""

from pd_cluster.offline.lmdeploy.engine_configs import EarlyTurbomindConfig as EngineConfig

__all__ = ["EngineConfig"]
