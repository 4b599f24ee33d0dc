"""Finds this process's role, name and address in the rank tables that the environment names.

GLOBAL_RANK_TABLE_FILE_PATH, RANK_TABLE_FILE_PATH, NODE_PORTS and USE_OPENAI are the reference deployment's variables;
NODE_PORTS_FILE names a file that replaces NODE_PORTS and is read whenever the table is.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pd_cluster.errors import ConfigError, called
from ranktable_tools import RankTable, Role, Server, check, load_global, load_local, locate, parse_node_ports
from ranktable_tools.host_addresses import is_one_host, machine_key
from ranktable_tools.ports import GivenPorts, port_faults
from ranktable_tools.schema import RankTableError
from ranktable_tools.table_types import ROLES, Device, server_group

RESOLVE_AGAIN_S = 0.5
PlaceRole = Role | Literal["encode"]  # encoders are in no rank table
TABLE_VARIABLES = ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS", "NODE_PORTS_FILE")


@dataclass(frozen=True, slots=True)
class Place:
    """A process's entry in the cluster. `names` are the workers' names in the order of NODE_PORTS.

    `own_name`: the name of a worker outside the rank tables.
    """

    role: PlaceRole
    index: int
    server: Server
    table: RankTable
    own_name: str = ""

    @property
    def name(self) -> str:
        if self.own_name:
            return self.own_name
        return "scheduler" if self.role == "scheduler" else f"{self.role}-{self.index}"

    @property
    def names(self) -> list[str]:
        return [f"prefill-{i}" for i in range(len(self.table.prefill))] + [
            f"decode-{i}" for i in range(len(self.table.decode))
        ]

    @property
    def hosts(self) -> dict[str, str]:
        return dict(zip(self.names, (server.server_ip for server in self.table.instances), strict=True))

    @property
    def bind_address(self) -> str:
        """Returns this process's numeric address in the table.

        Raises ConfigError for a name that cannot be resolved.
        """
        return resolve_host(self.server.server_ip)

    @property
    def num_local_ranks(self) -> int:
        """The number of rank processes on this host: one for each device of the table's workers here."""
        here = machine_key(self.server.server_ip)
        return sum(len(server.device) for server in self.table.instances if machine_key(server.server_ip) == here)

    def paired_tp_sizes(self, kv_transport: str, most: int = 0) -> tuple[int, ...]:
        """Returns the number of devices of each instance with which this one may exchange KV cache over communicators.

        These are all instances of the other role; instances on this host count only if `kv_transport` always needs
        communicators. If `most` limits the open links (0: no limit), only the `most` + 1 largest instances count: the
        link to one more may still be closing.
        """
        others = self.table.decode if self.role == "prefill" else self.table.prefill
        here = "" if kv_transport in ("dist", "curve") else machine_key(self.server.server_ip)
        sizes = tuple(len(server.device) for server in others if machine_key(server.server_ip) != here)
        return sizes if not most or len(sizes) <= most + 1 else tuple(sorted(sizes, reverse=True)[: most + 1])

    @property
    def number_here(self) -> int:
        """Counts the instances on this host that precede this one in the table."""
        here = machine_key(self.server.server_ip)
        before = self.table.instances[: self.names.index(self.name)] if self.name in self.names else ()
        return sum(1 for each in before if machine_key(each.server_ip) == here)

    @property
    def other_hosts(self) -> tuple[str, ...]:
        """The other hosts of instances that exchange KV cache with this one."""
        others = self.table.decode if self.role == "prefill" else self.table.prefill
        here = self.server.server_ip
        return tuple(dict.fromkeys(each.server_ip for each in others if not is_one_host(each.server_ip, here)))

    @property
    def first_local_rank(self) -> int:
        """The number of devices of the instances on this host that precede this one in the table."""
        here = machine_key(self.server.server_ip)
        before = self.table.instances[: self.names.index(self.name)]
        return sum(len(server.device) for server in before if machine_key(server.server_ip) == here)

    @property
    def spans_hosts(self) -> bool:
        return spans_hosts(self.table)

    @property
    def folder(self) -> Path:
        """The folder of the global table and of the files of cluster_credentials.py."""
        return Path(self.table.file).parent


def spans_hosts(table: RankTable) -> bool:
    servers = [s for s in (table.scheduler, *table.instances) if s is not None]
    return len({machine_key(s.server_ip) for s in servers}) > 1


def digest_of(table: RankTable) -> bytes:
    """Returns a digest that is equal for tables with the same content."""
    return hashlib.sha256(table.to_json().encode()).digest()[:16]


