"""Child of `context` and `weights`: steps of engines with several settings, in turn. Prints nothing.

`python -m benchmarks.peers.variants SPEC RESULT`
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import msgspec
import torch

from benchmarks.engine.variants_spec import Variant, VariantsSpec, VariantTimes
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import KVPool
from pd_cluster.kv.vectors import encode
from pd_cluster.model.attention_choice import DEFAULT_BLOCK_SIZE
from pd_cluster.model.batch import ForwardBatch, build_batch
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.model.loader import layout_of, load_model, resolve_kv_cache_dtype
from pd_cluster.native.memory import keep_what_is_freed
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, Request, Sampling


def models_of(spec: VariantsSpec) -> dict[str, tuple[CausalLM, KVLayout]]:
    """Loads a model for each kind of weights; variants that differ in their pools share one."""
    loaded: dict[Variant, CausalLM] = {}
    found = {}
    for name, variant in spec.variants.items():
        kind = msgspec.structs.replace(variant, kv_cache_dtype="auto")
        if kind not in loaded:
            loaded[kind] = load_variant(spec.model, variant)
        dtype = resolve_kv_cache_dtype(variant.kv_cache_dtype, variant.dtype)
        found[name] = loaded[kind], layout_of(loaded[kind].config, DEFAULT_BLOCK_SIZE, dtype)
    return found


def load_variant(model: str, variant: Variant) -> CausalLM:
    config = EngineConfig(
        model=model, dtype=variant.dtype, quantization=variant.quantization, quantize_head=variant.quantize_head
    )
    return load_model(Checkpoint.of(config), variant.dtype, CPU)


def pool_of(layout: KVLayout, num_tokens: int) -> KVPool:
    """Returns a pool full of numbers."""
    pool = KVPool(layout, layout.num_blocks_for(num_tokens))
    numbers = torch.Generator().manual_seed(0)
    for layer in range(layout.num_layers):
        for plane in pool.layer(layer):
            shape = (*plane.shape[:-1], layout.head_dim)
            plane.copy_(encode(torch.randn(shape, generator=numbers), layout.dtype))
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


def least_s(
    models: dict[str, tuple[CausalLM, KVLayout]], num_seqs: int, num_tokens: int, num_computed: int, rounds: int
) -> dict[str, float]:
    """Returns the least seconds of a step with each variant."""
    room = num_seqs * (num_tokens + DEFAULT_BLOCK_SIZE)
    pools = {name: pool_of(layout, room) for name, (_, layout) in models.items()}
    batches = {name: batch_of(pool, num_seqs, num_tokens, num_computed) for name, pool in pools.items()}
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, (model, _) in models.items():
            begun_s = time.perf_counter()
            model(batches[name])
            found[name] = min(found.get(name, float("inf")), time.perf_counter() - begun_s)
    for pool in pools.values():
        pool.close()
    return found


def times_of(spec: VariantsSpec) -> VariantTimes:
    keep_what_is_freed()  # as workers do
    models = models_of(spec)
    steps: dict[str, dict[int, float]] = {name: {} for name in models}
    with torch.inference_mode():
        for batch in spec.batches:
            for name, took_s in least_s(models, batch, spec.context + 1, spec.context, spec.rounds).items():
                steps[name][batch] = took_s
        prompt_s = least_s(models, 1, spec.prompt, 0, spec.rounds)
    nbytes = {name: layout.token_nbytes for name, (_, layout) in models.items()}
    return VariantTimes(steps_s=steps, prompt_s=prompt_s, token_nbytes=nbytes)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=VariantsSpec)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(times_of(asked)))
