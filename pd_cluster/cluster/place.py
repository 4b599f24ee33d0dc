"""Who am I: the role, name and address of this process, from the rank tables that the environment names.

GLOBAL_RANK_TABLE_FILE_PATH, RANK_TABLE_FILE_PATH, NODE_PORTS and USE_OPENAI are the reference deployment's variables;
NODE_PORTS_FILE names a file that is read instead of NODE_PORTS, each time the table is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pd_cluster.errors import ConfigError
from ranktable_tools import RankTable, Role, Server, check, load_global, load_local, locate, parse_node_ports
from ranktable_tools.hosts import host_key, is_loopback
from ranktable_tools.schema import RankTableError, read_bytes

MIN_SECRET_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in the cluster. `names` are the workers' names in the order of NODE_PORTS."""

    role: Role
    index: int
    server: Server
    table: RankTable
    secret: bytes
    secret_is_derived: bool

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
        servers = [s for s in (self.table.scheduler, *self.table.instances) if s is not None]
        return len({host_key(s.server_ip) for s in servers}) > 1 and not all(is_loopback(s.server_ip) for s in servers)

    @property
    def cluster_tag(self) -> str:
        """Equal for processes with the same secret; tells nothing else."""
        return hmac.new(self.secret, b"pd-cluster tag", hashlib.sha256).hexdigest()[:8]


def find_place(env: Mapping[str, str], secret_file: str | None = None) -> Place:
    """Raises ConfigError: a variable that is missing, a table with faults, a local table that is not in the global."""
    global_path = _variable(env, "GLOBAL_RANK_TABLE_FILE_PATH")
    local_path = _variable(env, "RANK_TABLE_FILE_PATH")
    try:
        table, local = load_global(global_path), load_local(local_path)
        faults = check(global_path)
        if faults:
            raise ConfigError(str(faults[0]))
        role, index = locate(table, local)
        secret = read_secret(secret_file) if secret_file else _derive_secret(read_bytes(global_path))
    except RankTableError as error:
        raise ConfigError(str(error)) from None
    return Place(role, index, local.server, table, secret, secret_is_derived=secret_file is None)


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


def admin_token(secret: bytes) -> str:
    """Who knows the cluster's secret may command it, unless a token file says otherwise."""
    return hmac.new(secret, b"pd-cluster admin token", hashlib.sha256).hexdigest()


def secret_of(env: Mapping[str, str], secret_file: str | None) -> bytes:
    """The cluster's secret, of a process that is no instance of it. Raises ConfigError."""
    if secret_file:
        return read_secret(secret_file)
    try:
        return _derive_secret(read_bytes(_variable(env, "GLOBAL_RANK_TABLE_FILE_PATH")))
    except RankTableError as error:
        raise ConfigError(str(error)) from None


def read_admin_token(file: str) -> str:
    """Raises ConfigError that names --admin-token-file."""
    token = read_secret(file, "--admin-token-file")
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(f"--admin-token-file {file}: a token is letters, digits and signs, without spaces")
    return token.decode("ascii")


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


def _derive_secret(table_bytes: bytes) -> bytes:
    return hmac.new(b"pd-cluster secret from rank table", table_bytes, hashlib.sha256).digest()


def read_secret(file: str, flag: str = "--secret-file") -> bytes:
    """Raises ConfigError that names the flag."""
    path = Path(file)
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from None
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise ConfigError(f"{flag} {file}: others can read it; chmod 600 {file}")
    if len(secret) < MIN_SECRET_NBYTES:
        raise ConfigError(f"{flag} {file}: needs at least {MIN_SECRET_NBYTES} bytes")
    return secret
