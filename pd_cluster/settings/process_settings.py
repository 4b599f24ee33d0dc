"""Settings of a process as a member of its cluster, and of the KV handover between workers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal, get_args

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.kv_events_config import EVENTS, KVEventsConfig
from pd_cluster.settings.log_setup import LogFormat, Logs
from pd_cluster.settings.setting import CHOICES, POSITIVE, Form, Panel, Scope, Setting, at_least, finite, within
from pd_cluster.wire import KVOptions, KVWireDtype
from ranktable_tools.host_addresses import bracketed, is_shared_host

BASIC = partial(Setting, panel=Panel.BASIC, scope=Scope.SERVER)
KV = partial(Setting, panel=Panel.KV, scope=Scope.WORKERS)
SCHEDULER = partial(Setting, panel=Panel.SCHEDULER, scope=Scope.SERVER)
CoreSharing = Literal["auto", "on", "off"]
ServeRole = Literal["scheduler", "prefill", "decode", "encode"]
SERVE_ROLES: tuple[ServeRole, ...] = get_args(ServeRole)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
TABLE_NAME = re.compile(r"scheduler|join|(prefill|decode|scheduler)-[0-9]+")


def _level(name: str, written: str) -> str:
    if written.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"{called(name)} {written!r}: expected debug, info, warning or error")
    return written.upper()


LEVEL = Form(str, _level, str)
MEGABYTES = Form(float, lambda name, written: written * 1e6, lambda nbytes: nbytes / 1e6)
ALIKE = KVOptions()


class PortRange(msgspec.Struct, frozen=True):
    """A range of ports, [first, last], from which one is chosen; with 0-0 the system chooses."""

    first: int = 0
    last: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last else "any"

    @classmethod
    def parse(cls, text: str, name: str = "kv_port_range") -> PortRange:
        """Parses `7000-7010`, `7000` or an empty text. Raises ConfigError that names the setting."""
        if not text:
            return cls()
        first, _, last = text.partition("-")
        try:
            ports = cls(int(first), int(last or first))
        except ValueError:
            raise ConfigError(f"{called(name)} {text!r}: expected FIRST-LAST, such as 7000-7010") from None
        if not 0 < ports.first <= ports.last < 65536:
            raise ConfigError(f"{called(name)} {text!r}: ports must be in 1-65535, and the first not above the last")
        return ports


PORTS = Form(str, lambda name, written: PortRange.parse(written, name), lambda ports: str(ports) if ports.last else "")


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every `serve` process."""

    host: Annotated[str, BASIC("Address to bind HTTP to.")] = "0.0.0.0"
    port: Annotated[
        int,
        BASIC(
            "HTTP port. The scheduler's port is public; a worker's port is in NODE_PORTS, or announced with --join.",
            checks=(within(1, 65535),),
        ),
    ] = 8000
    log_level: Annotated[
        str,
        BASIC("Log level: debug, info, warning or error.", scope=Scope.WORKERS, form=LEVEL, after="trusted_nodes"),
    ] = "INFO"
    log_config_file: Annotated[
        str,
        BASIC(
            "JSON file in the schema of Python's logging.config.dictConfig, for every process.",
            scope=Scope.WORKERS,
            after="log_level",
        ),
    ] = ""
    log_format: Annotated[
        LogFormat,
        BASIC(
            "Format of the log: text, or json: one object a line, with the request's id.",
            scope=Scope.WORKERS,
            after="log_level",
        ),
    ] = "text"
    spawn: Annotated[
        bool,
        Setting(
            "Start rank processes from the command line instead of forking them.",
            Panel.ENGINE,
            Scope.WORKERS,
            after="graph_sizes",
        ),
    ] = False
    lend_cores: Annotated[
        CoreSharing,
        Setting(
            "On a CPU, let steps use idle cores of the host's other instances: on, off, or auto (for models of 64 MB "
            "or more).",
            Panel.ENGINE,
            Scope.WORKERS,
            after="spawn",
        ),
    ] = "auto"
    bind_cores: Annotated[
        CoreSharing,
        Setting(
            "On a CPU, run each rank on its own share of the cores: on, off, or auto (for models of 64 MB or more).",
            Panel.ENGINE,
            Scope.WORKERS,
            after="lend_cores",
        ),
    ] = "auto"
    fast_collectives: Annotated[
        bool,
        Setting(
            "On NPUs, let HCCL add in any order: faster, but equal requests may get different answers.",
            Panel.ENGINE,
            Scope.WORKERS,
            after="npu_head_dims",
        ),
    ] = False

    @property
    def logs(self) -> Logs:
        return Logs(self.log_level, self.log_config_file, self.log_format)


