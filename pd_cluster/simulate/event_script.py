"""Reads a script of events in a simulated cluster: deaths, joins, drains, changes of roles and speeds.

Each line is a JSON object: `{"at_s": 30, "what": "kill", "instance": "decode-0"}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pd_cluster.errors import ConfigError
from pd_cluster.types import Role

What = Literal["kill", "join", "drain", "undrain", "remove", "role", "speed"]


class ScriptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event. `at_s`: its time since the first request. `role`: the role of a joining instance, or the new role.

    `slowdown`: the factor by which steps take longer from then on.
    """

    at_s: Annotated[float, msgspec.Meta(ge=0.0)]
    what: What
    instance: Annotated[str, msgspec.Meta(pattern=r"^(prefill|decode)-[0-9]+$")]
    role: Role | None = None
    slowdown: Annotated[float, msgspec.Meta(ge=0.01, le=1000.0)] = 1.0


def read_script(path: str) -> list[ScriptLine]:
    """Returns the events in order of time. Raises a ConfigError that names file, line and field."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--script {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = msgspec.json.decode(line, type=ScriptLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--script {path}: line {number}: {error}") from None
        if event.what == "role" and event.role not in ("prefill", "decode"):
            raise ConfigError(f"--script {path}: line {number}: role: give prefill or decode for what=role")
        found.append(event)
    return sorted(found, key=lambda each: each.at_s)
