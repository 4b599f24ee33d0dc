"""The answer of /server_info: the version and the settings in effect, without keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pd_cluster import __version__
from pd_cluster.settings.process_configs import ApiConfig
from pd_cluster.settings.setting import declared


def info_of(config: ApiConfig) -> dict[str, Any]:
    """Returns the settings of everything that serves requests, by name, as written in a command line."""
    return {"version": __version__, "is_openai": config.is_openai, "settings": dict(sorted(_shown(config)))}


def _shown(group: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Yields the settings of a struct and of all structs in it."""
    for each in declared(type(group)):
        if not each.setting.is_secret:
            yield each.name, msgspec.to_builtins(each.write(getattr(group, each.field)))
    for field in msgspec.structs.fields(group):
        if isinstance(value := getattr(group, field.name), msgspec.Struct):
            yield from _shown(value)
