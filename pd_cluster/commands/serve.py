"""`pd-cluster serve`: from flags, environment and rank tables to one running instance."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.members.credentials import admin_token_of, credentials_of
from pd_cluster.cluster.members.place import (
    TABLE_VARIABLES,
    Place,
    address_towards,
    find_place,
    node_ports,
    place_alone,
    resolve_host,
    use_openai,
)
from pd_cluster.cluster.processes.launch_preloader import DIE_WITH_PARENT
from pd_cluster.cluster.processes.rank_process import environment_of
from pd_cluster.cluster.routing.policy import POLICIES
from pd_cluster.devices import hccl
from pd_cluster.devices.cores import ledger_name
from pd_cluster.devices.device import check_name, num_cores_here, num_threads_for
from pd_cluster.engine.start.preloader import Preloader, forks_are_safe, has_no_driver
from pd_cluster.engine.start.process import die_with_parent
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.config import ApiConfig, Credentials, RankPlace, SharedCores, WorkerConfig
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.settings.options import SECRET_VARIABLES, ServeOptions
from pd_cluster.settings.processes import (
    HandoverSettings,
    JoinSettings,
    KeyFiles,
    KVSettings,
    PortRange,
    ProcessSettings,
    default_name,
)
from pd_cluster.settings.requests import Assurances
from pd_cluster.settings.routing import AdminSettings, ConnectionLimits, EntranceSettings, RoutingConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.text.given_template import with_source
from pd_cluster.transport.table import CHOICES
from pd_cluster.wire import Join, KVOptions
from ranktable_tools.hosts import is_loopback

if TYPE_CHECKING:
    from pd_cluster.api.worker_app import Registering

log = logging.getLogger(__name__)

LEAST_LENDING_NBYTES = 64_000_000  # steps of smaller models are mostly the host's work, which more threads delay


def run(options: ServeOptions, warnings: list[str], env: Mapping[str, str]) -> None:
    """Serves until a signal. Raises ConfigError and other errors of the start."""
    _die_with_parent(env)
    for name in SECRET_VARIABLES:  # `env` is a copy; child processes need no keys
        os.environ.pop(name, None)
    start = _start_of(options, env)
    start.process.logs.begin()
    for warning in warnings:
        log.warning("%s", warning)
    credentials = credentials_of(start.place, start.files)
    if start.files.derives:
        log.warning("--derive-secret: a user who can read or guess the rank table can act as any of these processes")
    if start.place.role == "scheduler":
        _run_scheduler(start, credentials, env)
    else:
        _run_worker(start, credentials)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The part that is read and checked in every role."""

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


