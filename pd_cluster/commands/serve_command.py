"""`pd-cluster serve`: starts one instance according to flags, environment and rank tables."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pd_cluster import host
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.members.cluster_credentials import credentials_of
from pd_cluster.cluster.members.rank_table_place import Place, check_ports
from pd_cluster.cluster.processes.launch_preloader import DIE_WITH_PARENT
from pd_cluster.cluster.processes.rank_process import environment_of
from pd_cluster.commands.serve_scheduler import run_scheduler
from pd_cluster.commands.serve_start import Start, start_of
from pd_cluster.commands.serve_unit import unit_of
from pd_cluster.devices import hccl_environment
from pd_cluster.devices.core_ledger import ledger_name
from pd_cluster.devices.device import check_name, num_threads_for
from pd_cluster.engine.handover.links.network_policy import why_not
from pd_cluster.engine.start.preloader import Preloader, forks_are_safe, has_no_driver
from pd_cluster.engine.start.rank_main import die_with_parent
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.open_stores import check_tiers
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.kv_events_config import check_private
from pd_cluster.settings.process_configs import Credentials, RankPlace, SharedCores, UnitPlace, WorkerConfig
from pd_cluster.settings.process_settings import (
    HandoverSettings,
    PortRange,
    ProcessSettings,
)
from pd_cluster.settings.routing_settings import ConnectionLimits
from pd_cluster.settings.serve_options import SECRET_VARIABLES, ServeOptions
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.transport_table import allowed
from pd_cluster.wire import Join
from ranktable_tools.ports import GivenPorts, outgoing_warnings

if TYPE_CHECKING:
    from pd_cluster.api.worker_app import Registering

log = logging.getLogger(__name__)


def run(options: ServeOptions, warnings: list[str], env: Mapping[str, str]) -> None:
    """Serves until a signal. Raises ConfigError, and other errors that prevent the start."""
    _die_with_parent(env)
    for name in SECRET_VARIABLES:  # child processes need no keys; `env` is a copy
        os.environ.pop(name, None)
    start = start_of(options, env)
    start.process.logs.begin()
    is_one_of_several = DIE_WITH_PARENT in env and start.place.role != "scheduler"
    for warning in () if is_one_of_several else warnings:  # only one of a command's instances warns
        log.warning("%s", warning)
    credentials = credentials_of(start.place, start.files)
    if start.files.derives:
        log.warning("--derive-secret: a user who can read or guess the rank table can act as any of these processes")
    if start.place.role == "scheduler":
        run_scheduler(start, credentials, env)
    else:
        run_worker(start, credentials)


def run_worker(start: Start, credentials: Credentials) -> None:
    place, engine, handover = start.place, start.engine, start.handover
    assert place.role != "scheduler"
    num_devices = len(place.server.device)
    if start.options["tensor_parallel_size"] not in (None, num_devices):
        raise ConfigError(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: the rank table gives {place.name} "
            f"{num_devices} devices; the two must be equal"
        )
    # Errors that can be found without torch are reported at once.
    check_name(engine.device)
    checkpoint = Checkpoint.of(engine)
    checkpoint.max_model_len(engine.max_model_len)
    if place.role == "encode" and checkpoint.vision is None:
        raise ConfigError(
            f"{called('role')} encode: {checkpoint.path} takes no images here, so there is nothing to encode"
        )
    unit = unit_of(start, checkpoint)
    _check_network_policy(start)
    _check_ports(start)
    handover = _own_events(start, credentials)
    check_tiers(handover, engine.kv_host_cache_gib)
    from pd_cluster.api.connections.http_server import bind
    from pd_cluster.api.worker_app import run_worker
    from pd_cluster.service.concurrency.interpreter_tuning import tune

    num_threads = int(os.environ.get("OMP_NUM_THREADS", 0))
    config = WorkerConfig(
        name=place.name,
        role=place.role,
        server_ip=place.server.server_ip,
        bind_address=place.bind_address,
        device_ids=[device.device_id for device in place.server.device],
        epoch=secrets.randbits(62),
        credentials=credentials,
        num_threads=num_threads or num_threads_for(place.num_local_ranks),
        cores=_shared_cores(start, num_threads),
        **msgspec.structs.asdict(handover),
        kv=start.kv,
        engine=_engine_at(place, engine, handover, unit),
        unit=unit,
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


def _engine_at(place: Place, engine: EngineConfig, handover: HandoverSettings, unit: UnitPlace | None) -> EngineConfig:
    """Returns the engine's settings, with those that follow from the worker's place."""
    return msgspec.structs.replace(
        engine,
        tensor_parallel_size=len(place.server.device),
        data_parallel_size=1 if unit is None else unit.size,
        unit_rank=0 if unit is None else unit.rank,
        num_local_ranks=place.num_local_ranks,
        paired_tp_sizes=place.paired_tp_sizes(handover.kv_transport, handover.kv_open_links),
    )


def _check_ports(start: Start) -> None:
    """Raises ConfigError if ports of two processes on this host could collide."""
    own, ports = {"--port": start.process.port}, start.handover.kv_port_range
    check_ports(start.place, GivenPorts(worker=own, kv_range=(ports.first, ports.last) if ports.last else None))
    for warning in outgoing_warnings({**own, **({"--kv-port-range": ports.last} if ports.last else {})}):
        log.warning("%s", warning)


def _check_network_policy(start: Start) -> None:
    """Raises ConfigError if links to other hosts of the table could only use gloo, which is not allowed."""
    others, handover = start.place.other_hosts, start.handover
    if not others or handover.trusts_network or not has_no_driver(start.engine.device):
        return
    remote = [each for each in allowed(handover.kv_transport) if "cpu" in each.pools and not each.is_same_host]
    if remote and all(each.needs_trust for each in remote):
        raise ConfigError(why_not(start.place.server.server_ip, ", ".join(others)))


def _own_events(start: Start, credentials: Credentials) -> HandoverSettings:
    """Returns the settings with this instance's own endpoints of KV events. Raises ConfigError."""
    handover, place = start.handover, start.place
    if handover.kv_events is None or not handover.kv_events.is_on:
        return handover
    check_private(handover.kv_events, bool(credentials.node_key_file and credentials.trusted_nodes))
    return msgspec.structs.replace(handover, kv_events=handover.kv_events.of_instance(place.number_here))


