"""A checkpoint folder to a torch module that attends through the paged pool.

transformers builds the modules and reads the safetensors; this file picks the dtype, registers the attention
function and proves, on one small forward pass, that every layer used it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pd_cluster.checkpoint import Checkpoint
from pd_cluster.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import TORCH_DTYPES, KVPool
from pd_cluster.model.attention import sdpa
from pd_cluster.model.batch import build_batch
from pd_cluster.types import Request, SamplingParams

ALIASES = {"float": "float32", "half": "float16"}


def resolve_dtype(wanted: str, checkpoint: Checkpoint, device: Device) -> str:
    """`auto` is the checkpoint's dtype on accelerators and float32 on CPU, where 16 bits are emulated and slow."""
    if wanted != "auto":
        return ALIASES.get(wanted, wanted)
    if device.kind == "cpu":
        return "float32"
    return str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32")


def load_model(checkpoint: Checkpoint, dtype: str, device: Device) -> torch.nn.Module:
    """Raises ModelError when the weights do not fit the architecture."""
    AttentionInterface.register(sdpa.NAME, sdpa.forward)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=sdpa.NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{checkpoint.path}: cannot load the model: {error}") from error
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if wrong:
        raise ModelError(
            f"{checkpoint.path}: {len(wrong)} weights have another shape than config.json says: {wrong[0]}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{checkpoint.path}: the safetensors lack {len(missing)} weights, such as {missing[0]}")
    layer_types = set(getattr(model.config, "layer_types", None) or ())
    if layer_types - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{checkpoint.path}: layer_types {sorted(layer_types)}: only full and sliding are supported")
    loaded: torch.nn.Module = model.eval().to(device.torch_name)
    return loaded


def layout_of(config: Any, block_size: int, dtype: str) -> KVLayout:
    """The KV layout of a transformers config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        k_head_dim=head_dim,
        v_head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def prove_attention(model: torch.nn.Module, pool: KVPool) -> None:
    """Raises ModelError unless every layer wrote the pool exactly once; also the warm-up. Uses the padding block."""
    probe = Request("probe", [0, 0], SamplingParams(), block_table=[pool.num_blocks])
    if pool.layout.block_size < 2:
        probe.prompt_token_ids = [0]
    batch = build_batch([(probe, probe.num_tokens)], pool)
    with torch.inference_mode():
        model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.sample_rows,
            forward_batch=batch,
        )
    if batch.num_layer_writes != pool.layout.num_layers:
        raise ModelError(
            f"{type(model).__name__}: {batch.num_layer_writes} of {pool.layout.num_layers} layers used the KV pool; "
            f"this architecture cannot be served"
        )