def find_place(env: Mapping[str, str]) -> Place:
    """Finds this process in the tables.

    Raises ConfigError for a missing variable, a faulty table, or a local table whose entry is not in the global table.
    """
    global_path = table_path(env)
    local_path = _variable(env, "RANK_TABLE_FILE_PATH")
    try:
        table, local = load_global(global_path), load_local(local_path)
        faults = check(global_path)
        if faults:
            raise ConfigError(str(faults[0]))
        role, index = locate(table, local)
    except RankTableError as error:
        raise ConfigError(str(error)) from None
    return Place(role, index, local.server, table)


def place_alone(role: PlaceRole, host: str, own_name: str = "", num_devices: int = 0) -> Place:
    """Returns the place of a process that reads no rank table: its table has no file and contains only the process
    itself.
    """
    devices = tuple(Device(str(at), host, str(at)) for at in range(num_devices))
    server = Server(host, host, devices)
    groups = tuple(server_group(each, (server,) if each == role else ()) for each in ROLES)
    return Place(role, 0, server, RankTable("1.0", "completed", groups), own_name)


def table_path(env: Mapping[str, str]) -> Path:
    """Returns the global table's path. Raises ConfigError."""
    return _variable(env, "GLOBAL_RANK_TABLE_FILE_PATH")


def check_ports(place: Place, given: GivenPorts) -> None:
    """Raises ConfigError if ports of this process or this table conflict."""
    for fault in port_faults(place.table, None, given):
        raise ConfigError(str(fault))


def node_ports(env: Mapping[str, str], place: Place, given: GivenPorts | None = None) -> list[int]:
    """Returns NODE_PORTS, or NODE_PORTS_FILE's content: a port per instance of the global table. Raises ConfigError.

    `given`: the scheduler's own ports, which no instance on its host may use.
    """
    file = env.get("NODE_PORTS_FILE", "").strip()
    text = (_read_ports(file) if file else env.get("NODE_PORTS", "")).strip()
    if not text:
        raise ConfigError(
            "NODE_PORTS is not set: the scheduler needs the workers' ports in the order of the global rank table, "
            "prefill first, such as NODE_PORTS=8088,8089"
        )
    faults = check(Path(place.table.file), node_ports=text, given=given or GivenPorts())
    if faults:
        raise ConfigError(str(faults[0]))
    return parse_node_ports(text)


def use_openai(env: Mapping[str, str]) -> bool:
    """Reads USE_OPENAI, default 1. Raises ConfigError for anything but 0 and 1."""
    value = env.get("USE_OPENAI", "1").strip()
    if value not in ("0", "1"):
        raise ConfigError(f"USE_OPENAI={value!r}: expected 1 (OpenAI API) or 0 (vLLM's /generate)")
    return value == "1"


def resolve_host(host: str, what: str = "server_ip {!r} of the rank table") -> str:
    """Returns the numeric address of a host, for sockets. Raises ConfigError, in which `what` names the host."""
    return resolve_hosts(host, what)[0]


def resolve_hosts(host: str, what: str) -> list[str]:
    """Returns all numeric addresses of a name, in the order of the name server. Raises ConfigError."""
    if host == "localhost":
        return ["127.0.0.1"]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    except OSError as error:
        raise ConfigError(f"{what.format(host)} cannot be resolved: {error.strerror}") from None


def address_towards(addresses: Sequence[tuple[str, int]], timeout_s: float) -> str:
    """Returns this host's address on the route to the first of these addresses that it can resolve and reach.

    Retries for `timeout_s`, because a name may get its address only when its owner starts. Raises ConfigError.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        for host, port in addresses:
            try:
                number = resolve_host(host, "host {!r}")
                with socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((number, port))  # sends nothing
                    return str(probe.getsockname()[0])
            except (ConfigError, OSError) as error:
                reason = error
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"{called('join')}: {reason}; give this worker's own address as {called('advertise_host')}"
            )
        time.sleep(RESOLVE_AGAIN_S)  # no event reports that a name has an address


def _read_ports(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"NODE_PORTS_FILE={file}: {reason}") from None


def _variable(env: Mapping[str, str], name: str) -> Path:
    value = env.get(name, "").strip()
    if not value:
        raise ConfigError(f"{name} is not set: it must name a rank table; see pd-ranktable gen")
    path = Path(value)
    if not _may_be_file(path):
        other = path.with_name(path.name.replace("rank_table", "ranktable"))  # the documentation uses both spellings
        if not _may_be_file(other):
            raise ConfigError(f"{name}={value}: no such file")
        path = other
    return path


def _may_be_file(path: Path) -> bool:
    """Returns True also for a file in an unsearchable folder: reading it gives the better error."""
    try:
        return path.is_file()
    except PermissionError:
        return True
