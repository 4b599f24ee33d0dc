"""`pd-cluster check`: shows how this process would use the given rank tables and variables, and every deadline.

Shows the KV pools of the model that the variables name. For a worker on NPUs, also shows HCCL's variables, derived from
the default deadlines. On a machine with NPUs, also shows the versions of their software and faults in it. Uses devices
and the network only with `--network`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pd_cluster.cluster.members.cluster_credentials import admin_token_of, credentials_of
from pd_cluster.cluster.members.rank_table_place import Place, find_place, node_ports
from pd_cluster.devices import hccl_environment, npu_software
from pd_cluster.devices.device import num_threads_for
from pd_cluster.errors import ConfigError
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_settings import KeyFiles, PortRange
from pd_cluster.settings.serve_options import ServeOptions, settings
from pd_cluster.settings.setting import declared, variable_of
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools import permission_warnings
from ranktable_tools.npu import HCCN_CONF

if TYPE_CHECKING:
    from pd_cluster.model.planning.pools_before_loading import ExpectedPools

WARNING = "warning: "


def run(env: Mapping[str, str], network: bool = False, wait_s: float = 0.0, as_json: bool = False) -> bool:
    """Prints the tables or, with `network`, the findings about the network. Returns whether the network has no fault.

    Raises ConfigError for the first fault in the tables or variables.
    """
    console = Console(width=None if os.isatty(1) else 110)
    if network:
        from pd_cluster.commands.network_check import run as check_network

        return check_network(find_place(env), env, console, wait_s, as_json)
    if as_json:
        print(json.dumps(check_report(env), indent=2))
        return True
    console.print(_deadlines())
    for line in _npu_software(env):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if head := _head(env):
        console.print(head)
    if env.get("GLOBAL_RANK_TABLE_FILE_PATH"):
        _show_place(find_place(env), env, console)
    else:
        console.print("no rank table: set GLOBAL_RANK_TABLE_FILE_PATH and RANK_TABLE_FILE_PATH to check them")
    if (engine := _engine(env)) is not None:
        console.print(str(_pools(engine)), markup=False, highlight=False, soft_wrap=True)
    return True


def _show_place(place: Place, env: Mapping[str, str], console: Console) -> None:
    for warning in permission_warnings([Path(place.table.file)]):
        console.print(f"warning: {warning}")
    console.print(_instances(place, env))
    if place.role == "scheduler":
        console.print("this process: scheduler")
    else:
        console.print(
            f"this process: {place.name} at {place.bind_address}, "
            f"{num_threads_for(place.num_local_ranks)} compute threads "
            f"a rank (this host's cores are shared by {place.num_local_ranks} ranks)"
        )
        if hccl_environment.is_wanted(_setting_of(env, "device") or "auto", place.server):
            console.print(_hccl(place, env))
            if not HCCN_CONF.exists():
                console.print(f"warning: {HCCN_CONF} is missing, and HCCL reads the NPUs' addresses there: mount it")
    console.print(_keys(place, env))


def check_report(env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the findings for JSON. Raises ConfigError."""
    found: dict[str, Any] = {
        "deadlines": {each.flag: each.default for each in declared(Timeouts)},
        "npu_software": _npu_software(env),
        "pools": None if (engine := _engine(env)) is None else _pools(engine).to_json(),
        "process": None,
        "instances": [],
        "warnings": [],
    }
    if not env.get("GLOBAL_RANK_TABLE_FILE_PATH"):
        return found
    place = find_place(env)
    keys = _keys(place, env)
    found["process"] = {"name": place.name, "role": place.role, "table": str(place.table.file)}
    found["warnings"] = [*permission_warnings([Path(place.table.file)])]
    if keys.startswith(WARNING):
        found["warnings"].append(keys.removeprefix(WARNING))
    ports = _ports(place, env)
    for at, (name, server) in enumerate(zip(place.names, place.table.instances, strict=True)):
        devices = [device.device_id for device in server.device]
        port = ports[at] if ports else None
        found["instances"].append({"name": name, "host": server.server_ip, "devices": devices, "port": port})
    return found


