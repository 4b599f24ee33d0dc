"""Who am I: the role, name and address of this process, from the rank tables that the environment names.

GLOBAL_RANK_TABLE_FILE_PATH, RANK_TABLE_FILE_PATH, NODE_PORTS and USE_OPENAI are the reference deployment's variables;
NODE_PORTS_FILE names a file that is read instead of NODE_PORTS, each time the table is.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pd_cluster.errors import ConfigError
from ranktable_tools import RankTable, Role, Server, check, load_global, load_local, locate, parse_node_ports
from ranktable_tools.hosts import host_key, is_loopback
from ranktable_tools.schema import RankTableError


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in the cluster. `names` are the workers' names in the order of NODE_PORTS."""

    role: Role
    index: int
    server: Server
    table: RankTable

    @property
    def name(self) -> str:
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
        """The table's address of this process, as a number. Raises ConfigError for a name that does not resolve."""
        return resolve_host(self.server.server_ip)

    @property
    def num_local_ranks(self) -> int:
        """Devices of the table's worker instances on this host, this one's included: one rank process each."""
        here = host_key(self.server.server_ip)
        return sum(len(server.device) for server in self.table.instances if host_key(server.server_ip) == here)

    @property
    def spans_hosts(self) -> bool:
        return spans_hosts(self.table)

    @property
    def folder(self) -> Path:
        """The global table's, where the files of credentials.py are, too."""
        return Path(self.table.file).parent


def spans_hosts(table: RankTable) -> bool:
    servers = [s for s in (table.scheduler, *table.instances) if s is not None]
    return len({host_key(s.server_ip) for s in servers}) > 1 and not all(is_loopback(s.server_ip) for s in servers)


def digest_of(table: RankTable) -> bytes:
    """Equal for tables that say the same."""
    return hashlib.sha256(table.to_json().encode()).digest()[:16]


def find_place(env: Mapping[str, str]) -> Place:
    """Raises ConfigError: a variable that is missing, a table with faults, a local table that is not in the global."""
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


def table_path(env: Mapping[str, str]) -> Path:
    """The global table's. Raises ConfigError."""
    return _variable(env, "GLOBAL_RANK_TABLE_FILE_PATH")


def node_ports(env: Mapping[str, str], place: Place) -> list[int]:
    """NODE_PORTS, or what NODE_PORTS_FILE has: a port for each instance of the global table. Raises ConfigError."""
    file = env.get("NODE_PORTS_FILE", "").strip()
    text = (_read_ports(file) if file else env.get("NODE_PORTS", "")).strip()
    if not text:
        raise ConfigError(
            "NODE_PORTS is not set: the scheduler needs the workers' ports in the order of the global rank table, "
            "prefill first, such as NODE_PORTS=8088,8089"
        )
    faults = check(Path(place.table.file), node_ports=text)
    if faults:
        raise ConfigError(str(faults[0]))
    return parse_node_ports(text)


def use_openai(env: Mapping[str, str]) -> bool:
    """USE_OPENAI, default 1. Raises ConfigError for anything but 0 and 1."""
    value = env.get("USE_OPENAI", "1").strip()
    if value not in ("0", "1"):
        raise ConfigError(f"USE_OPENAI={value!r}: expected 1 (OpenAI API) or 0 (vLLM's /generate)")
    return value == "1"


def resolve_host(host: str) -> str:
    """A numeric address: sockets bind and connect to these. Raises ConfigError."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"server_ip {host!r} of the rank table cannot be resolved: {error.strerror}") from None


def _read_ports(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"NODE_PORTS_FILE={file}: {reason}") from None


def _variable(env: Mapping[str, str], name: str) -> Path:
    value = env.get(name, "").strip()
    if not value:
        raise ConfigError(f"{name} is not set: it names a rank table, see pd-ranktable gen")
    path = Path(value)
    if not _may_be_file(path):
        other = path.with_name(path.name.replace("rank_table", "ranktable"))  # the document uses both spellings
        if not _may_be_file(other):
            raise ConfigError(f"{name}={value}: no such file")
        path = other
    return path


def _may_be_file(path: Path) -> bool:
    """Also for a file in a folder that may not be searched: reading it says who may."""
    try:
        return path.is_file()
    except PermissionError:
        return True
