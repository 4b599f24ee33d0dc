"""Determines the tokens per step, and the numbers of blocks in the KV pool and in the swap space, from settings or from
memory.
"""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

from pd_cluster import host
from pd_cluster.devices.device import Device, memory, reserved_nbytes
from pd_cluster.errors import ConfigError, called, told
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS
from pd_cluster.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

STEP_TOKENS, LARGE_STEP_TOKENS = 2048, 8192  # defaults; the help text of the setting names them
DEFAULT_KV_CACHE_NBYTES = 1 << 30
DEFAULT_SHARE = 0.5  # the part of a host's free memory for all its pools; steps and other programs use the rest
GIB = 1 << 30
DEFAULT_UTILIZATION = 0.9  # the part of an accelerator's memory that is used
UNSEEN_NBYTES = 1 << 30  # on an accelerator: for the driver's context, library workspaces and graphs


def num_step_tokens(config: EngineConfig, device: Device) -> int:
    """Returns the most tokens of a step; the default depends on the device's type and memory."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    found = default_step_tokens(device)
    log.info("a step has at most %d tokens, the default for %s", found, device.torch_name)
    return found


def default_step_tokens(device: Device) -> int:
    least = device.traits.large_nbytes
    is_large = least > 0 and memory(device).total >= least
    return LARGE_STEP_TOKENS if is_large else STEP_TOKENS


class MemoryBeside(NamedTuple):
    """Memory that is not the pool's."""

    peak_nbytes: int = 0  # weights and the largest step, on an accelerator
    twin_nbytes: int = 0  # the twin of one block, for the draft model


NOTHING_BESIDE = MemoryBeside()


def num_pool_blocks(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    device: Device,
    beside: MemoryBeside = NOTHING_BESIDE,
    free: host.HostMemory | None = None,
) -> int:
    """Returns the number of blocks in the pool. Raises ConfigError if max_model_len does not fit.

    `free`: the host's free memory with weights loaded; None: measured now, because they are loaded.
    """
    block_nbytes = layout.block_nbytes + beside.twin_nbytes
    per_request = layout.num_blocks_for(max_model_len)
    free = None if device.is_accelerator else free or host.memory()
    if config.num_blocks is not None:
        num_blocks, flag = config.num_blocks, f"{called('num_blocks')} {config.num_blocks}"
    elif config.kv_cache_memory_gib is not None:
        num_blocks = int(config.kv_cache_memory_gib * GIB) // block_nbytes
        flag = f"{called('kv_cache_memory')} {config.kv_cache_memory_gib:g}"
    elif free is None:
        left_nbytes, flag = left_on(device, config, beside.peak_nbytes)
        num_blocks = left_nbytes // block_nbytes
    elif config.gpu_memory_utilization is not None:
        share = config.gpu_memory_utilization
        num_blocks = host_share(free, share, config.num_local_ranks) // block_nbytes
        flag = f"{called('gpu_memory_utilization')} {share:g}, {shared(free, config)}"
    else:
        enough = max(per_request, DEFAULT_KV_CACHE_NBYTES // block_nbytes)
        fitting = host_share(free, DEFAULT_SHARE, config.num_local_ranks) // block_nbytes
        num_blocks = min(per_request * config.max_num_seqs, enough, fitting)
        flag = f"{shared(free, config)}, of which {DEFAULT_SHARE:.0%} is for KV caches"
    if free is not None:
        check_fits(num_blocks * block_nbytes, free, config.num_local_ranks, flag)
    num_blocks = _within_indices(num_blocks, layout, device, config.num_blocks is not None)
    if num_blocks < per_request:
        raise ConfigError(
            f"{flag}: {num_blocks} blocks of {layout.block_size} tokens cannot hold one request of "
            f"{called('max_model_len')} {max_model_len} ({per_request} blocks); give more memory, or lower "
            f"{called('max_model_len')}"
        )
    return num_blocks


def host_share(free: host.HostMemory, share: float, num_ranks: int) -> int:
    """Returns the bytes of a rank's pool if `num_ranks` ranks share a host's memory and start in any order.

    Other ranks may not have loaded anything yet; they will take as much as this rank has taken so far. A pool takes
    memory only as it is used, so free memory does not show which ranks have a pool. So each rank takes an equal part.
    """
    others_nbytes = (max(1, num_ranks) - 1) * host.own_nbytes()
    return int(max(0, free.available - others_nbytes) * share) // max(1, num_ranks)


def check_fits(nbytes: int, free: host.HostMemory, num_ranks: int, flag: str) -> None:
    """Raises ConfigError if this pool exceeds the free memory, or the pools of all ranks exceed the host's limit."""
    if nbytes > free.available or nbytes * max(1, num_ranks) > free.limit:
        ranks = f", of {num_ranks} ranks" * (num_ranks > 1)
        raise ConfigError(
            f"{flag}: a KV pool of {nbytes / GIB:.2f} GiB{ranks}; free: {free}. Ask for less, or raise that limit"
        )


def shared(free: host.HostMemory, config: EngineConfig) -> str:
    """Returns text that says how much free memory the ranks of a host share."""
    ranks = f", for {config.num_local_ranks} ranks" if config.num_local_ranks > 1 else ""
    return f"{free} are free{ranks}"


def _within_indices(num_blocks: int, layout: KVLayout, device: Device, is_asked_for: bool) -> int:
    """Limits the pool on NPUs, where the index of a value in one layer's keys has 32 bits."""
    traits = device.traits
    if not traits.most_plane_numel:
        return num_blocks
    widest = max(map(math.prod, layout.block_shapes(layout.planes)))
    most = traits.most_plane_numel // widest - NUM_EXTRA_BLOCKS
    if num_blocks > most and is_asked_for:
        raise ConfigError(
            f"{called('num_blocks')} {num_blocks}: {traits.noun} takes at most {most} of this model's blocks"
        )
    return min(num_blocks, most)


def left_on(device: Device, config: EngineConfig, peak_nbytes: int) -> tuple[int, str]:
    """Returns the bytes left for pools on an accelerator, and the setting that limits them.

    These bytes are this process's share of the memory without its other needs, and at most the free memory.
    """
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION
    of_a_step = max(0, peak_nbytes - reserved_nbytes(device))
    known = memory(device)
    found = max(0, min(int(known.total * share) - peak_nbytes, known.free - of_a_step) - UNSEEN_NBYTES)
    taken = f"of which weights and steps take {peak_nbytes / GIB:.1f} GiB"
    return found, f"{called('gpu_memory_utilization')} {share:g}, {taken}"


def check_offload(wanted_gib: float, device: Device) -> None:
    """Checks the setting for weights in host memory: it changes nothing on CPUs. Raises ConfigError on accelerators."""
    name = called("cpu_offload_gb")
    if device.is_accelerator:
        raise ConfigError(
            f"{name} {wanted_gib:g}: weights stay on the device; remove it, and give more devices "
            f"({called('tensor_parallel_size')}) or fewer bits ({called('quantization')})"
        )
    log.warning("%s %g changes nothing: on CPUs all weights are in host memory", told(name), wanted_gib)


def num_host_cache_blocks(config: EngineConfig, layout: KVLayout) -> int:
    return int(config.kv_host_cache_gib * GIB / max(1, config.num_local_ranks)) // layout.block_nbytes


def num_swap_blocks(config: EngineConfig, layout: KVLayout, share: float = 1.0) -> int:
    """Returns the number of swap blocks with this layout, if they get `share` of the swap space."""
    if config.preemption_mode != "swap":
        return 0
    return int(config.swap_space_gib * GIB / max(1, config.num_local_ranks) * share) // layout.block_nbytes
