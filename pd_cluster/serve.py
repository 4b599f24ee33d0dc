"""`pd-cluster serve`: from flags, environment and rank tables to one running instance."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Mapping
from typing import get_args

import msgspec

from pd_cluster import hccl
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.credentials import admin_token_of, credentials_of
from pd_cluster.cluster.launch_preloader import DIE_WITH_PARENT
from pd_cluster.cluster.place import Place, find_place, node_ports, use_openai
from pd_cluster.cluster.rank_process import environment_of
from pd_cluster.config import (
    SECRET_VARIABLES,
    ApiConfig,
    Credentials,
    EngineConfig,
    KVTransportChoice,
    PortRange,
    RankPlace,
    RoutingConfig,
    Timeouts,
    WorkerConfig,
)
from pd_cluster.device import check_name, num_threads_for
from pd_cluster.engine.preloader import Preloader, forks_are_safe
from pd_cluster.engine.process import die_with_parent
from pd_cluster.errors import ConfigError
from pd_cluster.options import ServeOptions
from pd_cluster.sampling_defaults import parse_override
from pd_cluster.wire import KVOptions
from ranktable_tools.hosts import is_loopback

# One library does it, whichever of vLLM's names it is called by.
GUIDED_BACKENDS = ("auto", "guidance", "llguidance", "outlines", "lm-format-enforcer", "xgrammar")
MAX_API_WORKERS = 64
MOST_LOGPROBS = 1000  # all tokens of a step travel in one message

log = logging.getLogger(__name__)


def run(options: ServeOptions, warnings: list[str], env: Mapping[str, str]) -> None:
    """Serves until a signal. Raises ConfigError and the like."""
    _die_with_parent(env)
    for name in SECRET_VARIABLES:  # `env` is a copy; processes that this one starts need no keys
        os.environ.pop(name, None)
    level = options.log_level.upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level {options.log_level!r}: expected debug, info, warning or error")
    if options.kv_transport not in get_args(KVTransportChoice):
        raise ConfigError(f"--kv-transport {options.kv_transport!r}: expected {', '.join(get_args(KVTransportChoice))}")
    if options.kv_wire_dtype not in ("auto", "int8"):
        raise ConfigError(f"--kv-wire-dtype {options.kv_wire_dtype!r}: expected auto or int8")
    if options.guided_decoding_backend not in GUIDED_BACKENDS:
        raise ConfigError(
            f"--guided-decoding-backend {options.guided_decoding_backend!r}: expected {', '.join(GUIDED_BACKENDS)}"
        )
    if not 0 <= options.kv_rate_limit < float("inf"):
        raise ConfigError(f"--kv-rate-limit {options.kv_rate_limit:g}: must be a number of MB/s, 0 for no limit")
    engine, timeouts, routing = options.engine(), options.timeouts(), options.routing()
    place = find_place(env)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for warning in warnings:
        log.warning("%s", warning)
    credentials = credentials_of(place, options.key_files())
    if options.derive_secret:
        log.warning("--derive-secret: a user who can read or guess the rank table can act as any of these processes")
    if place.role == "scheduler":
        _run_scheduler(options, engine, timeouts, routing, place, credentials, env)
    else:
        _run_worker(options, engine, timeouts, place, credentials)


def _run_scheduler(
    options: ServeOptions,
    engine: EngineConfig,
    timeouts: Timeouts,
    routing: RoutingConfig,
    place: Place,
    credentials: Credentials,
    env: Mapping[str, str],
) -> None:
    ports = node_ports(env, place)
    openai = use_openai(env)
    if not 0 <= options.max_logprobs <= MOST_LOGPROBS:
        raise ConfigError(f"--max-logprobs {options.max_logprobs}: must be in 0 to {MOST_LOGPROBS}")
    files = options.key_files()
    token = admin_token_of(place, files)
    if options.max_attempts < 0:
        raise ConfigError(f"--max-attempts {options.max_attempts}: must not be negative")
    if not 1 <= options.api_workers <= MAX_API_WORKERS:
        raise ConfigError(f"--api-workers {options.api_workers}: must be in 1 to {MAX_API_WORKERS}")
    import uvloop

    from pd_cluster.api.admin_app import AdminAccess
    from pd_cluster.api.interpreter import tune
    from pd_cluster.api.scheduler_app import Scheduler
    from pd_cluster.api.server import bind, bind_several, raise_descriptor_limit
    from pd_cluster.cluster.auto_role import AutoRole
    from pd_cluster.cluster.elastic import Tables

    http, chat = options.http(env), options.chat()
    raise_descriptor_limit(http.connections)
    if http.allow_credentials and "*" in http.allowed_origins:
        log.warning("--allow-credentials: any web page may send its visitors' credentials; name --allowed-origins")
    config = ApiConfig(
        engine=engine,
        served_model_names=options.served_model_name or [],
        is_openai=openai,
        timeouts=timeouts,
        routing=routing,
        max_logprobs=options.max_logprobs,
        returns_tokens_as_token_ids=options.return_tokens_as_token_ids,
        sampling_override=parse_override(options.override_generation_config),
        requires_model=options.require_model,
        chat=chat,
        http=http,
    )
    listeners = bind_several(options.host, options.port, options.api_workers)
    admin_port = options.admin_port if options.admin_port is not None else options.port + 1
    admin_listener = bind(options.admin_host, admin_port, "--admin-port")
    log.info("serving at %s:%d, admin at %s:%d", options.host, options.port, options.admin_host, admin_port)
    tables = Tables(
        lambda: find_place(env),
        lambda place: _ports_of_file(env, place),
        lambda place: credentials_of(place, files),
    )
    access = AdminAccess(token, is_loopback(options.admin_host), options.admin_hosts())

    async def serve() -> None:
        scheduler = Scheduler(place, credentials, ports, config, listeners, tables, options.log_level.upper())
        await scheduler.run(admin_listener, access, AutoRole() if options.auto_role else None)

    tune()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _ports_of_file(env: Mapping[str, str], place: Place) -> list[int] | None:
    """NODE_PORTS does not change while a process runs. Raises ConfigError."""
    return node_ports(env, place) if env.get("NODE_PORTS_FILE", "").strip() else None


def _run_worker(
    options: ServeOptions, engine: EngineConfig, timeouts: Timeouts, place: Place, credentials: Credentials
) -> None:
    num_devices = len(place.server.device)
    if options.tensor_parallel_size not in (None, num_devices):
        raise ConfigError(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: the rank table gives {place.name} "
            f"{num_devices} devices; the two must be equal"
        )
    # What can be known without torch is an error at once.
    check_name(engine.device)
    Checkpoint.of(engine).max_model_len(engine.max_model_len)
    from pd_cluster.api.interpreter import tune
    from pd_cluster.api.server import bind
    from pd_cluster.api.worker_app import run_worker

    config = WorkerConfig(
        name=place.name,
        role="prefill" if place.role == "prefill" else "decode",
        server_ip=place.server.server_ip,
        bind_address=place.bind_address,
        device_ids=[device.device_id for device in place.server.device],
        epoch=secrets.randbits(62),
        credentials=credentials,
        num_threads=int(os.environ.get("OMP_NUM_THREADS", 0)) or num_threads_for(place.num_local_ranks),
        kv_transport=options.kv_transport,  # type: ignore[arg-type]
        kv_port_range=PortRange.parse(options.kv_port_range),
        kv=KVOptions(
            wire_dtype=options.kv_wire_dtype,  # type: ignore[arg-type]
            checksum=options.kv_checksum,
            hmac=options.kv_hmac,
        ),
        kv_rate_limit_bytes_per_s=options.kv_rate_limit * 1e6,
        engine=msgspec.structs.replace(engine, tensor_parallel_size=num_devices, num_local_ranks=place.num_local_ranks),
        timeouts=timeouts,
        ranks=RankPlace(size=num_devices),
        environment=_hccl_environment(engine.device, place, timeouts, options.kv_port_range),
        log_level=options.log_level.upper(),
    )
    with contextlib.ExitStack() as ending:
        preloader = _preloader_of(options, config)
        if preloader is not None:
            ending.callback(preloader.close)
        tune()
        listener = bind(options.host, options.port)
        asyncio.run(run_worker(config, listener, options.connections(), preloader))


def _preloader_of(options: ServeOptions, config: WorkerConfig) -> Preloader | None:
    """That of whoever started this process; where there is none, several ranks get one of their own."""
    if options.spawn or not forks_are_safe(config.engine.device):
        return None
    inherited = Preloader.inherited(os.environ)
    if inherited is not None or config.ranks.size == 1:
        return inherited
    return Preloader.start(environment_of(config, os.environ), config.engine.model)


def _hccl_environment(device: str, place: Place, timeouts: Timeouts, kv_port_range: str) -> dict[str, str]:
    """What rank processes on NPUs get; empty for others."""
    if not hccl.is_wanted(device, place.server):
        return {}
    ports = PortRange.parse(kv_port_range)
    environment = hccl.environment(hccl.settings(place.server, place.bind_address, timeouts, ports, os.environ))
    if hccl.RANK_TABLE in environment:
        log.warning(
            "%s=%s is not handed to the ranks: HCCL would read it", hccl.RANK_TABLE, os.environ[hccl.RANK_TABLE]
        )
    return environment


def _die_with_parent(env: Mapping[str, str]) -> None:
    """Under `pd-cluster up`, an instance never outlives the process that started it."""
    parent = env.get(DIE_WITH_PARENT)
    if parent is None:
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the line above
        raise ConfigError("the process that started this one is gone")
