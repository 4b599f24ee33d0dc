"""Proves a loaded model before it serves: every layer uses the pool, and the numbers are the model's own.

transformers gives many architectures the registered attention function, but not all of them use it, and some pass it
less than their own mask contains. Such a model would answer wrongly; here it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ModelError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.batch import build_batch
from pd_cluster.model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.fused_lm import FusedCausalLM
from pd_cluster.types import Order, Request, Sampling

NUM_TOKENS = 12  # of each of two sequences
STEPS = ((5, 7), (6, 4), (1, 1))  # tokens of the two in each step
BLOCK_SIZE = 4
BLOCK_TABLES = ([4, 1, 3], [0, 5, 2])
WINDOW = 3  # replaces a longer one, and the number of keys that an indexer chooses, which so few tokens would not reach
SHORTENED = ("sliding_window", "index_topk")
ROUNDED = "int8"  # activations are codes, of which some fall to the other side by the last bits
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1, ROUNDED: 0.25}  # relative; float32 differs by about 1e-6
# The share of the rows of logits that may differ by more: in 16 bits a router can choose another expert, which changes
# everything after it. A model with no past, or a wrong one, has at least half its rows wrong.
SPARED_ROWS = {"float32": 0.0, "bfloat16": 0.25, "float16": 0.25, ROUNDED: 0.25}


def prove(model: CausalLM, pool: KVPool, dtype: str) -> int | None:
    """Raises ModelError for a model that must not be served; also the warm-up. `dtype`: the model's.

    Returns the sliding window that all layers have; None when one of them sees everything, or they differ.
    """
    windows = prove_every_layer_writes(model, pool)
    if isinstance(model, PlainCausalLM):  # fused layers were compared with this at their creation
        prove_same_logits(model, pool, dtype)
    return windows.pop() if len(windows) == 1 else None


def prove_every_layer_writes(model: CausalLM, pool: KVPool) -> set[int | None]:
    """Raises ModelError unless each layer wrote the pool once, in ascending order; returns the layers' windows.

    Uses the padding block.
    """
    probe = Request("probe", Order([0, 0], Sampling()), tables=[[pool.num_blocks]])
    if pool.layout.block_size < 2:
        probe.prompt_token_ids = [0]
    batch = build_batch([(probe, probe.num_tokens)], pool)
    with torch.inference_mode(), refusal(model):
        model(batch)
    num_layers = pool.layout.num_model_layers
    if batch.layers_written != list(range(num_layers)):
        raise ModelError(
            f"{_name(model)}: layers {batch.layers_written} wrote the KV pool instead of each of {num_layers} once, in "
            f"order; this architecture cannot be served"
        )
    return batch.windows


def prove_same_logits(model: PlainCausalLM, pool: KVPool, dtype: str) -> None:
    """Raises ModelError unless two prompts, in chunks through a small pool, give the logits of transformers alone.

    The pool has the model's dtype: codes would change the numbers. A row's mean carries no information and is left out.
    """
    token_ids = probe_token_ids(model.config.vocab_size)
    with torch.inference_mode(), refusal(model), _short_windows([*model.model.modules(), *_configs(model.model)]):
        actual = _in_chunks(model, replace(pool.layout, dtype=dtype), pool.device, token_ids.tolist())
        expected = own_logits(model, token_ids.to(actual.device))
    check_same(actual, expected, model, ROUNDED if model.rounds_activations else dtype)


def own_choices(model: PlainCausalLM) -> torch.Tensor:
    """Returns logits by transformers alone of two prompts most of whose tokens see fewer keys than there are."""
    token_ids = probe_token_ids(model.config.vocab_size)
    with torch.inference_mode(), refusal(model), _short_windows(model.model.modules()):
        return own_logits(model, token_ids).flatten(0, 1).float()


def fused_choices(model: FusedCausalLM, layout: KVLayout) -> torch.Tensor:
    """Returns the same by fused layers, in chunks through a pool of this layout, but for its size of blocks."""
    token_ids = probe_token_ids(model.config.vocab_size)
    with torch.inference_mode(), _short_windows(model.indexers):
        return _in_chunks(model, layout, CPU, token_ids.tolist()).flatten(0, 1).float()


def own_logits(model: PlainCausalLM, token_ids: torch.Tensor, rows: torch.Tensor | int = 0) -> torch.Tensor:
    """Computes logits by transformers alone, without a cache, of `rows` of each sequence; 0 means all rows."""
    with _eager(model.model):
        return model.whole(model.model(input_ids=token_ids, use_cache=False, logits_to_keep=rows).logits)


def check_same(
    actual: torch.Tensor, expected: torch.Tensor, model: PlainCausalLM, dtype: str, where: str = "with paged attention"
) -> None:
    """Raises ModelError unless rows of logits [..., vocab_size] are the same, within the limits of the dtype."""
    check_finite(expected, _name(model), dtype)
    expected, actual = _centred(expected), _centred(actual)
    errors = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten().sort().values  # of each row
    error = float(errors[-1 - int(len(errors) * SPARED_ROWS[dtype])])
    if not error <= TOLERANCE[dtype]:
        raise ModelError(
            f"{_name(model)}: {where} the logits differ from transformers' own by {error:.1e} of their "
            f"size; this architecture cannot be served"
        )


def check_finite(logits: torch.Tensor, model: str, dtype: str) -> None:
    """Raises ModelError for logits that are not finite, which no choice of kernels could fix."""
    if not logits.isfinite().all():
        raise ModelError(
            f"{model}: the model's logits in {dtype} are not all numbers: its weights have NaN or infinities, or "
            f"{dtype} is too narrow for them"
        )


def _centred(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    return logits - logits.mean(-1, keepdim=True)


def probe_token_ids(vocab_size: int, num_tokens: int = 2 * NUM_TOKENS) -> torch.Tensor:
    """Returns ids [2, num_tokens / 2] from all over the vocabulary."""
    return (torch.arange(num_tokens) * 7919 % vocab_size).view(2, -1)


def _in_chunks(model: CausalLM, layout: KVLayout, device: Device, token_ids: list[list[int]]) -> torch.Tensor:
    """Computes logits [2, NUM_TOKENS, vocab_size] in chunks, through a small pool."""
    small = replace(layout, block_size=BLOCK_SIZE)
    with KVPool(small, num_blocks=2 * len(BLOCK_TABLES[0]), device=device) as pool:
        return _steps(model, pool, token_ids)


def _steps(model: CausalLM, pool: KVPool, token_ids: list[list[int]]) -> torch.Tensor:
    requests = [
        Request(f"probe {i}", Order(ids, Sampling()), tables=[table])
        for i, (ids, table) in enumerate(zip(token_ids, BLOCK_TABLES, strict=True))
    ]
    rows: list[list[torch.Tensor]] = [[], []]
    for step in STEPS:
        batch = build_batch(list(zip(requests, step, strict=True)), pool)
        batch.sample_rows = torch.arange(batch.num_tokens, device=batch.slot_mapping.device)
        for i, part in enumerate(torch.split(model(batch), list(step))):
            rows[i].append(part)
            requests[i].num_computed_tokens += step[i]
    return torch.stack([torch.cat(parts) for parts in rows])


@contextmanager
def refusal(model: CausalLM) -> Iterator[None]:
    """Turns errors in an unknown architecture's own code into refusals instead of crashes."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{_name(model)}: the proof at load does not fit the device's memory: {error}") from error
    except (TypeError, AttributeError, RuntimeError, IndexError, AssertionError) as error:
        raise ModelError(f"{_name(model)} cannot run with paged attention: {error!r}") from error


@contextmanager
def _short_windows(owners: Iterable[Any]) -> Iterator[None]:
    """Sets every sliding window to WINDOW: the config's, which transformers' masks use, and the modules' own.

    Likewise the number of keys that indexers choose.
    """
    values = [(owner, name, getattr(owner, name, None)) for owner in owners for name in SHORTENED]
    values = [each for each in values if isinstance(each[2], int)]
    try:
        for owner, name, _ in values:
            setattr(owner, name, WINDOW)
        yield
    finally:
        for owner, name, value in values:
            setattr(owner, name, value)


@contextmanager
def _eager(model: torch.nn.Module) -> Iterator[None]:
    """Uses transformers' own attention and masks."""
    configs = _configs(model)
    try:
        for config in configs:
            config._attn_implementation = "eager"
        yield
    finally:
        for config in configs:
            config._attn_implementation = sdpa.NAME


def _configs(model: torch.nn.Module) -> list[Any]:
    """Returns the configs of the model and its modules, each once."""
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return list(found.values())


def _name(model: CausalLM) -> str:
    return str(model.config.model_type)