class KeyFiles(msgspec.Struct, frozen=True):
    """The files that make a process part of its cluster; None: the file next to the global rank table.

    `derives`: no such files exist, and the secrets are derived from the table.
    """

    secret: Annotated[
        str | None,
        BASIC(
            "File of the cluster's secret; default: cluster.secret next to the global rank table.", name="secret_file"
        ),
    ] = None
    scheduler_key: Annotated[
        str | None,
        SCHEDULER(
            "File of the scheduler's private key (mode 0600); default: scheduler.key next to the global rank table.",
            name="scheduler_key_file",
            after="admin_token_file",
        ),
    ] = None
    admin_token: Annotated[
        str | None,
        SCHEDULER(
            "File of the admin token (mode 0600); default: admin.token next to the global rank table.",
            name="admin_token_file",
            after="admin_allowed_hosts",
        ),
    ] = None
    derives: Annotated[
        bool,
        BASIC(
            "Derive the secrets from the rank table; only for a single host whose users are all trusted.",
            name="derive_secret",
        ),
    ] = False
    node_key: Annotated[
        str,
        BASIC(
            "This host's NODE.key (mode 0600), made by `pd-cluster keys node`.",
            name="node_key_file",
            metavar="FILE",
            after="derive_secret",
        ),
    ] = ""
    trusted_nodes: Annotated[
        str,
        BASIC(
            "File that lists the nodes whose workers are admitted; default: every worker with the secret.",
            metavar="FILE",
            after="node_key_file",
        ),
    ] = ""


def name_problem(name: str) -> str:
    """Returns why a worker outside the rank tables cannot have this name; "" if it can."""
    if not NAME.fullmatch(name):
        return "expected up to 128 letters, digits, dots, hyphens and underscores, beginning with a letter or digit"
    return "names of this form denote entries of a rank table; give another" if TABLE_NAME.fullmatch(name) else ""


def default_name(role: str, hostname: str, port: int) -> str:
    """Returns the default name of a worker outside the rank tables, made unique by its host and port."""
    return f"{role}-{re.sub('[^A-Za-z0-9._-]', '-', hostname)[:100]}-{port}"


def _role(name: str, written: str) -> ServeRole:
    for role in SERVE_ROLES:
        if written == role:
            return role
    raise ConfigError(f"{called(name)} {written!r}: expected scheduler, prefill, decode or encode")


def _instance_name(name: str, written: str) -> str:
    if problem := name_problem(written):
        raise ConfigError(f"{called(name)} {written[:200]!r}: {problem}")
    return written


def _addresses(name: str, written: str) -> tuple[tuple[str, int], ...]:
    """Parses `HOST:PORT[,HOST:PORT]`, with IPv6 addresses in brackets. Raises ConfigError."""
    found = []
    for each in written.split(","):
        host, _, port = each.strip().rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host if ":" not in host else ""
        if not is_shared_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{called(name)} {each.strip()!r}: expected HOST:PORT, such as scheduler.pd.svc:9002 or [fd00::1]:9002"
            )
        found.append((host, int(port)))
    return tuple(found)


