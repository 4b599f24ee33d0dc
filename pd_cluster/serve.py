"""`pd-cluster serve`: from flags, environment and rank tables to one running instance."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pd_cluster.checkpoint import SHIPPED_MODEL, Checkpoint
from pd_cluster.cluster.launcher import DIE_WITH_PARENT
from pd_cluster.cluster.place import Place, find_place, node_ports, resolve_host, use_openai
from pd_cluster.config import EngineConfig, PortRange, RankPlace, Timeouts, WorkerConfig
from pd_cluster.device import num_threads_for, resolve
from pd_cluster.engine.process import die_with_parent
from pd_cluster.errors import ConfigError
from pd_cluster.wire import KVOptions

GUIDED_BACKENDS = ("auto", "guidance", "llguidance")  # vLLM calls the library by the first of its two names
MOST_GUIDED_TIMEOUT_S = 60.0
MOST_LOGPROBS = 1000  # all tokens of a step travel in one message
# How long the mailbox's thread waits until the event loop's lets it run. Python's own 0.005 would be added to each way.
SWITCH_INTERVAL_S = 0.0001
# With Python's own, looking for cycles takes a sixth of the scheduler's time. An ended request leaves none behind, so
# what is older than a short look is looked at seldom: that stops everything for as long as many streams are open.
GC_THRESHOLDS = (2_000, 1_000, 10)

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
    heartbeat_interval: float
    dead_after: float
    connect_timeout: float
    credit_timeout: float
    transfer_timeout: float
    collective_timeout: float
    request_timeout: float
    drain_timeout: float
    guided_decoding_backend: str
    guided_timeout: float
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
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0")
        for name in ("request_timeout", "drain_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
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
    engine, timeouts = options.engine(), options.timeouts()
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
        _run_scheduler(options, engine, timeouts, place, env)
    else:
        _run_worker(options, engine, timeouts, place)


def _run_scheduler(
    options: ServeOptions, engine: EngineConfig, timeouts: Timeouts, place: Place, env: Mapping[str, str]
) -> None:
    ports = node_ports(env, place)
    openai = use_openai(env)
    if not 0 <= options.max_logprobs <= MOST_LOGPROBS:
        raise ConfigError(f"--max-logprobs {options.max_logprobs}: must be in 0 to {MOST_LOGPROBS}")
    import uvloop

    from pd_cluster.api.scheduler_app import run_scheduler
    from pd_cluster.api.server import bind

    listener = bind(options.host, options.port)
    admin_port = options.admin_port if options.admin_port is not None else options.port + 1
    admin_listener = bind(options.admin_host, admin_port, "--admin-port")
    log.info("serving at %s:%d, admin at %s:%d", options.host, options.port, options.admin_host, admin_port)
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    names, max_logprobs = options.served_model_name or [], options.max_logprobs
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_scheduler(place, ports, engine, names, openai, timeouts, listener, admin_listener, max_logprobs))


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
        hosts={name: resolve_host(host) for name, host in place.hosts.items()},
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
