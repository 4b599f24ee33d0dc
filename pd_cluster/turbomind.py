"""LMDeploy's module `turbomind` under its own name: its backend's configuration, which is defined in offline/."""

from pd_cluster.offline.lmdeploy.engine_configs import EarlyTurbomindConfig as EngineConfig

__all__ = ["EngineConfig"]
