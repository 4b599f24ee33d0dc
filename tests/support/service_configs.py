"""Makes settings of a text service, with defaults for most."""

from __future__ import annotations

from typing import Any

from pd_cluster.service.service_config import ServiceConfig
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import ApiConfig
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.settings.timeouts import Timeouts

OWN = ("seed", "sampling_defaults", "adapters", "handle_secret")


def service_config(
    model: str = "/models/x", max_model_len: int = 10_000, names: tuple[str, ...] = ("x",), **more: Any
) -> ServiceConfig:
    """`more`: further fields of ServiceConfig and ApiConfig."""
    own = {name: more.pop(name) for name in OWN if name in more}
    given = {"engine": EngineConfig(model=model), "served_model_names": [*names], "is_openai": True, **more}
    settings = ApiConfig(**{"timeouts": Timeouts(), "routing": RoutingConfig(), **given})
    return ServiceConfig(settings, max_model_len, **own)
