"""Builds the configuration of a prefill worker."""

from __future__ import annotations

from typing import Any

from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import Credentials, WorkerConfig
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts


def worker_config(address: str = "127.0.0.1", **changes: Any) -> WorkerConfig:
    settings: dict[str, Any] = {
        "name": "prefill-0",
        "role": "prefill",
        "device_ids": ["0"],
        "epoch": 1,
        "credentials": Credentials(b""),
        "num_threads": 1,
        "kv_port_range": PortRange(),
        "engine": EngineConfig(model="m"),
        "timeouts": Timeouts(),
    }
    return WorkerConfig(server_ip=address, bind_address=address, **{**settings, **changes})