def _shared_cores(start: Start, num_threads: int) -> SharedCores | None:
    """Returns how this host's ranks share its cores; None: each rank has a fixed number of cores."""
    place, process = start.place, start.process
    if why := _why_not_shared(start, num_threads):
        for flag, choice in (("--lend-cores", process.lend_cores), ("--bind-cores", process.bind_cores)):
            if choice == "on":
                log.warning("%s has no effect: %s", flag, why)
        return None
    try:
        ledger = str(place.folder / ledger_name()) if process.lend_cores != "off" else ""
    except OSError as error:
        log.info("no cores are lent: the kernel does not report which ranks may share cores (%s)", error)
        ledger = ""
    return SharedCores(
        ledger=ledger,
        first=place.first_local_rank,
        num_ranks=place.num_local_ranks,
        num_cores=host.num_cores(),
        lending=process.lend_cores,
        binding=process.bind_cores,
    )


def _why_not_shared(start: Start, num_threads: int) -> str:
    if num_threads:
        return "OMP_NUM_THREADS fixes each rank's share of the cores"
    if start.join.role is not None:
        return f"with {called('role')}, no rank table says which ranks share this host"
    if start.place.num_local_ranks < 2:
        return "only one rank runs on this host"
    if not has_no_driver(start.engine.device):
        return f"{called('device')} {start.engine.device} may compute elsewhere"
    if (quota := host.cores_quota()) < (num_cores := len(host.cores())):
        return f"the control group may run on {num_cores} cores, but has a quota of {quota:g}"
    return "" if num_cores > 1 else "the host has only one core"


def _registering(start: Start, config: WorkerConfig) -> Callable[[], Registering] | None:
    """Returns a function that makes a worker's registration on the event loop; None for a worker in a rank table."""
    if start.join.role is None:
        return None
    from pd_cluster.cluster.members.worker_joining import JoinMailbox  # imports zmq, which the parent needs only here

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
    """Returns the inherited preloader or, without one and with several ranks, a new one."""
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
    if not hccl_environment.is_wanted(device, place.server):
        return {}
    found = hccl_environment.settings(place.server, place.bind_address, timeouts, ports, os.environ, is_fast)
    environment = hccl_environment.environment(found)
    if hccl_environment.RANK_TABLE in environment:
        log.warning(
            "%s=%s is not passed to the ranks: HCCL would read it",
            hccl_environment.RANK_TABLE,
            os.environ[hccl_environment.RANK_TABLE],
        )
    return environment


def _die_with_parent(env: Mapping[str, str]) -> None:
    """Makes an instance of `pd-cluster up` end when the process that started it dies."""
    parent = env.get(DIE_WITH_PARENT)
    if parent is None:
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent died before the line above
        raise ConfigError("the process that started this one is gone")
