"""Child of `bench context`: steps over pools of several dtypes, in turn. Prints nothing.

`python -m pd_cluster.lab.peers.context SPEC RESULT`: all pools serve one model, whose weights are float32.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import msgspec
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.kv.pool import KVPool
from pd_cluster.kv.vectors import encode
from pd_cluster.lab.engine.context_spec import ContextSpec, ContextTimes
from pd_cluster.model.attention_choice import DEFAULT_BLOCK_SIZE
from pd_cluster.model.batch import ForwardBatch, build_batch
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.model.loader import layout_of, load_model
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, Request, Sampling


def pool_of(model: CausalLM, dtype: str, num_tokens: int) -> KVPool:
    """Returns a pool full of numbers."""
    layout = layout_of(model.config, DEFAULT_BLOCK_SIZE, dtype)
    pool = KVPool(layout, layout.num_blocks_for(num_tokens))
    numbers = torch.Generator().manual_seed(0)
    for layer in range(layout.num_layers):
        for plane in pool.layer(layer):
            shape = (*plane.shape[:-1], layout.head_dim)
            plane.copy_(encode(torch.randn(shape, generator=numbers), dtype))
    return pool


def batch_of(pool: KVPool, num_seqs: int, num_tokens: int, num_computed: int) -> ForwardBatch:
    """Returns a step of sequences whose blocks lie scattered over the pool."""
    per_sequence = pool.layout.num_blocks_for(num_tokens)
    blocks = random.Random(num_seqs).sample(range(pool.num_blocks), num_seqs * per_sequence)
    chunks = []
    for at in range(num_seqs):
        request = Request(
            str(at),
            Order([1] * num_tokens, Sampling()),
            num_computed_tokens=num_computed,
            block_table=blocks[at * per_sequence : (at + 1) * per_sequence],
        )
        chunks.append((request, num_tokens - num_computed))
    return build_batch(chunks, pool)


def times_of(spec: ContextSpec) -> ContextTimes:
    config = EngineConfig(model=spec.model)
    model = load_model(Checkpoint.of(config), "float32", CPU)
    steps: dict[str, dict[int, float]] = {dtype: {} for dtype in spec.dtypes}
    prompts: dict[str, float] = {}
    nbytes = {dtype: layout_of(model.config, DEFAULT_BLOCK_SIZE, dtype).token_nbytes for dtype in spec.dtypes}
    with torch.inference_mode():
        for num_seqs in (*spec.batches, 0):  # 0: the prompt
            length, computed = (spec.context + 1, spec.context) if num_seqs else (spec.prompt, 0)
            pools = [pool_of(model, dtype, length * max(1, num_seqs) + 16 * num_seqs) for dtype in spec.dtypes]
            batches = [batch_of(pool, max(1, num_seqs), length, computed) for pool in pools]
            for _ in range(spec.rounds):
                for dtype, batch in zip(spec.dtypes, batches, strict=True):
                    begun_s = time.perf_counter()
                    model(batch)
                    took_s = time.perf_counter() - begun_s
                    if num_seqs:
                        steps[dtype][num_seqs] = min(took_s, steps[dtype].get(num_seqs, took_s))
                    else:
                        prompts[dtype] = min(took_s, prompts.get(dtype, took_s))
            for pool in pools:
                pool.close()
    return ContextTimes(steps_s=steps, prompt_s=prompts, token_nbytes=nbytes)


if __name__ == "__main__":
    spec = msgspec.json.decode(sys.argv[1], type=ContextSpec)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(times_of(spec)))
