"""`pd-cluster check`: what this process would do with the rank tables and variables at hand, and every deadline.

For a worker on NPUs also every variable of HCCL, with the deadlines' defaults. Looks at no device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pd_cluster import hccl
from pd_cluster.cluster.credentials import KeyFiles, admin_token_of, credentials_of
from pd_cluster.cluster.place import Place, find_place, node_ports
from pd_cluster.config import PortRange, Timeouts
from pd_cluster.device import num_threads_for
from pd_cluster.errors import ConfigError
from ranktable_tools import permission_warnings
from ranktable_tools.npu import HCCN_CONF

VARIABLE = "PD_CLUSTER_SERVE_"  # a flag of `serve` may be a variable; those on a command line are not seen here

FLAGS = {
    "heartbeat_interval_s": "one heartbeat on every connection",
    "dead_after_s": "silence after which a peer is dead (end of file: at once)",
    "connect_timeout_s": "opening a connection or a link; tried again after 0.5 s, doubling to 5 s",
    "credit_timeout_s": "a decode instance that makes no progress must take an offered transfer within this",
    "transfer_timeout_s": "a transfer that stands still is given up",
    "collective_timeout_s": "a rank of an instance waits for the others",
    "step_timeout_s": "an engine that does not come back from a step is ended; 0: never",
    "link_keepalive_s": "a link that is idle is probed",
    "request_timeout_s": "a whole request",
    "drain_timeout_s": "running requests after SIGTERM",
    "replay_wait_s": "a request whose instance died waits for one that can go on",
    "guided_timeout_s": "trying a schema, regex or grammar of a request",
}


def run(env: Mapping[str, str]) -> None:
    """Prints tables; raises ConfigError for the first fault of the tables or variables."""
    console = Console(width=None if os.isatty(1) else 110)
    console.print(_deadlines())
    if not env.get("GLOBAL_RANK_TABLE_FILE_PATH"):
        console.print("no rank table: set GLOBAL_RANK_TABLE_FILE_PATH and RANK_TABLE_FILE_PATH to check them")
        return
    place = find_place(env)
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
        if hccl.is_wanted(env.get(f"{VARIABLE}DEVICE") or "auto", place.server):
            console.print(_hccl(place, env))
            if not HCCN_CONF.exists():
                console.print(f"warning: {HCCN_CONF} is missing, and HCCL reads the NPUs' addresses there: mount it")
    console.print(_keys(place, env))


def _keys(place: Place, env: Mapping[str, str]) -> str:
    """Whether an instance would find its files. Flags of its command line are not seen here, so it is no fault."""
    secret, key, token = (env.get(f"{VARIABLE}{name}_FILE") for name in ("SECRET", "SCHEDULER_KEY", "ADMIN_TOKEN"))
    files = KeyFiles(secret, key, token, env.get(f"{VARIABLE}DERIVE_SECRET", "").lower() in ("1", "true"))
    try:
        credentials_of(place, files)
        if place.role == "scheduler":
            admin_token_of(place, files)
    except ConfigError as error:
        return f"warning: {error}"
    return "the files of the cluster's secrets are there and readable" if not files.derives else "secrets: derived"


def _deadlines() -> Table:
    table = Table("flag", "seconds", "what it bounds", title="deadlines")
    times = Timeouts()
    for name, meaning in FLAGS.items():
        table.add_row("--" + name.removesuffix("_s").replace("_", "-"), f"{getattr(times, name):g}", meaning)
    return table


def _hccl(place: Place, env: Mapping[str, str]) -> Table:
    ports = PortRange.parse(env.get(f"{VARIABLE}KV_PORT_RANGE", ""))
    table = Table("variable", "value", "why", title="HCCL: what the ranks on NPUs get")
    for each in hccl.settings(place.server, place.bind_address, Timeouts(), ports, env):
        table.add_row(each.name, "not set" if not each.value else each.value, each.reason)
    return table


def _instances(place: Place, env: Mapping[str, str]) -> Table:
    ports: list[str] = []
    try:
        ports = [str(port) for port in node_ports(env, place)]
    except ConfigError:
        if place.role == "scheduler" or env.get("NODE_PORTS") or env.get("NODE_PORTS_FILE"):
            raise
    table = Table("instance", "host", "devices", "port", title=str(place.table.file))
    for at, (name, server) in enumerate(zip(place.names, place.table.instances, strict=True)):
        devices = ",".join(device.device_id for device in server.device)
        table.add_row(name, server.server_ip, devices, ports[at] if ports else "NODE_PORTS is not set")
    return table
