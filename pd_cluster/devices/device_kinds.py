"""Describes each kind of device in one row, so that other modules need not compare kinds.

A field states a capability or a requirement; the modules that read it decide what follows. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True)
class Kind:
    """The capabilities and requirements of one kind of device."""

    name: DeviceKind
    noun: str  # names one device in messages
    dist_backend: Literal["gloo", "nccl", "hccl"]  # torch's backend for groups over such devices
    emulates_16_bits: bool = False  # 16-bit computation works, but is slow
    attends_in_float32: bool = True
    has_doubles: bool = True  # double precision is fast enough to use
    block_size: int = 16  # default number of tokens in a KV block
    wants_layers_apart: bool = False  # attention needs the KV of every layer to be contiguous
    most_plane_numel: int = 0  # the most elements of a layer's plane that operators can index; 0: any number
    large_nbytes: int = 0  # steps are large by default on a device with at least this much memory; 0: on none
    runs_triton: bool = False  # attention can use Triton or FlashInfer
    graphs_take_any_context: bool = False  # one graph serves every context length
    captures_at_start_only: bool = False  # a capture is too long or too risky for a step that clients wait for
    captures_sums: bool = True  # graphs may contain sums over ranks by default
    captures_modules: bool = True  # graphs may contain modules of transformers
    spreads_tokens: bool = True  # rank 0 sends tokens to the others without the host by default
    takes_prompt_adapters: bool = True
    handles_say_their_kind: bool = False  # handles that map its memory into another process have torch's own form
    is_slow_to_name_streams: bool = False


CPU_KIND = Kind("cpu", "the host", "gloo", emulates_16_bits=True)
CUDA_KIND = Kind(
    "cuda",
    "a CUDA device",
    "nccl",
    large_nbytes=70_000_000_000,
    runs_triton=True,
    handles_say_their_kind=True,
)
NPU_KIND = Kind(
    "npu",
    "an NPU",
    "hccl",
    takes_prompt_adapters=False,
    attends_in_float32=False,
    has_doubles=False,
    block_size=128,
    wants_layers_apart=True,
    most_plane_numel=(1 << 31) - 1,
    graphs_take_any_context=True,
    captures_at_start_only=True,  # a capture's cost is unknown, and would delay the current step
    captures_modules=False,  # torch-npu's graphs of other operators are untested
    captures_sums=False,  # HCCL's sums in a graph are untested
    spreads_tokens=False,  # HCCL's broadcast between launches is untested, too; --npu-tp-graphs enables both
    is_slow_to_name_streams=True,
)
BY_KIND: dict[DeviceKind, Kind] = {each.name: each for each in (CPU_KIND, CUDA_KIND, NPU_KIND)}
