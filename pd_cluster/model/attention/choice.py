"""Which attention serves a model on a device: `--attention-backend`, and what can be had.

`auto` is Triton on CUDA, SDPA where Triton cannot serve, torch-npu's operators on NPUs, and on CPU whatever the
model's other kernels bring. FlashInfer is only taken when it is asked for: nothing here has been timed on a GPU yet.
What is asked for and cannot serve is an error, never something else. Kernels are imported when they are chosen, so none
needs to be installed.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pd_cluster.device import Device, compute_capability, has_triton
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import KVLayout

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16  # tokens
NPU_BLOCK_SIZE = 128
TRITON_BLOCK_SIZES = (4, 256)  # the least and the largest, powers of two


@dataclass(frozen=True, slots=True)
class Attention:
    """None in place of a function: attention/sdpa.py, or what the layers' own kernels have."""

    name: str  # for the log
    write_and_attend: Callable[..., torch.Tensor] | None = None  # what transformers' modules reach
    attend_batch: Callable[..., torch.Tensor] | None = None  # what fused layers on CUDA call
    is_asked_for: bool = False


SDPA = Attention("SDPA")


def default_block_size(device: Device) -> int:
    """Where `--block-size` is not given."""
    return NPU_BLOCK_SIZE if device.kind == "npu" else DEFAULT_BLOCK_SIZE


def check_backend(wanted: str, block_size: int, device: Device) -> None:
    """What can be told before the model is read. Raises ConfigError."""
    if device.kind != "cuda" and wanted not in ("auto", "sdpa"):
        raise ConfigError(
            f"--attention-backend {wanted}: on {device.kind.upper()} expected auto or sdpa; {wanted} is for CUDA"
        )
    if wanted == "flashinfer":
        if importlib.util.find_spec("flashinfer") is None:
            raise ConfigError(
                "--attention-backend flashinfer: it is not installed; pip install flashinfer-python, or use auto"
            )
        if not has_triton():
            raise ConfigError(
                "--attention-backend flashinfer: Triton, which serves beside it, is not installed; pip install triton"
            )
    least, most = TRITON_BLOCK_SIZES
    by_triton = device.kind == "cuda" and has_triton() and wanted in ("auto", "triton")
    if by_triton and (block_size & (block_size - 1) or not least <= block_size <= most):
        raise ConfigError(f"--block-size {block_size}: on CUDA a power of 2 from {least} to {most}; 16 is the default")


def choose_attention(
    wanted: str, config: Any, layout: KVLayout, device: Device, has_sinks: bool = False, max_num_seqs: int = 1
) -> Attention:
    """`layout` of this rank's pool, `config` its transformers config. Raises ConfigError for what cannot serve them."""
    if not device.is_accelerator or wanted == "sdpa":
        return Attention("SDPA", is_asked_for=wanted == "sdpa")
    if device.kind == "npu":
        return _npu(config, layout, device, has_sinks, max_num_seqs)
    if wanted == "flashinfer":
        return _flashinfer(config, layout, device, has_sinks)
    if why := _why_not_triton(layout, config):
        if wanted == "triton":
            raise ConfigError(f"--attention-backend triton: {why}; use auto")
        log.warning("attention by SDPA, sequence by sequence, which is slow: %s", why)
        return SDPA
    return triton_attention()


def _npu(config: Any, layout: KVLayout, device: Device, has_sinks: bool, max_num_seqs: int) -> Attention:
    """SDPA would serve everything, one sequence after the other: only for those who ask for it."""
    from pd_cluster.model.npu.attention import NpuAttention, problem, way_of

    num_heads = config.num_attention_heads
    has = {
        "softcap": getattr(config, "attn_logit_softcapping", None) is not None,
        "sinks": has_sinks,
        "window": uses_window(config),
    }
    if why := problem(layout, num_heads, max_num_seqs, {trait for trait, is_there in has.items() if is_there}):
        raise ConfigError(f"{why}; --attention-backend sdpa is slow, and can")
    way = way_of(layout, num_heads)
    if way == "BSND":
        log.warning("prompts attend by SDPA, sequence by sequence, which is slow: head_dim %d", layout.k_head_dim)
    kernels = NpuAttention(device, way)
    return Attention(f"torch-npu ({way})", kernels.write_and_attend)


def uses_window(config: Any) -> bool:
    """Whether a layer of the model attends through a sliding window."""
    if getattr(config, "sliding_window", None) is None or getattr(config, "use_sliding_window", True) is False:
        return False
    return "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])


def triton_attention() -> Attention:
    from pd_cluster.model.cuda.paged import attend_batch, write_and_attend

    return Attention("Triton", write_and_attend, attend_batch)


def _flashinfer(config: Any, layout: KVLayout, device: Device, has_sinks: bool) -> Attention:
    try:
        from pd_cluster.model.cuda.flashinfer import FlashInfer, problem
    except ImportError as error:
        raise ConfigError(f"--attention-backend flashinfer: it cannot be imported ({error}); use auto") from error
    capability = compute_capability(device)
    if why := problem(layout, config.num_attention_heads, capability, has_sinks=has_sinks):
        raise ConfigError(f"--attention-backend flashinfer: {why}; use auto")
    kernels = FlashInfer(device)
    return Attention("FlashInfer", kernels.write_and_attend, kernels.attend_batch)


def _why_not_triton(layout: KVLayout, config: Any) -> str:
    """Why Triton's kernels do not serve such a pool and model on CUDA; "" when they do."""
    if not has_triton():
        return "Triton is not installed"
    from pd_cluster.model.cuda.paged import problem

    return problem(layout.k_head_dim, config.num_attention_heads, layout.num_kv_heads, layout.block_size)
