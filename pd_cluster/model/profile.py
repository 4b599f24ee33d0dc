"""How much memory the largest step takes on an accelerator: by running one, before the KV pool has its own."""

from __future__ import annotations

import torch

from pd_cluster.config import EngineConfig
from pd_cluster.device import Device, peak_nbytes, reset_peak, synchronize
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import NUM_EXTRA_BLOCKS, KVPool
from pd_cluster.model.batch import build_batch
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.types import Request, SamplingParams


def peak_of_a_step(model: CausalLM, layout: KVLayout, config: EngineConfig, max_model_len: int, device: Device) -> int:
    """Bytes that weights and the largest step take at once; 0 on CPU. Raises ConfigError when they are too many."""
    if not device.is_accelerator:
        return 0
    chunks = largest_step(config.max_num_batched_tokens, config.max_num_seqs, max_model_len, layout)
    num_blocks = sum(len(request.block_table) for request, _ in chunks)
    pool = KVPool(layout, num_blocks, device)
    reset_peak(device)
    try:
        with torch.inference_mode():
            logits = model(build_batch(chunks, pool)).float()
        synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens}: a step of so many tokens does not fit "
            f"{device.torch_name} beside the weights; give fewer, or more devices"
        ) from error
    del logits
    return max(0, peak_nbytes(device) - layout.block_nbytes * (num_blocks + NUM_EXTRA_BLOCKS))


def largest_step(num_tokens: int, num_seqs: int, max_model_len: int, layout: KVLayout) -> list[tuple[Request, int]]:
    """Prompts that fill a step, as many as may run, and all of which are sampled."""
    num_seqs = max(1, min(num_seqs, num_tokens))
    lens = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
    chunks, first = [], 0
    for i, length in enumerate(min(length, max_model_len) for length in lens):
        blocks = list(range(first, first + layout.num_blocks_for(length)))
        first += len(blocks)
        chunks.append((Request(f"profile {i}", [0] * length, SamplingParams(), block_table=blocks), length))
    return chunks
