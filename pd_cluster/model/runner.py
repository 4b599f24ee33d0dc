"""Runs one step's forward pass: a plan's chunks in, logits of the sampled rows out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pd_cluster.checkpoint import Checkpoint
from pd_cluster.config import EngineConfig
from pd_cluster.device import resolve
from pd_cluster.kv.pool import KVPool
from pd_cluster.kv.swap import Kind, SwapSpace
from pd_cluster.model.batch import StepInput, batch_of, step_input
from pd_cluster.model.loader import layout_of, load_model, plan_of, resolve_dtype
from pd_cluster.model.parallel.group import Alone, Group
from pd_cluster.model.proof import prove
from pd_cluster.model.sizing import num_pool_blocks, num_swap_blocks
from pd_cluster.types import Request

OnLayer = Callable[[int], None]


class ModelRunner:
    """A loaded model and its KV pool on one device."""

    def __init__(self, config: EngineConfig, group: Group | None = None) -> None:
        """`group`: the ranks that share the model; every one of them builds its runner at the same time."""
        self.group = group or Alone()
        assert self.group.size == config.tensor_parallel_size
        device = resolve(config.device)
        checkpoint = Checkpoint.open(config.model)
        self.max_model_len = checkpoint.max_model_len(config.max_model_len)
        self.eos_token_ids = checkpoint.eos_token_ids
        self.model_identity = checkpoint.identity
        dtype = resolve_dtype(config.dtype, checkpoint, device)
        self.model = load_model(checkpoint, dtype, device, self.group)
        self.vocab_size = int(checkpoint.config["vocab_size"])
        layout = layout_of(self.model.config, config.block_size, dtype)
        if self.group.size > 1:
            layout = plan_of(checkpoint, self.group.size).layout_of_rank(layout, self.group.rank)
        num_blocks = num_pool_blocks(config, layout, self.max_model_len, device)
        self.pool = KVPool(layout, self.group.least(num_blocks))
        self.swap = SwapSpace(self.pool, self.group.least(num_swap_blocks(config, layout)))
        self.window = prove(self.model, self.pool)
        self.group.loaded()

    def forward(self, chunks: list[tuple[Request, int]], on_layer: OnLayer | None = None) -> torch.Tensor:
        """See `compute`."""
        return self.compute(step_input(chunks, self.pool.layout.block_size), on_layer)

    def compute(self, step: StepInput, on_layer: OnLayer | None = None) -> torch.Tensor:
        """Computes the chunks into the pool; returns logits [num_samples, vocab_size] float32 of the rows wanted.

        `on_layer` is told after each layer how many layers of the chunks' keys and values are in the pool.
        """
        batch = batch_of(step, self.pool)
        batch.on_layer = on_layer
        with torch.inference_mode():
            logits = self.model(batch)
        return logits.float()

    def move(self, moves: Sequence[tuple[Kind, int, int]]) -> None:
        """Copies blocks (kind, source, target) in this order; see SwapSpace."""
        self.swap.move(moves)
