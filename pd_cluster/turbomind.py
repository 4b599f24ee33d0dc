"""LMDeploy's module `turbomind`, by its name: its backend's configuration. It is made in offline/."""

from pd_cluster.offline.lmdeploy.engine_configs import EarlyTurbomindConfig as EngineConfig

__all__ = ["EngineConfig"]
