"""The answer of /server_info: the version and the settings in effect, without keys."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_cluster import __version__
from pd_cluster.settings.config import ApiConfig
from pd_cluster.settings.setting import declared


def info_of(config: ApiConfig) -> dict[str, Any]:
    """Returns settings by their names, as they are in effect for all that serves requests."""
    http, engine = config.http, config.engine
    groups: tuple[msgspec.Struct | None, ...] = (
        *(engine, engine.adapters, config.timeouts, config.routing, config, config.chat),
        *(http, http.connections, http.tls, http.responses),
    )
    shown = {
        each.name: msgspec.to_builtins(getattr(group, each.field))
        for group in groups
        if group is not None
        for each in declared(type(group))
        if not each.setting.is_secret
    }
    return {"version": __version__, "is_openai": config.is_openai, "settings": dict(sorted(shown.items()))}
