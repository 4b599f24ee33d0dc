"""Speed-ups for NVIDIA GPUs (`--cuda-speedups`), off until measured on one: their list, and which change results."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pd_cluster.devices.device import Device, compute_capability
from pd_cluster.errors import ConfigError, called, told
from pd_cluster.model.kernels.attention_backend import Attention
from pd_cluster.settings.engine_config import CUDA_SPEEDUPS, PDL, PROMPT_GRAPHS, SKINNY_GATE, SYMMETRIC_SUMS

log = logging.getLogger(__name__)

OF_NUMBERS = (SKINNY_GATE, SYMMETRIC_SUMS)  # these add in another order, so they change results
OF_TRITON = ("Triton", "deterministic Triton")  # attentions whose kernels support `pdl`
NAME = called("cuda_speedups")
PDL_CAPABILITY = (9, 0)


def speedups_for(wanted: Sequence[str], device: Device, is_deterministic: bool, enforce_eager: bool) -> tuple[str, ...]:
    """Returns the requested speed-ups in order, if this device supports them; none on a CPU. Raises ConfigError."""
    if not wanted:
        return ()
    if not device.is_accelerator:
        log.info("%s has no effect on a CPU", told(NAME))
        return ()
    if not device.traits.runs_triton:
        raise ConfigError(f"{NAME} {wanted[0]}: it is for NVIDIA GPUs; remove it on {device.kind.upper()}s")
    changing = [name for name in OF_NUMBERS if name in wanted]
    if is_deterministic and changing:
        raise ConfigError(f"{NAME} {changing[0]}: not with {called('deterministic')}, which fixes the order of sums")
    if enforce_eager and PROMPT_GRAPHS in wanted:
        raise ConfigError(f"{NAME} {PROMPT_GRAPHS}: not with {called('enforce_eager')}, which captures no graphs")
    if PDL in wanted and compute_capability(device) < PDL_CAPABILITY:
        has = "{}.{}".format(*compute_capability(device))
        raise ConfigError(f"{NAME} {PDL}: it needs compute capability 9.0, but this GPU has {has}; remove it")
    return tuple(name for name in CUDA_SPEEDUPS if name in wanted)


def sped_up(attention: Attention, speedups: Sequence[str]) -> Attention:
    """Returns the attention with these speed-ups, for fused layers."""
    attend = attention.attend_batch
    if PDL in speedups and attend is not None and attention.name in OF_TRITON:
        attend = partial(attend, pdl=True)
    return replace(attention, attend_batch=attend, speedups=tuple(speedups))


def numerics_name(attention: str, speedups: Sequence[str], prompt_states: str = "") -> str:
    """Returns the name of an attention with everything else that changes results on its device, for `Numerics`.

    `prompt_states`: see Ops.
    """
    states = (prompt_states,) if prompt_states else ()
    return " + ".join((attention, *(name for name in OF_NUMBERS if name in speedups), *states))
