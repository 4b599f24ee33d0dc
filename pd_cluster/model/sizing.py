"""How many blocks the KV pool and the swap space have: as asked for, or as the memory allows."""

from __future__ import annotations

from pd_cluster.config import EngineConfig
from pd_cluster.device import Device, available_nbytes, memory, reserved_nbytes
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import NUM_EXTRA_BLOCKS

DEFAULT_KV_CACHE_NBYTES = 1 << 30
GIB = 1 << 30
MAX_NPU_ELEMENTS = (1 << 31) - 1  # of one layer's keys or values
DEFAULT_UTILIZATION = 0.9  # of an accelerator
UNSEEN_NBYTES = 1 << 30  # of an accelerator: the driver's context, libraries' workspaces, graphs


def num_pool_blocks(
    config: EngineConfig, layout: KVLayout, max_model_len: int, device: Device, peak_nbytes: int = 0
) -> int:
    """Called when the weights are loaded. At least one request of max_model_len fits; raises ConfigError if not.

    `peak_nbytes`: what the weights and the largest step take of an accelerator.
    """
    per_request = layout.num_blocks_for(max_model_len)
    if config.num_blocks is not None:
        num_blocks, flag = config.num_blocks, f"--num-blocks {config.num_blocks}"
    elif config.kv_cache_memory_gib is not None:
        num_blocks = int(config.kv_cache_memory_gib * GIB) // layout.block_nbytes
        flag = f"--kv-cache-memory {config.kv_cache_memory_gib:g}"
    elif device.is_accelerator:
        share = config.gpu_memory_utilization or DEFAULT_UTILIZATION
        num_blocks = _left_nbytes(device, share, peak_nbytes) // layout.block_nbytes
        flag = f"--gpu-memory-utilization {share:g}, of which weights and steps take {peak_nbytes / GIB:.1f} GiB"
    elif config.gpu_memory_utilization is not None:
        share = config.gpu_memory_utilization / max(1, config.num_local_ranks)
        num_blocks = int(available_nbytes(device) * share) // layout.block_nbytes
        flag = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
    else:
        enough = per_request * config.max_num_seqs
        return max(per_request, min(enough, DEFAULT_KV_CACHE_NBYTES // layout.block_nbytes))
    num_blocks = _within_indices(num_blocks, layout, device, config.num_blocks is not None)
    if num_blocks < per_request:
        raise ConfigError(
            f"{flag}: {num_blocks} blocks of {layout.block_size} tokens cannot hold one request of "
            f"--max-model-len {max_model_len} ({per_request} blocks); raise the one or lower the other"
        )
    return num_blocks


def _within_indices(num_blocks: int, layout: KVLayout, device: Device, is_asked_for: bool) -> int:
    """NPUs count the numbers of one layer's keys in 32 bits."""
    if device.kind != "npu":
        return num_blocks
    most = MAX_NPU_ELEMENTS // (layout.block_size * layout.local_kv_heads * layout.k_head_dim) - NUM_EXTRA_BLOCKS
    if num_blocks > most and is_asked_for:
        raise ConfigError(f"--num-blocks {num_blocks}: an NPU takes at most {most} of this model's blocks")
    return min(num_blocks, most)


def _left_nbytes(device: Device, share: float, peak_nbytes: int) -> int:
    """This process's share of an accelerator without what else it needs; no more than nobody has."""
    of_a_step = max(0, peak_nbytes - reserved_nbytes(device))
    known = memory(device)
    return max(0, min(int(known.total * share) - peak_nbytes, known.free - of_a_step) - UNSEEN_NBYTES)


def num_swap_blocks(config: EngineConfig, layout: KVLayout) -> int:
    if config.preemption_mode != "swap":
        return 0
    return int(config.swap_space_gib * GIB / max(1, config.num_local_ranks)) // layout.block_nbytes
