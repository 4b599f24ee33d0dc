"""Reads and checks the part of `pd-cluster serve` that all roles share, before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pd_cluster import extra_table
from pd_cluster.cluster.members.rank_table_place import (
    TABLE_VARIABLES,
    Place,
    address_towards,
    find_place,
    place_alone,
    resolve_host,
)
from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_settings import (
    HandoverSettings,
    JoinSettings,
    KeyFiles,
    KVSettings,
    ProcessSettings,
    default_name,
)
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.transport_table import CHOICES
from pd_cluster.wire import KVOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The settings that all roles share, after all checks."""

    options: ServeOptions
    place: Place
    process: ProcessSettings
    files: KeyFiles
    join: JoinSettings
    engine: EngineConfig
    timeouts: Timeouts
    routing: RoutingConfig
    handover: HandoverSettings
    kv: KVOptions


def start_of(options: ServeOptions, env: Mapping[str, str]) -> Start:
    """Reads the common settings, and checks the settings of all roles. Raises ConfigError."""
    options.check()
    process, join = options.read(ProcessSettings), options.read(JoinSettings)
    engine, timeouts = options.engine(), options.timeouts()
    return Start(
        process=process,
        join=join,
        handover=options.handover(CHOICES),
        kv=options.read(KVSettings).options(),
        engine=engine,
        timeouts=timeouts,
        routing=options.routing(POLICIES),
        files=options.read(KeyFiles),
        place=_place_of(join, process, engine, timeouts, env),
        options=options,
    )


def _place_of(
    join: JoinSettings, process: ProcessSettings, engine: EngineConfig, timeouts: Timeouts, env: Mapping[str, str]
) -> Place:
    """Returns the place in the rank tables, or with --role a place outside of them. Raises ConfigError."""
    if join.role in (None, "scheduler"):
        given = {"join": join.addresses, "instance_name": join.instance_name, "advertise_host": join.advertise_host}
        for name in [name for name, value in given.items() if value]:
            raise ConfigError(
                f"{called(name)}: only a worker registers; give {called('role')} prefill, decode or encode, too"
            )
    if join.role == "encode":
        extra_table.load("encoders", f"{called('role')} encode")
    _check_rank(join, engine)
    place = find_place(env) if join.role is None else _place_alone(join, process, engine, timeouts, env)
    if join.data_parallel_rank is not None and place.role in ("scheduler", "encode"):
        name = called("data_parallel_rank")
        raise ConfigError(f"{name} {join.data_parallel_rank}: only for prefill and decode workers; leave it out")
    return place


def _check_rank(join: JoinSettings, engine: EngineConfig) -> None:
    """Raises ConfigError for a rank outside of the unit, and for a missing rank."""
    rank, size = join.data_parallel_rank, engine.data_parallel_size
    if rank is not None and rank >= size:
        raise ConfigError(f"{called('data_parallel_rank')} {rank}: {called('data_parallel_size')} is {size}; give less")
    if rank is None and size > 1 and join.role in ("prefill", "decode"):
        raise ConfigError(
            f"{called('data_parallel_size')} {size}: with {called('join')} no rank table gives this worker's rank; "
            f"give {called('data_parallel_rank')} 0 to {size - 1}"
        )


def _place_alone(
    join: JoinSettings, process: ProcessSettings, engine: EngineConfig, timeouts: Timeouts, env: Mapping[str, str]
) -> Place:
    """Returns a place outside of rank tables. Raises ConfigError for variables or flags that contradict --role."""
    for name in TABLE_VARIABLES:
        if env.get(name, "").strip():
            raise ConfigError(f"{name} is set, and {called('role')} {join.role} reads no rank tables; drop one of them")
    if join.role == "scheduler":
        if join.join_port is None:
            raise ConfigError(f"{called('role')} scheduler: workers need a port to register at; give --join-port PORT")
        return place_alone("scheduler", process.host)
    assert join.role is not None
    if not join.addresses:
        raise ConfigError(f"{called('role')} {join.role}: give {called('join')} HOST:PORT, its scheduler's join port")
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if join.role == "encode" and (size := getattr(engine, name)) > 1:
            raise ConfigError(f"{called(name)} {size}: an encoder has one device and no unit; start several encoders")
    if join.advertise_host is not None:
        host = resolve_host(join.advertise_host, f"{called('advertise_host')} {{!r}}")
    else:
        host = address_towards(join.addresses, timeouts.join_timeout_s)
    name = join.instance_name or default_name(join.role, socket.gethostname(), process.port)
    return place_alone(join.role, host, name, engine.tensor_parallel_size)
