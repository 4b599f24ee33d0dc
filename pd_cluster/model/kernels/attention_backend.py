"""Chooses a model's attention on a device from `--attention-backend` and from what is available.

`auto` chooses Triton on CUDA (SDPA if Triton cannot serve the model), torch-npu's operators on NPUs, and on CPUs the
attention that belongs to the model's other kernels. FlashInfer is used only on request, because nothing here has been
timed on a GPU yet. A requested backend that cannot serve the model is an error; no other replaces it. Kernels are
imported when they are chosen, so the packages of all others may be missing.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pd_cluster.devices.device import CPU, Device, compute_capability, has_triton
from pd_cluster.errors import ConfigError, called, told
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.model.layers.ops import Ops

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = CPU.traits.block_size  # tokens
TRITON_BLOCK_SIZES = (4, 256)  # the smallest and the largest, powers of two


@dataclass(frozen=True, slots=True)
class Attention:
    """The functions of an attention. None means the function in layers/attention/sdpa.py, or the attention of the
    layers' own kernels.
    """

    name: str  # for the log and for `Numerics`: equal names mean equal results on equal devices
    write_and_attend: Callable[..., torch.Tensor] | None = None  # called by transformers' modules
    attend_batch: Callable[..., torch.Tensor] | None = None  # called by fused layers on CUDA
    make_ops: Callable[[Attention], Ops] | None = None  # makes the operations of fused layers that use this attention
    is_asked_for: bool = False
    speedups: tuple[str, ...] = ()  # see cuda_speedups.py


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Settings on which the choice of an attention depends. `dtype`: the model's, if it differs from the pool's."""

    max_num_seqs: int = 1
    is_deterministic: bool = False
    npu_head_dims: str = "strict"
    dtype: str = ""


NO_OPTIONS = AttentionOptions()
SDPA = Attention("SDPA")
BACKEND = called("attention_backend")
DETERMINISTIC = called("deterministic")
HEAD_DIMS = called("npu_head_dims")


def default_block_size(device: Device) -> int:
    """Returns the block size if `--block-size` is not given."""
    return device.traits.block_size


def check_deterministic(wanted: str, device: Device) -> None:
    """Raises ConfigError if this device and backend cannot make results independent of the batch."""
    if not device.is_accelerator:
        name = told(DETERMINISTIC)
        log.info("%s has no effect on a CPU: docs/models.md says which results are the same to the bit there", name)
    elif not device.traits.runs_triton:
        raise ConfigError(
            f"{DETERMINISTIC}: {device.kind.upper()}s' operators choose their order of sums by the number of rows; "
            f"remove it (HCCL_DETERMINISTIC=true fixes the order of sums over devices)"
        )
    elif wanted not in ("auto", "triton"):
        raise ConfigError(
            f"{DETERMINISTIC}: not with {BACKEND} {wanted}, whose results depend on the batch; use triton"
        )


def check_backend(wanted: str, block_size: int, device: Device) -> None:
    """Checks everything that does not require reading the model. Raises ConfigError."""
    if not device.traits.runs_triton and wanted not in ("auto", "sdpa"):
        raise ConfigError(f"{BACKEND} {wanted}: on {device.kind.upper()} expected auto or sdpa; {wanted} is for CUDA")
    if wanted == "flashinfer":
        if importlib.util.find_spec("flashinfer") is None:
            raise ConfigError(f"{BACKEND} flashinfer: it is not installed; pip install flashinfer-python, or use auto")
        if not has_triton():
            raise ConfigError(
                f"{BACKEND} flashinfer: Triton, which the other kernels need, is not installed; pip install triton"
            )
    least, most = TRITON_BLOCK_SIZES
    by_triton = device.traits.runs_triton and has_triton() and wanted in ("auto", "triton")
    if by_triton and (block_size & (block_size - 1) or not least <= block_size <= most):
        wanted_size = f"on CUDA a power of 2 from {least} to {most}; 16 is the default"
        raise ConfigError(f"{called('block_size')} {block_size}: {wanted_size}")