def _written(addresses: tuple[tuple[str, int], ...]) -> str | None:
    return ",".join(f"{bracketed(host)}:{port}" for host, port in addresses) or None


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a process that reads no rank table, and the port at which such workers register.

    `addresses`: (host, port) of the schedulers' join ports.
    """

    role: Annotated[
        ServeRole | None,
        BASIC(
            "scheduler, prefill, decode or encode, instead of rank tables.",
            form=Form(str, _role, lambda role: role),
        ),
    ] = None
    addresses: Annotated[
        tuple[tuple[str, int], ...],
        BASIC(
            "HOST:PORT[,HOST:PORT]: the schedulers' join ports; a worker registers with the first that admits it.",
            name="join",
            form=Form(str, _addresses, _written),
        ),
    ] = ()
    instance_name: Annotated[
        str | None,
        BASIC(
            "With --join: the worker's name; default: ROLE-HOSTNAME-PORT.",
            form=Form(str, _instance_name, lambda name: name),
        ),
    ] = None
    advertise_host: Annotated[
        str | None,
        BASIC("With --join: this worker's address for others; default: the one from which it reaches the scheduler."),
    ] = None
    data_parallel_rank: Annotated[
        int | None,
        BASIC(
            "With --join and --data-parallel-size: this worker's rank in its unit, from 0.",
            checks=(at_least(0),),
        ),
    ] = None
    join_port: Annotated[
        int | None,
        SCHEDULER(
            "Port, at --host, where workers with --join register; default: none.",
            after="admin_port",
            checks=(within(1, 65535),),
        ),
    ] = None


class HandoverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for moving KV cache. transport/transport_table.py lists the transports.

    `kv_rate_limit_bytes_per_s` limits each link; 0: no limit.
    """

    kv_transport: Annotated[str, KV(CHOICES)] = "auto"
    trusts_network: Annotated[
        bool,
        KV(
            "Let KV cache and experts' rows go to other hosts over gloo: faster, but not encrypted; only for private "
            "networks.",
            name="trust_network",
            after="kv_transport",
        ),
    ] = False
    kv_port_range: Annotated[PortRange, KV("Ports for the control socket, FIRST-LAST; default: any.", form=PORTS)] = (
        PortRange()
    )
    kv_open_links: Annotated[
        int,
        KV(
            "Maximum number of links with open communicators (NCCL, HCCL, gloo, curve); others open when a transfer "
            "needs them. 0: no limit.",
            after="kv_port_range",
            checks=(at_least(0),),
        ),
    ] = 16
    pulls_prefixes: Annotated[
        bool,
        KV(
            "Prefill instances copy cached prefixes from each other where that takes less time than computing them.",
            name="prefix_pull",
            after="kv_open_links",
        ),
    ] = False
    kv_max_quarantine: Annotated[
        float,
        KV(
            "Share of KV blocks that may stay in quarantine beyond --transfer-timeout; above it the process exits.",
            after="prefix_pull",
            checks=(within(0, 1),),
        ),
    ] = 0.25
    kv_disk_cache: Annotated[
        str,
        KV(
            "Folder for encrypted KV blocks of --kv-host-cache, which survive a restart. Needs the extra disk-cache.",
            metavar="FOLDER",
            after="kv_max_quarantine",
        ),
    ] = ""
    kv_disk_cache_size_gib: Annotated[
        float,
        KV(
            "Size limit of --kv-disk-cache, in GiB, shared by the host's instances.",
            after="kv_disk_cache",
            checks=(POSITIVE,),
        ),
    ] = 16.0
    kv_shared_cache: Annotated[
        str,
        KV(
            "redis://HOST:PORT, rediss:// or unix://: a store that shares the encrypted blocks of --kv-host-cache. "
            "Needs the extra shared-cache.",
            metavar="URL",
            is_secret=True,
            after="kv_disk_cache_size",
        ),
    ] = ""
    kv_cache_key_file: Annotated[
        str,
        KV(
            "File of the disk and shared cache's secrets; default: the cluster's. The first one encrypts; all decrypt.",
            metavar="FILE",
            after="kv_shared_cache",
        ),
    ] = ""
    kv_events: Annotated[
        KVEventsConfig | None,
        KV(
            "JSON object with vLLM's fields; publishes what the prefix cache stores and drops. Default: off.",
            name="kv_events_config",
            form=EVENTS,
            default="",
            after="kv_cache_key_file",
        ),
    ] = None
    kv_rate_limit_bytes_per_s: Annotated[
        float,
        KV(
            "Maximum MB/s of KV cache over each link; 0: no limit.",
            name="kv_rate_limit",
            form=MEGABYTES,
            checks=(finite("must be a number of MB/s, 0 for no limit"),),
            after="kv_wire_dtype",
        ),
    ] = 0.0


class KVSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that must be equal at both ends of a link: the fields of KVOptions."""

    checksum: Annotated[bool, KV("Verify a checksum of every KV payload.", name="kv_checksum", has_off=True)] = (
        ALIKE.checksum
    )
    hmac: Annotated[bool, KV("Authenticate every KV header.", name="kv_hmac", has_off=True)] = ALIKE.hmac
    wire_dtype: Annotated[
        KVWireDtype, KV("auto, or int8: smaller, inexact KV between hosts.", name="kv_wire_dtype")
    ] = ALIKE.wire_dtype
    mixed: Annotated[
        bool,
        KV(
            "Let prefill and decode instances differ in --kv-cache-dtype; tokens may then differ from those of one "
            "instance.",
            name="kv_mixed",
            also=("allow_mixed_kv",),
        ),
    ] = ALIKE.mixed

    def options(self) -> KVOptions:
        return KVOptions(**msgspec.structs.asdict(self))
