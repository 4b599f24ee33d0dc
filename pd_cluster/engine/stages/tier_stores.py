"""Opens a rank's stores below host memory, and creates rank 0's view of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from pd_cluster import __version__
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.hub import resolve_model
from pd_cluster.checkpoints.weight_files import whole_digest
from pd_cluster.devices.device import product
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.stages.tier_stage import EngineTiers, TierCommandRunner
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.host_tier import HostTier
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.open_stores import open_disk, open_shared, read_secrets, seal_of
from pd_cluster.kv.tier_commands import LowerKind, TierContents, TierDone
from pd_cluster.kv.tier_thread import TierThread
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.native import build
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import WorkerConfig

GIB = 1 << 30


def open_tiers(
    config: WorkerConfig, runner: ModelRunner, report: Callable[[TierDone | TierContents], None]
) -> list[TierContents]:
    """Opens the stores that the settings name, each with its own thread.

    Returns the contents of a store on disk. The threads call `report`. Raises ConfigError.
    """
    if not (config.kv_disk_cache or config.kv_shared_cache):
        return []
    if not runner.swap.num_kept:
        nbytes = runner.pool.layout.block_nbytes * max(1, config.engine.num_local_ranks)
        name, given = called("kv_host_cache"), config.engine.kv_host_cache_gib
        raise ConfigError(f"{name} {given:g}: too small for a single block of {nbytes / GIB:.2g} GiB")
    rank, contents = config.ranks.rank, []
    own = [config.credentials.secret]
    secrets = read_secrets(config.kv_cache_key_file) if config.kv_cache_key_file else own
    seal = seal_of(secrets, runner.pool.layout, origin_of(config.engine, runner))
    if config.kv_disk_cache:
        disk = open_disk(config, config.name, seal, rank)
        contents.append(TierContents("disk", rank, b"".join(disk.read_index())))
        runner.tiers["disk"] = TierThread("disk", rank, disk, runner.swap.bytes_of, report)
    if config.kv_shared_cache:
        shared = open_shared(config, seal)
        runner.tiers["shared"] = TierThread("shared", rank, shared, runner.swap.bytes_of, report)
    return contents


def origin_of(config: EngineConfig, runner: ModelRunner) -> list[str]:
    """Returns everything that determines the bits of a block besides its hash and layout. Reads all weights.

    Raises ModelError.
    """
    weights = [whole_digest(folder) for folder in (Checkpoint.of(config).path, *_folders_of_head(config))]
    machine = build.identity() or torch.backends.cpu.get_cpu_capability()
    if runner.device.is_accelerator:
        machine = product(runner.device)
    return [*weights, __version__, str(torch.__version__), machine]


def _folders_of_head(config: EngineConfig) -> list[Path]:
    """Returns the folder of a draft head's weights; none if they are in the model's folder or there is no head."""
    asked = config.speculation
    if asked.with_weights != "eagle3":
        return []
    return [resolve_model(asked.model, asked.revision, config.download_dir, called("speculative_config"))]


def tiers_of(
    config: WorkerConfig,
    scheduler: StepScheduler,
    host: HostTier,
    runner: ModelRunner,
    orders: TierCommandRunner,
) -> EngineTiers:
    """Returns rank 0's view of the stores that `open_tiers` has opened on every rank."""
    nbytes = config.kv_disk_cache_size_gib * GIB / max(1, config.engine.num_local_ranks)
    capacity: dict[LowerKind, int] = {"disk": max(1, int(nbytes) // runner.pool.layout.block_nbytes), "shared": 0}
    size, num_ranks = scheduler.block_size, config.ranks.size
    lower = {kind: LowerTier(kind, host, capacity[kind], num_ranks, size, time.monotonic) for kind in runner.tiers}
    host.lower = list(lower.values())
    return EngineTiers(scheduler, lower, orders, time.monotonic)
