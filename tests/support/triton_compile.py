"""Attention's launches, captured and compiled for an absent GPU.

Runs in a TritonChild that does not interpret.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from pd_cluster.kv.layout import stored_width
from pd_cluster.kv.pool import TORCH_DTYPES
from pd_cluster.model.attention.sdpa import Scoring
from pd_cluster.model.cuda import attention
from pd_cluster.model.cuda.attention_configs import configs_for
from pd_cluster.model.cuda.plan import plan_attention
from tests.support.ptx import order_of

LAUNCHED = ("prefill_kernel", "decode_kernel", "write_kernel", "write_codes_kernel")
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")


@dataclass
class Caught:
    """Replaces a kernel: keeps the arguments of its launches."""

    kernel: Any
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]]

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: self.launches.append((args, options))


def launches_of(shape: dict[str, Any], arch: int) -> dict[str, Caught]:
    """Returns the launches of a chunk and two decode sequences; tensors without memory, strides of a whole model."""
    caught = {name: Caught(getattr(attention, name), []) for name in LAUNCHED}
    for name, stand_in in caught.items():
        setattr(attention, name, stand_in)
    try:
        _step(**shape, arch=arch)
    finally:
        for name, stand_in in caught.items():
            setattr(attention, name, stand_in.kernel)
    return {name: stand_in for name, stand_in in caught.items() if stand_in.launches}


def _step(
    arch: int,
    head_dim: int,
    group: int,
    dtype: str,
    block_size: int,
    is_rich: bool,  # with window, softcap and sinks
    num_kv_heads: int = 8,
    window: int = 128,
    is_uniform: bool = False,
    pool_dtype: str = "",
    has_limits: bool = False,
    pdl: bool = False,
) -> None:
    query_lens, context_lens = np.array([1, 1, 500]), np.array([900, 1000, 700])
    num_heads, torch_dtype = num_kv_heads * group, TORCH_DTYPES[dtype]
    configs = configs_for(head_dim, torch_dtype.itemsize * 8, group, divmod(arch, 10), bool(pool_dtype))
    configs = replace(configs, is_uniform=is_uniform)
    plan = plan_attention(query_lens, context_lens, group, num_kv_heads, configs, 132)

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    width = stored_width(pool_dtype or dtype, head_dim)
    pool = empty(4000, 32, 2, block_size, num_kv_heads, width, dtype=TORCH_DTYPES[pool_dtype or dtype])
    qkv = empty(502, num_heads + 2 * num_kv_heads, head_dim, dtype=torch_dtype)
    query, keys, values = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    limits = empty(502) if has_limits else None
    arrivals = empty(plan.num_arrivals(num_kv_heads))
    tiles = empty(len(plan.tiles), 2)
    batch = attention.BatchMetadata(empty(4), empty(3), empty(999), empty(4), empty(2), tiles, arrivals, limits)
    sinks = empty(num_heads, dtype=torch_dtype)
    scoring = Scoring(0.1, window, 30.0, sinks) if is_rich else Scoring(0.1)
    attention.write_kv(keys, values, pool[:, 3, 0], pool[:, 3, 1], empty(502, dtype=torch.int64), pool_dtype)
    attention.attend(query, pool[:, 3, 0], pool[:, 3, 1], batch, plan, scoring, pool_dtype=pool_dtype, pdl=pdl)


def source_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """Specialises like a launch of Triton: 1 is a constant, multiples of 16 and aligned pointers are known as such."""
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    signature, constants, attributes = {}, {}, {}
    for param in kernel.params:
        value = values[param.name]
        is_one = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or is_one:
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        is_open = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
        if isinstance(number, int) and number % 16 == 0 and is_open:
            attributes[(param.num,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def compiled(arch: int, **shape: Any) -> dict[str, dict[str, int]]:
    """Maps each kernel to its use of a multiprocessor, and the counts of some instructions in its code."""
    found = {}
    for name, caught in launches_of(shape, arch).items():
        ((args, options),) = caught.launches
        chosen = {option: options.pop(option) for option in OPTIONS if option in options}
        source = source_of(caught.kernel, args, options)
        binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=chosen)
        found[name] = {"shared_nbytes": binary.metadata.shared, **_resources(binary.asm["cubin"])}
        ptx = binary.asm["ptx"]
        for word in ("wgmma.mma_async", "mma.sync", "cp.async.cg"):
            found[name][word] = ptx.count(word)
        found[name] |= order_of(ptx)
    return found


def _resources(cubin: bytes) -> dict[str, int]:
    """Returns registers per thread and bytes of its stack, where registers are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    usage = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(usage["REG"]), "spilled_nbytes": int(usage["STACK"])}