def _start_of(options: ServeOptions, env: Mapping[str, str]) -> _Start:
    """Reads the common part. Raises ConfigError."""
    options.read(Assurances)
    process, join = options.read(ProcessSettings), options.read(JoinSettings)
    engine, timeouts = options.engine(), options.timeouts()
    return _Start(
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
    """Returns the place in the rank tables, or with --role outside of them. Raises ConfigError."""
    if join.role not in ("prefill", "decode"):
        given = {"join": join.addresses, "instance_name": join.instance_name, "advertise_host": join.advertise_host}
        for name in [name for name, value in given.items() if value]:
            raise ConfigError(f"{called(name)}: only a worker registers; give {called('role')} prefill or decode, too")
    return find_place(env) if join.role is None else _place_alone(join, process, engine, timeouts, env)


def _place_alone(
    join: JoinSettings, process: ProcessSettings, engine: EngineConfig, timeouts: Timeouts, env: Mapping[str, str]
) -> Place:
    """Raises ConfigError for variables or flags that contradict --role."""
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
    if join.advertise_host is not None:
        host = resolve_host(join.advertise_host, f"{called('advertise_host')} {{!r}}")
    else:
        host = address_towards(join.addresses, timeouts.join_timeout_s)
    name = join.instance_name or default_name(join.role, socket.gethostname(), process.port)
    return place_alone(join.role, host, name, engine.tensor_parallel_size)


def _run_scheduler(start: _Start, credentials: Credentials, env: Mapping[str, str]) -> None:
    options, place, files = start.options, start.place, start.files
    ports = node_ports(env, place) if place.table.file else []
    if start.join.join_port is not None and files.derives:
        raise ConfigError("--join-port: workers in no table cannot derive a secret; drop --derive-secret")
    openai = use_openai(env)
    token = admin_token_of(place, files)
    entrance, admin = options.read(EntranceSettings), options.read(AdminSettings)
    import uvloop

    from pd_cluster.api.admin.admin_app import AdminAccess
    from pd_cluster.api.front.server import bind, bind_path, bind_several, raise_descriptor_limit
    from pd_cluster.api.scheduler_app import SchedulerServer
    from pd_cluster.cluster.members.auto_role import AutoRole
    from pd_cluster.cluster.members.elastic import Tables
    from pd_cluster.cluster.tenancy.key_store import KeyStore
    from pd_cluster.service.helpers.interpreter import tune
    from pd_cluster.service.response_store import ResponseStore

    config = options.read(
        ApiConfig,
        engine=start.engine,
        is_openai=openai,
        timeouts=start.timeouts,
        routing=start.routing,
        chat=with_source(options.chat()),
        http=options.http(env),
    )
    http = config.http
    raise_descriptor_limit(http.connections)
    if http.allow_credentials and "*" in http.allowed_origins:
        log.warning("--allow-credentials: any web page may send its visitors' credentials; name --allowed-origins")
    keys = KeyStore(http, config.served_model_names or [start.engine.model]) if http.key_file else None
    if http.responses.folder:
        ResponseStore(http.responses)  # raises for a folder that cannot be used, before anything listens
    host, port = start.process.host, start.process.port
    if entrance.uds:
        listeners = bind_path(entrance.uds, entrance.api_workers)
    else:
        listeners = bind_several(host, port, entrance.api_workers)
    admin_port = admin.admin_port if admin.admin_port is not None else port + 1
    admin_listener = bind(admin.admin_host, admin_port, "--admin-port")
    public = entrance.uds or f"{host}:{port}"
    log.info("serving at %s, admin at %s:%d", public, admin.admin_host, admin_port)
    tables = Tables(
        lambda: find_place(env) if place.table.file else place,
        lambda place: _ports_of_file(env, place),
        lambda place: credentials_of(place, files),
    )
    join = (host, start.join.join_port) if start.join.join_port is not None else None
    access = AdminAccess(token, is_loopback(admin.admin_host), admin.admin_hosts)

    async def serve() -> None:
        logs = start.process.logs
        scheduler = SchedulerServer(place, credentials, ports, config, listeners, tables, logs, keys, join)
        await scheduler.run(admin_listener, access, AutoRole() if entrance.auto_role else None)

    tune()
    with contextlib.ExitStack() as ending, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if entrance.uds:
            ending.callback(Path(entrance.uds).unlink, missing_ok=True)
        runner.run(serve())


def _ports_of_file(env: Mapping[str, str], place: Place) -> list[int] | None:
    """Reads NODE_PORTS_FILE; NODE_PORTS does not change while a process runs. Raises ConfigError."""
    return node_ports(env, place) if env.get("NODE_PORTS_FILE", "").strip() else None


def _run_worker(start: _Start, credentials: Credentials) -> None:
    place, engine, handover = start.place, start.engine, start.handover
    num_devices = len(place.server.device)
    if start.options["tensor_parallel_size"] not in (None, num_devices):
        raise ConfigError(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: the rank table gives {place.name} "
            f"{num_devices} devices; the two must be equal"
        )
    # Errors that can be found without torch are reported at once.
    check_name(engine.device)
    Checkpoint.of(engine).max_model_len(engine.max_model_len)
    from pd_cluster.api.front.server import bind
    from pd_cluster.api.worker_app import run_worker
    from pd_cluster.service.helpers.interpreter import tune

    num_threads = int(os.environ.get("OMP_NUM_THREADS", 0))
    config = WorkerConfig(
        name=place.name,
        role="prefill" if place.role == "prefill" else "decode",
        server_ip=place.server.server_ip,
        bind_address=place.bind_address,
        device_ids=[device.device_id for device in place.server.device],
        epoch=secrets.randbits(62),
        credentials=credentials,
        num_threads=num_threads or num_threads_for(place.num_local_ranks),
        cores=None if num_threads else _shared_cores(start),
        **msgspec.structs.asdict(handover),
        kv=start.kv,
        engine=msgspec.structs.replace(
            engine,
            tensor_parallel_size=num_devices,
            num_local_ranks=place.num_local_ranks,
            paired_tp_sizes=place.paired_tp_sizes(handover.kv_transport),
        ),
        timeouts=start.timeouts,
        ranks=RankPlace(size=num_devices),
        environment=_hccl_environment(
            engine.device, place, start.timeouts, handover.kv_port_range, start.process.fast_collectives
        ),
        logs=start.process.logs,
    )
    with contextlib.ExitStack() as ending:
        preloader = _preloader_of(start.process, config)
        if preloader is not None:
            ending.callback(preloader.close)
        tune()
        listener = bind(start.process.host, start.process.port)
        limits = start.options.read(ConnectionLimits)
        asyncio.run(run_worker(config, listener, limits, preloader, _registering(start, config)))


def _shared_cores(start: _Start) -> SharedCores | None:
    """Returns the ledger of this host's cores; None: each rank keeps its share of them."""
    place, lending = start.place, start.process.lend_cores
    is_alone = start.join.role is not None or place.num_local_ranks < 2
    if is_alone or lending == "off" or not has_no_driver(start.engine.device):
        return None
    if (num_cores := num_cores_here()) < 2:
        return None
    return SharedCores(
        ledger=str(place.folder / ledger_name()),
        first=place.first_local_rank,
        num_ranks=place.num_local_ranks,
        num_cores=num_cores,
        least_nbytes=LEAST_LENDING_NBYTES if lending == "auto" else 0,
    )


def _registering(start: _Start, config: WorkerConfig) -> Callable[[], Registering] | None:
    """Returns what keeps a worker registered, to be made on its event loop; None for one in a rank table."""
    if start.join.role is None:
        return None
    from pd_cluster.cluster.members.joining import JoinMailbox  # with zmq, which a parent needs for nothing else

    checkpoint = Checkpoint.of(start.engine)
    join = Join(
        role=config.role,
        host=config.bind_address,
        port=start.process.port,
        device_ids=config.device_ids,
        model_identity=checkpoint.identity,
        hf_overrides=checkpoint.hf_overrides,
    )
    addresses = start.join.addresses
    return partial(JoinMailbox, addresses, join, config.name, config.epoch, config.credentials, config.timeouts)


def _preloader_of(process: ProcessSettings, config: WorkerConfig) -> Preloader | None:
    """Returns an inherited preloader; without one, several ranks get their own."""
    if process.spawn or not forks_are_safe(config.engine.device):
        return None
    inherited = Preloader.inherited(os.environ)
    if inherited is not None or config.ranks.size == 1:
        return inherited
    return Preloader.start(environment_of(config, os.environ), config.engine.model)


def _hccl_environment(
    device: str, place: Place, timeouts: Timeouts, ports: PortRange, is_fast: bool = False
) -> dict[str, str]:
    """Returns variables for rank processes on NPUs; empty for others."""
    if not hccl.is_wanted(device, place.server):
        return {}
    found = hccl.settings(place.server, place.bind_address, timeouts, ports, os.environ, is_fast)
    environment = hccl.environment(found)
    if hccl.RANK_TABLE in environment:
        log.warning(
            "%s=%s is not handed to the ranks: HCCL would read it", hccl.RANK_TABLE, os.environ[hccl.RANK_TABLE]
        )
    return environment


def _die_with_parent(env: Mapping[str, str]) -> None:
    """Ends an instance of `pd-cluster up` when the process that started it dies."""
    parent = env.get(DIE_WITH_PARENT)
    if parent is None:
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the line above
        raise ConfigError("the process that started this one is gone")
