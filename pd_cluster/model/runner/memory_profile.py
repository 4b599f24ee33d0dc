"""Measures the largest step's memory on an accelerator by running it before the KV pool is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pd_cluster.devices.device import Device, peak_nbytes, reserved_nbytes, reset_peak, synchronize
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.kv_layout import DTYPE_NBYTES, KVLayout
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS, KVPool
from pd_cluster.media.image_rules import ImageRules
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.kernels.cuda.attention.attention_plan import most_splits
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.layers.attention.latent_attention import MOST_SCORES, workspace_nbytes
from pd_cluster.model.vision.vision_tower import Tower
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import Request, RequestSpec, Sampling


def peak_of_a_step(
    model: CausalLM, layouts: Sequence[KVLayout], num_tokens: int, num_seqs: int, max_model_len: int, device: Device
) -> int:
    """Returns the bytes that weights and the largest step take together; 0 on CPU.

    The step has `num_tokens` tokens of up to `num_seqs` sequences. Raises ConfigError if it does not fit.
    """
    if not device.is_accelerator:
        return 0
    chunks = largest_step(num_tokens, num_seqs, max_model_len, layouts)
    nums_blocks = [1 + max(request.tables[group][-1] for request, _ in chunks) for group in range(len(layouts))]
    pools = [KVPool(layout, num_blocks, device) for layout, num_blocks in zip(layouts, nums_blocks, strict=True)]
    reset_peak(device)
    try:
        with torch.inference_mode():
            logits = model(build_batch(chunks, pools[0], pools[1:])).float()
        synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{called('max_num_batched_tokens')} {num_tokens}: a step of this many tokens does not "
            f"fit {device.torch_name} in addition to the weights; lower it, or give more devices"
        ) from error
    del logits
    of_pools = sum(pool.layout.block_nbytes * (pool.num_blocks + NUM_EXTRA_BLOCKS) for pool in pools)
    return max(0, peak_nbytes(device) - of_pools)


def peak_of_images(tower: Tower | None, device: Device) -> int:
    """Returns the bytes that weights, the largest picture and cached features take together; 0 on CPU.

    Raises ConfigError if they do not fit.
    """
    if tower is None or not device.is_accelerator:
        return 0
    reset_peak(device)
    largest = tower.rules.largest()
    try:
        features = tower.encode(largest)
        synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a picture of {largest.num_rows} x {largest.num_columns} does not fit {device.torch_name} in addition to "
            f"the weights; lower the sizes in preprocessor_config.json, or give {called('language_model_only')}"
        ) from error
    num_kept = max(tower.num_kept_tokens, features.shape[1]) if tower.num_kept_tokens else 0
    return peak_nbytes(device) + num_kept * (features.nbytes // features.shape[1])


def check_pictures_fit(rules: ImageRules, num_tokens: int, num_seqs: int) -> None:
    """Checks that the largest picture fits a step that also has one token of each other sequence.

    Only models that cannot split a picture need this. Raises ConfigError.
    """
    most = rules.num_tokens(rules.most())
    if rules.sees_whole and most + num_seqs - 1 > num_tokens:
        raise ConfigError(
            f"{called('max_num_batched_tokens')} {num_tokens}: this model computes a picture's {most} tokens in one "
            f"step, together with one token of each other sequence; give at least {most + num_seqs - 1}, or a lower "
            f"{called('max_num_seqs')}"
        )


def nbytes_of_graphs(model: CausalLM, layout: KVLayout, num_seqs: int, device: Device, num_tokens: int = 0) -> int:
    """Returns the bytes that graphs of up to `num_seqs` sequences take: the memory they share, which the largest graph
    determines, and the logits.

    `num_tokens`: the tokens of a step, if a sequence can have more than one.

    A graph keeps its intermediate results in its own memory, which other steps cannot use. `UNSEEN_NBYTES`, not this
    function, counts the memory that the driver uses for each graph. Raises ConfigError if the graphs do not fit.
    """
    num_tokens = max(num_tokens, num_seqs)
    chunks = largest_step(num_tokens, num_seqs, num_tokens, [layout])
    pool = KVPool(layout, sum(len(request.tables[0]) for request, _ in chunks), device)
    held = reserved_nbytes(device)
    reset_peak(device)
    try:
        with torch.inference_mode():
            logits = model(build_batch(chunks, pool))
        synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{called('max_num_seqs')}: decode graphs of {num_seqs} sequences do not fit {device.torch_name}; lower "
            f"it, or give smaller {called('graph_sizes')} or {called('enforce_eager')}"
        ) from error
    return max(0, peak_nbytes(device) - held) + logits.nbytes


def nbytes_of_adapters(config: Any, adapters: AdapterSettings, dtype: str) -> int:
    """Returns the bytes of as many LoRA adapters as may be loaded at once, each with the largest rank and on all linear
    layers.

    This is an upper bound: a rank with a share of the model keeps only a part of each adapter.
    """
    if not adapters.enable_lora:
        return 0
    num = adapters.max_cpu_loras or max(adapters.max_loras, len(adapters.lora_modules))
    hidden, inner = int(config.hidden_size), int(config.intermediate_size)
    dim = int(getattr(config, "head_dim", None) or hidden // config.num_attention_heads)
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    features = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return int(num * adapters.max_lora_rank * features * config.num_hidden_layers * DTYPE_NBYTES[dtype])


def decode_workspace_nbytes(model: CausalLM, layout: KVLayout, num_seqs: int, max_model_len: int) -> int:
    """Returns the bytes of the split-KV workspace of the largest decode step. Graphs hold it in addition to the peak.

    For latents without Triton: the workspace of a step over the longest context, because the measured step has no
    earlier tokens.
    """
    if model.attention != "Triton":
        all_widths = sum(plane.width for plane in layout.planes)
        return workspace_nbytes(max_model_len, all_widths) if layout.has_latents else 0
    num_heads: int = model.config.num_attention_heads  # this rank's heads: its config describes its share
    width = layout.planes[0].width if layout.has_latents else layout.head_dim
    return 4 * num_seqs * num_heads * most_splits(max_model_len) * (width + 1)


def lists_nbytes(model: CausalLM, layout: KVLayout, num_tokens: int, num_seqs: int, max_model_len: int) -> int:
    """Returns the bytes that sparse attention needs to choose keys: for scores and the best scores in a step with
    `num_tokens` tokens, and for lists of chosen keys in that step and in decode graphs.

    The measured step chooses no keys, because its sequences are too short.
    """
    if not layout.has_index or max_model_len <= model.config.index_topk:
        return 0
    scores_nbytes = 2 * (4 + 4) * max(MOST_SCORES, max_model_len)
    return scores_nbytes + 4 * (num_tokens + num_seqs) * int(model.config.index_topk)


def largest_step(
    num_tokens: int, num_seqs: int, max_model_len: int, layouts: Sequence[KVLayout]
) -> list[tuple[Request, int]]:
    """Returns prompts that fill a step, with as many sequences as may run; each has sampled rows.

    All sequences use the same state: the pool may not have room for one each, and separate states would not change the
    work.
    """
    num_seqs = max(1, min(num_seqs, num_tokens))
    lens = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
    chunks, first = [], [0] * len(layouts)
    for i, length in enumerate(min(length, max_model_len) for length in lens):
        stops = [
            1 if layout.holds.is_state else start + layout.num_blocks_for(length)
            for layout, start in zip(layouts, first, strict=True)
        ]
        tables = [list(range(start, stop)) for start, stop in zip(first, stops, strict=True)]
        first = [0 if layout.holds.is_state else stop for layout, stop in zip(layouts, stops, strict=True)]
        chunks.append((Request(f"profile {i}", RequestSpec([0] * length, Sampling()), tables=tables), length))
    return chunks