def choose_attention(
    wanted: str,
    config: Any,
    layout: KVLayout,
    device: Device,
    has_sinks: bool = False,
    options: AttentionOptions = NO_OPTIONS,
) -> Attention:
    """Chooses the attention for this rank's pool and transformers config. Raises ConfigError if the backend does not
    support them.
    """
    dtype, is_deterministic = options.dtype or layout.dtype, options.is_deterministic
    if device.is_accelerator and layout.has_index:
        return _sparse(wanted, config, layout, device, options)
    if not device.is_accelerator or wanted == "sdpa":
        return Attention("SDPA", is_asked_for=wanted == "sdpa")
    if layout.has_latents and wanted == "flashinfer":
        raise ConfigError(f"{BACKEND} flashinfer: latent attention (MLA) runs on Triton or SDPA; use auto")
    if not (layout.has_latents or layout.has_one_width):
        return _by_modules(wanted, is_deterministic, "attention whose values are narrower than its keys runs")
    if layout.dtype != dtype and not device.traits.runs_triton:
        setting = f"{called('kv_cache_dtype')} {layout.dtype}"
        raise ConfigError(
            f"{setting}: NPU operators read {dtype} here; remove the setting, or use {BACKEND} sdpa, which is slow"
        )
    if layout.has_latents and not device.traits.runs_triton:
        return _npu_latents(wanted, config, layout, device, options.max_num_seqs)
    if not device.traits.runs_triton:
        return _npu(config, layout, device, has_sinks, options.max_num_seqs, is_wide=options.npu_head_dims == "wide")
    if wanted == "flashinfer":
        if layout.dtype != dtype:
            raise ConfigError(f"{called('kv_cache_dtype')} {layout.dtype}: not with {BACKEND} flashinfer; use auto")
        return _flashinfer(config, layout, device, has_sinks)
    if why := _why_not_triton(layout, config):
        if wanted == "triton":
            raise ConfigError(f"{BACKEND} triton: {why}; use auto")
        if is_deterministic:
            raise ConfigError(f"{DETERMINISTIC}: {why}; remove the setting")
        log.warning("attention runs on SDPA, sequence by sequence, which is slow: %s", why)
        return SDPA
    return triton_attention(is_deterministic)


def latents_by_modules(wanted: str, is_deterministic: bool, device: Device) -> Attention:
    """Returns the attention of a model with latents whose layers are not fused. Raises ConfigError for a backend that
    works only with fused layers.
    """
    if not device.is_accelerator or wanted == "sdpa":
        return Attention("SDPA", is_asked_for=wanted == "sdpa")
    return _by_modules(wanted, is_deterministic, "latent attention (MLA) of this architecture runs")


def _sparse(wanted: str, config: Any, layout: KVLayout, device: Device, options: AttentionOptions) -> Attention:
    """Returns the attention to chosen keys, by Triton or by torch-npu's operators.

    Raises ConfigError if that backend does not support the model; no other replaces it.
    """
    setting = f"{called('device')} {device.kind}"
    if wanted not in ("auto", "triton"):
        raise ConfigError(f"{BACKEND} {wanted}: sparse attention on accelerators has kernels of its own; use auto")
    if not device.traits.runs_triton:
        from pd_cluster.model.kernels.npu import npu_sparse

        why = npu_sparse.problem(
            layout, config.num_attention_heads, config.index_n_heads, config.index_topk, options.max_num_seqs
        )
        if why:
            raise ConfigError(f"{setting}: this model's sparse attention: {why}; use cpu")
        return Attention("torch-npu (sparse)", make_ops=lambda own: npu_sparse.NpuSparseOps(device, own.name))
    why = _why_not_triton(layout, config)
    if not why:
        from pd_cluster.model.kernels.cuda.attention.listed_keys import problem

        why = problem(layout, config.index_n_heads)
    if why:
        raise ConfigError(f"{setting}: this model's sparse attention: {why}; use cpu")
    return triton_attention(options.is_deterministic)


def _by_modules(wanted: str, is_deterministic: bool, what: str) -> Attention:
    """Returns SDPA, for attention that no accelerator kernel supports. Raises ConfigError if another was requested."""
    why = f"{what} as transformers' modules on accelerators"
    if wanted != "auto":
        raise ConfigError(f"{BACKEND} {wanted}: {why}; use auto, or sdpa")
    if is_deterministic:
        raise ConfigError(f"{DETERMINISTIC}: {why}, which makes results depend on the batch; remove it")
    log.warning("attention runs on SDPA, sequence by sequence, which is slow: %s", why)
    return SDPA