def _keys(place: Place, env: Mapping[str, str]) -> str:
    """Reports whether an instance would find its secrets' files. Only warns, because its flags are not known here."""
    derives = _is_on(env, "derive_secret")
    secret, key, token = (_setting_of(env, f"{name}_file") for name in ("secret", "scheduler_key", "admin_token"))
    node_key, trusted = (_setting_of(env, name) or "" for name in ("node_key_file", "trusted_nodes"))
    files = KeyFiles(secret, key, token, derives, node_key, trusted)
    try:
        credentials_of(place, files)
        if place.role == "scheduler":
            admin_token_of(place, files)
    except ConfigError as error:
        return f"{WARNING}{error}"
    return "the files of the cluster's secrets are there and readable" if not files.derives else "secrets: derived"


def _engine(env: Mapping[str, str]) -> EngineConfig | None:
    """Returns the engine's settings from the variables; None if they name no model. Raises ConfigError."""
    given = {name: text for name in settings() if (text := _setting_of(env, name))}
    return ServeOptions.written(given).engine() if "model" in given else None


def _pools(engine: EngineConfig) -> ExpectedPools:
    from pd_cluster.model.planning.pools_before_loading import expected_pools

    return expected_pools(engine)


def _head(env: Mapping[str, str]) -> str:
    """Returns how a draft head affects the KV cache; "" if the variables name no head. Raises ConfigError."""
    given = _setting_of(env, "speculative_config")
    method = settings()["speculative_config"].read(given).with_weights if given else None
    if method in (None, "draft_model"):
        return ""
    return (
        f"{method}: its layer is part of the KV cache, and is handed over to instances with the same head; other "
        f"instances get the model's own layers only, and their head starts without the prompt"
    )


def _setting_of(env: Mapping[str, str], setting: str) -> str | None:
    """Returns the value of the variable of a setting of `serve`, whose command line is not known here."""
    return env.get(variable_of(setting))


def _is_on(env: Mapping[str, str], setting: str) -> bool:
    return (_setting_of(env, setting) or "").lower() in ("1", "true")


def _npu_software(env: Mapping[str, str]) -> list[str]:
    """Returns one line of versions, then a line for each fault; no lines on a machine without NPUs."""
    if not npu_software.has_npu():
        return []
    found = npu_software.installed(env)
    versions = ", ".join(f"{software} {each.version or 'not found'}" for software, each in found.items())
    faults = npu_software.faults(found)
    return [f"software of the NPUs: {versions}", *(f"warning: {fault}" for fault in faults)]


def _deadlines() -> Table:
    table = Table("flag", "seconds", "what it bounds", title="deadlines")
    for each in declared(Timeouts):
        table.add_row(each.flag, f"{each.default:g}", each.setting.detail)
    return table


def _hccl(place: Place, env: Mapping[str, str]) -> Table:
    ports = PortRange.parse(_setting_of(env, "kv_port_range") or "")
    table = Table("variable", "value", "why", title="HCCL: what the ranks on NPUs get")
    is_fast = _is_on(env, "fast_collectives")
    for each in hccl_environment.settings(place.server, place.bind_address, Timeouts(), ports, env, is_fast):
        table.add_row(each.name, "not set" if not each.value else each.value, each.reason)
    return table


def _ports(place: Place, env: Mapping[str, str]) -> list[int]:
    """Returns the ports of NODE_PORTS; empty for a worker if it is not set. Raises ConfigError."""
    try:
        return node_ports(env, place)
    except ConfigError:
        if place.role == "scheduler" or env.get("NODE_PORTS") or env.get("NODE_PORTS_FILE"):
            raise
        return []


def _instances(place: Place, env: Mapping[str, str]) -> Table:
    ports = _ports(place, env)
    table = Table("instance", "host", "devices", "port", title=str(place.table.file))
    for at, (name, server) in enumerate(zip(place.names, place.table.instances, strict=True)):
        devices = ",".join(device.device_id for device in server.device)
        table.add_row(name, server.server_ip, devices, str(ports[at]) if ports else "NODE_PORTS is not set")
    return table
