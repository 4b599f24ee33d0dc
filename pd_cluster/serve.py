"""`pd-cluster serve`: from flags, environment and rank tables to one running instance."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pd_cluster.checkpoint import SHIPPED_MODEL, Checkpoint
from pd_cluster.cluster.auto_role import AutoRole
from pd_cluster.cluster.elastic import Tables
from pd_cluster.cluster.launcher import DIE_WITH_PARENT
from pd_cluster.cluster.place import Place, admin_token, find_place, node_ports, read_admin_token, use_openai
from pd_cluster.config import ApiConfig, EngineConfig, PortRange, RankPlace, RoutingConfig, Timeouts, WorkerConfig
from pd_cluster.device import num_threads_for, resolve
from pd_cluster.engine.process import die_with_parent
from pd_cluster.errors import ConfigError
from pd_cluster.wire import KVOptions
from ranktable_tools.hosts import is_loopback

GUIDED_BACKENDS = ("auto", "guidance", "llguidance")  # vLLM calls the library by the first of its two names
MOST_GUIDED_TIMEOUT_S = 60.0
MAX_API_WORKERS = 64
SCHEDULING_POLICIES = ("fcfs", "priority")
MOST_LOGPROBS = 1000  # all tokens of a step travel in one message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The flags of `pd-cluster serve`, as typed."""

    model: str
    host: str
    port: int
    served_model_name: list[str] | None
    tensor_parallel_size: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    block_size: int
    seed: int | None
    max_logprobs: int
    device: str
    num_blocks: int | None
    kv_cache_memory: float | None
    gpu_memory_utilization: float | None
    enable_prefix_caching: bool
    preemption_mode: str
    swap_space: float
    growth_tokens: int
    kv_transport: str
    kv_port_range: str
    kv_checksum: bool
    kv_hmac: bool
    kv_wire_dtype: str
    kv_rate_limit: float
    link_keepalive: float
    secret_file: str | None
    admin_port: int | None
    admin_host: str
    admin_token_file: str | None
    auto_role: bool
    heartbeat_interval: float
    dead_after: float
    connect_timeout: float
    credit_timeout: float
    transfer_timeout: float
    collective_timeout: float
    request_timeout: float
    drain_timeout: float
    max_attempts: int
    replay_wait: float
    guided_decoding_backend: str
    guided_timeout: float
    api_workers: int
    routing_policy: str
    scheduling_policy: str
    slo_ttft: float
    slo_tpot: float
    log_level: str

    def engine(self) -> EngineConfig:
        return EngineConfig(
            model=self.model or str(SHIPPED_MODEL),
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_memory_gib=self.kv_cache_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            swap_space_gib=self.swap_space,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            growth_tokens=self.growth_tokens,
            device=self.device,
            tensor_parallel_size=1 if self.tensor_parallel_size is None else self.tensor_parallel_size,
            seed=self.seed,
        )

    def routing(self) -> RoutingConfig:
        """Raises ConfigError."""
        from pd_cluster.cluster.policy import POLICIES

        for flag, value, known in (
            ("--routing-policy", self.routing_policy, tuple(POLICIES)),
            ("--scheduling-policy", self.scheduling_policy, SCHEDULING_POLICIES),
        ):
            if value not in known:
                raise ConfigError(f"{flag} {value!r}: expected {', '.join(known)}")
        return RoutingConfig(
            policy=self.routing_policy,
            has_priorities=self.scheduling_policy == "priority",
            max_attempts=self.max_attempts,
            slo_ttft_s=self.slo_ttft,
            slo_tpot_s=self.slo_tpot,
        )

    def timeouts(self) -> Timeouts:
        times = Timeouts(
            heartbeat_interval_s=self.heartbeat_interval,
            dead_after_s=self.dead_after,
            connect_timeout_s=self.connect_timeout,
            credit_timeout_s=self.credit_timeout,
            transfer_timeout_s=self.transfer_timeout,
            collective_timeout_s=self.collective_timeout,
            request_timeout_s=self.request_timeout,
            drain_timeout_s=self.drain_timeout,
            link_keepalive_s=self.link_keepalive,
            guided_timeout_s=self.guided_timeout,
            replay_wait_s=self.replay_wait,
        )
        for name in (
            "heartbeat_interval",
            "dead_after",
            "connect_timeout",
            "credit_timeout",
            "transfer_timeout",
            "collective_timeout",
            "link_keepalive",
            "guided_timeout",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0 and finite")
        for name in ("request_timeout", "drain_timeout", "replay_wait"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative or infinite")
        if self.guided_timeout > MOST_GUIDED_TIMEOUT_S:
            raise ConfigError(f"--guided-timeout {self.guided_timeout:g}: must be at most {MOST_GUIDED_TIMEOUT_S:g}")
        if self.dead_after < 2 * self.heartbeat_interval:
            raise ConfigError(f"--dead-after {self.dead_after}: must be at least two heartbeat intervals")
        return times


def run(options: ServeOptions, warnings: list[str], env: Mapping[str, str]) -> None:
    """Serves until a signal. Raises ConfigError and the like."""
    _die_with_parent(env)
    level = options.log_level.upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level {options.log_level!r}: expected debug, info, warning or error")
    if options.kv_transport not in ("auto", "shm", "dist"):
        raise ConfigError(f"--kv-transport {options.kv_transport!r}: expected auto, shm or dist")
    if options.kv_wire_dtype not in ("auto", "int8"):
        raise ConfigError(f"--kv-wire-dtype {options.kv_wire_dtype!r}: expected auto or int8")
    if options.guided_decoding_backend not in GUIDED_BACKENDS:
        raise ConfigError(
            f"--guided-decoding-backend {options.guided_decoding_backend!r}: expected {', '.join(GUIDED_BACKENDS)}"
        )
    if not 0 <= options.kv_rate_limit < float("inf"):
        raise ConfigError(f"--kv-rate-limit {options.kv_rate_limit:g}: must be a number of MB/s, 0 for no limit")
    engine, timeouts, routing = options.engine(), options.timeouts(), options.routing()
    place = find_place(env, options.secret_file)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for warning in warnings:
        log.warning("%s", warning)
    if place.secret_is_derived and place.spans_hosts:
        log.warning(
            "the instances are on several hosts and the cluster's secret is derived from the rank table; "
            "give every instance the same --secret-file"
        )
    if place.role == "scheduler":
        _run_scheduler(options, engine, timeouts, routing, place, env)
    else:
        _run_worker(options, engine, timeouts, place)


def _run_scheduler(
    options: ServeOptions,
    engine: EngineConfig,
    timeouts: Timeouts,
    routing: RoutingConfig,
    place: Place,
    env: Mapping[str, str],
) -> None:
    ports = node_ports(env, place)
    openai = use_openai(env)
    if not 0 <= options.max_logprobs <= MOST_LOGPROBS:
        raise ConfigError(f"--max-logprobs {options.max_logprobs}: must be in 0 to {MOST_LOGPROBS}")
    file = options.admin_token_file
    token = read_admin_token(file) if file else admin_token(place.secret)
    if options.max_attempts < 0:
        raise ConfigError(f"--max-attempts {options.max_attempts}: must not be negative")
    if not 1 <= options.api_workers <= MAX_API_WORKERS:
        raise ConfigError(f"--api-workers {options.api_workers}: must be in 1 to {MAX_API_WORKERS}")
    import uvloop

    from pd_cluster.api.admin_app import AdminAccess
    from pd_cluster.api.interpreter import tune
    from pd_cluster.api.scheduler_app import Scheduler
    from pd_cluster.api.server import bind, bind_several

    config = ApiConfig(
        engine=engine,
        served_model_names=options.served_model_name or [],
        is_openai=openai,
        timeouts=timeouts,
        routing=routing,
        max_logprobs=options.max_logprobs,
    )
    listeners = bind_several(options.host, options.port, options.api_workers)
    admin_port = options.admin_port if options.admin_port is not None else options.port + 1
    admin_listener = bind(options.admin_host, admin_port, "--admin-port")
    log.info("serving at %s:%d, admin at %s:%d", options.host, options.port, options.admin_host, admin_port)
    tables = Tables(lambda: find_place(env, options.secret_file), lambda place: _ports_of_file(env, place))
    access = AdminAccess(token, is_loopback(options.admin_host))

    async def serve() -> None:
        scheduler = Scheduler(place, ports, config, listeners, tables, options.log_level.upper())
        await scheduler.run(admin_listener, access, AutoRole() if options.auto_role else None)

    tune()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _ports_of_file(env: Mapping[str, str], place: Place) -> list[int] | None:
    """NODE_PORTS does not change while a process runs. Raises ConfigError."""
    return node_ports(env, place) if env.get("NODE_PORTS_FILE", "").strip() else None


def _run_worker(options: ServeOptions, engine: EngineConfig, timeouts: Timeouts, place: Place) -> None:
    num_devices = len(place.server.device)
    if options.tensor_parallel_size not in (None, num_devices):
        raise ConfigError(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: the rank table gives {place.name} "
            f"{num_devices} devices; the two must be equal"
        )
    # What can be known without torch is an error at once.
    resolve(engine.device)
    Checkpoint.open(engine.model).max_model_len(engine.max_model_len)
    from pd_cluster.api.server import bind
    from pd_cluster.api.worker_app import run_worker

    config = WorkerConfig(
        name=place.name,
        role="prefill" if place.role == "prefill" else "decode",
        server_ip=place.server.server_ip,
        bind_address=place.bind_address,
        device_ids=[device.device_id for device in place.server.device],
        epoch=secrets.randbits(62),
        secret=place.secret,
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
        log_level=options.log_level.upper(),
    )
    asyncio.run(run_worker(config, bind(options.host, options.port), place.cluster_tag))


def _die_with_parent(env: Mapping[str, str]) -> None:
    """Under `pd-cluster up`, an instance never outlives the process that started it."""
    parent = env.get(DIE_WITH_PARENT)
    if parent is None:
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the line above
        raise ConfigError("the process that started this one is gone")
