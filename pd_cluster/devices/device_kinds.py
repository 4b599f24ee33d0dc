"""Describes each kind of device in one row, so that other modules need not compare kinds.

A field states a capability or a requirement; the modules that read it decide what follows. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True)
class Kind:
    """`noun` names one device in messages, `dist_backend` names torch's groups over such devices.

    Numbers: `emulates_16_bits`, which is slow; `attends_in_float32`; `has_doubles` that are fast enough to use.
    KV pools: `block_size` in tokens, by default; `wants_layers_apart` when attention needs every layer contiguous;
    `most_plane_numel`: how many elements of one layer's plane operators can index; 0: any number.
    Steps are large by default on a device with at least `large_nbytes` of memory; 0: on none. Attention: `runs_triton`,
    and FlashInfer with it.
    Graphs: `graphs_take_any_context` if one graph serves every length; `captures_at_start_only` if a capture is too
    long or too risky for a step that clients wait for. `captures_sums`: graphs may contain sums over ranks by default;
    `spreads_tokens`: rank 0 sends tokens to the others without the host by default; `captures_modules`: graphs may
    contain modules of transformers.
    """

    name: DeviceKind
    noun: str
    dist_backend: Literal["gloo", "nccl", "hccl"]
    emulates_16_bits: bool = False
    attends_in_float32: bool = True
    has_doubles: bool = True
    block_size: int = 16
    wants_layers_apart: bool = False
    most_plane_numel: int = 0
    large_nbytes: int = 0
    runs_triton: bool = False
    graphs_take_any_context: bool = False
    captures_at_start_only: bool = False
    captures_sums: bool = True
    captures_modules: bool = True
    spreads_tokens: bool = True
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