def _npu(config: Any, layout: KVLayout, device: Device, has_sinks: bool, max_num_seqs: int, is_wide: bool) -> Attention:
    """Chooses torch-npu's operators. SDPA is used only on request: it serves every model, but one sequence at a time.

    `is_wide`: head sizes that the operators' description excludes are tested on the device, and used if the test
    passes.
    """
    from pd_cluster.model.kernels.npu.head_dim_probe import why_not
    from pd_cluster.model.kernels.npu.npu_attention import NpuAttention, problem, way_of
    from pd_cluster.model.kernels.npu.ops import NpuOps

    num_heads, dim = config.num_attention_heads, layout.head_dim
    has = {
        "softcap": getattr(config, "attn_logit_softcapping", None) is not None,
        "sinks": has_sinks,
        "window": uses_window(config),
    }
    traits = {trait for trait, is_there in has.items() if is_there}
    way, way_out = way_of(layout, num_heads), ""
    if way == "BSND" and not problem(layout, num_heads, max_num_seqs, traits, "TND"):
        way_out = f"{HEAD_DIMS} wide tries it, "
        if is_wide:
            why = why_not(device, layout, num_heads, has["window"], has_sinks)
            way, way_out = "BSND" if why else "TND", ""
            if why:
                log.warning("%s wide has no effect: packed attention with head_dim %d: %s", told(HEAD_DIMS), dim, why)
            else:
                log.info("%s wide: this device supports packed attention with head_dim %d", told(HEAD_DIMS), dim)
    if why := problem(layout, num_heads, max_num_seqs, traits, way):
        raise ConfigError(f"{why}; {way_out}{BACKEND} sdpa is slow, but supports it")
    if way == "BSND":
        hint = told(f"; {HEAD_DIMS} wide tries another way") if way_out else ""
        log.warning("attention of prompts runs on SDPA, sequence by sequence, which is slow: head_dim %d%s", dim, hint)
    kernels, name = NpuAttention(device, way), f"torch-npu ({way})"
    return Attention(name, kernels.write_and_attend, make_ops=lambda own: NpuOps(kernels.write_and_attend, own.name))


def _npu_latents(wanted: str, config: Any, layout: KVLayout, device: Device, max_num_seqs: int) -> Attention:
    """Chooses the operator for absorbed queries, or SDPA if the latents have widths that the operator does not take."""
    from pd_cluster.model.kernels.npu.npu_latents import WIDTHS, NpuLatentOps, problem, takes_widths

    if not takes_widths(layout):
        return _by_modules(wanted, False, "latent attention (MLA) of widths other than {} and {} runs".format(*WIDTHS))
    if why := problem(layout, config.num_attention_heads, max_num_seqs):
        raise ConfigError(f"{why}; {BACKEND} sdpa is slow, but supports it")
    return Attention("torch-npu (latents)", make_ops=lambda own: NpuLatentOps(device, own.name))


def uses_window(config: Any) -> bool:
    """Whether any layer of the model attends through a sliding window."""
    if getattr(config, "sliding_window", None) is None or getattr(config, "use_sliding_window", True) is False:
        return False
    return "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])


def triton_attention(is_deterministic: bool = False) -> Attention:
    """`is_deterministic` affects only fused layers; the loader refuses other models."""
    from pd_cluster.model.kernels.cuda.attention.triton_planner import attend_batch, write_and_attend

    if is_deterministic:
        from pd_cluster.model.kernels.cuda.deterministic import DeterministicOps, attend_rows

        name = DeterministicOps.name
        return Attention(name, write_and_attend, attend_rows, deterministic_ops)
    return Attention("Triton", write_and_attend, attend_batch, cuda_ops)


def deterministic_ops(attention: Attention) -> Ops:
    from pd_cluster.model.kernels.cuda.deterministic import DeterministicOps

    assert attention.attend_batch is not None
    return DeterministicOps(attention.attend_batch, attention.name, attention.speedups)


def cuda_ops(attention: Attention) -> Ops:
    """Returns Triton kernels for everything around an attention that reads the pool."""
    from pd_cluster.model.kernels.cuda.ops import CudaOps  # Triton may be missing

    assert attention.attend_batch is not None
    return CudaOps(attention.attend_batch, attention.name, attention.speedups)


def _flashinfer(config: Any, layout: KVLayout, device: Device, has_sinks: bool) -> Attention:
    try:
        from pd_cluster.model.kernels.cuda.attention.flashinfer import VERSION, FlashInfer, problem
    except ImportError as error:
        raise ConfigError(f"{BACKEND} flashinfer: it cannot be imported ({error}); use auto") from error
    capability = compute_capability(device)
    if why := problem(layout, config.num_attention_heads, capability, has_sinks=has_sinks):
        raise ConfigError(f"{BACKEND} flashinfer: {why}; use auto")
    kernels = FlashInfer(device)
    name = "FlashInfer {} (sm_{}{})".format(VERSION, *capability)  # both determine which kernels FlashInfer selects
    return Attention(name, kernels.write_and_attend, kernels.attend_batch, cuda_ops)


def _why_not_triton(layout: KVLayout, config: Any) -> str:
    """Returns why Triton's kernels do not support this pool and model on CUDA; "" if they do."""
    if not has_triton():
        return "Triton is not installed"
    from pd_cluster.model.kernels.cuda.attention.triton_planner import problem

    return problem(layout, config.num_attention_heads)
