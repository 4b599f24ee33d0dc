"""Runs one step's forward pass: a plan's chunks in, logits of the sampled rows out."""

from __future__ import annotations

import torch

from pd_cluster.checkpoint import Checkpoint
from pd_cluster.config import EngineConfig
from pd_cluster.device import resolve
from pd_cluster.errors import ConfigError
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.batch import build_batch
from pd_cluster.model.loader import layout_of, load_model, prove_attention, resolve_dtype
from pd_cluster.types import Request

DEFAULT_KV_CACHE_NBYTES = 1 << 30


class ModelRunner:
    """A loaded model and its KV pool on one device."""

    def __init__(self, config: EngineConfig) -> None:
        device = resolve(config.device)
        checkpoint = Checkpoint.open(config.model)
        self.max_model_len = checkpoint.max_model_len(config.max_model_len)
        self.eos_token_ids = checkpoint.eos_token_ids
        self.model_identity = checkpoint.identity
        dtype = resolve_dtype(config.dtype, checkpoint, device)
        self.model = load_model(checkpoint, dtype, device)
        self.vocab_size = int(checkpoint.config["vocab_size"])
        layout = layout_of(self.model.config, config.block_size, dtype)
        self.pool = KVPool(layout, self._num_blocks(config, layout.block_nbytes))
        prove_attention(self.model, self.pool)

    def forward(self, chunks: list[tuple[Request, int]]) -> torch.Tensor:
        """Computes the chunks into the pool; returns logits [num_samples, vocab_size] float32 of who catches up."""
        batch = build_batch(chunks, self.pool)
        with torch.inference_mode():
            logits: torch.Tensor = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.sample_rows,
                forward_batch=batch,
            ).logits
        return logits[0].float()

    def _num_blocks(self, config: EngineConfig, block_nbytes: int) -> int:
        """As asked for, or as the memory allows; at least one request of max_model_len must fit."""
        per_request = -(-self.max_model_len // config.block_size)
        if config.num_blocks is not None:
            num_blocks, flag = config.num_blocks, f"--num-blocks {config.num_blocks}"
        elif config.kv_cache_memory_gib is not None:
            num_blocks = int(config.kv_cache_memory_gib * (1 << 30)) // block_nbytes
            flag = f"--kv-cache-memory {config.kv_cache_memory_gib}"
        else:
            enough = per_request * config.max_num_seqs
            num_blocks, flag = max(per_request, min(enough, DEFAULT_KV_CACHE_NBYTES // block_nbytes)), ""
        if num_blocks < per_request:
            raise ConfigError(
                f"{flag}: {num_blocks} blocks of {config.block_size} tokens cannot hold one request of "
                f"--max-model-len {self.max_model_len} ({per_request} blocks); raise the one or lower the other"
            )
        return num_blocks
