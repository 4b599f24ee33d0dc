"""Compiles the kernels of CudaOps, experts, argmax and sampling for absent GPUs; writes JSON lines to stdout.

`python -m tests.support.compile_cuda_ops ARCH…`, in a process of its own and without TRITON_INTERPRET. It launches the
real functions on tensors of the meta device, and specialises the kernels as Triton would.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction, create_function_from_signature

from pd_cluster.kv.copy_kernel import copy_pairs
from pd_cluster.kv.kv_layout import CODE_BITS, stored_width
from pd_cluster.model.kernels.cuda.attention.paged_attention import PagedKV
from pd_cluster.model.kernels.cuda.experts.expert_matrices import BlockMatrices, ExpertMatrices
from pd_cluster.model.kernels.cuda.experts.grouped_experts import TritonGroupedExperts
from pd_cluster.model.kernels.cuda.linear.skinny_gate import SkinnyGate
from pd_cluster.model.kernels.cuda.linear.triton_linear import TritonLinear
from pd_cluster.model.kernels.cuda.ops import CudaOps, prepare
from pd_cluster.model.kernels.cuda.sampling.argmax import argmax_rows
from pd_cluster.model.kernels.cuda.sampling.triton_draw import draw_rows
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.gated_mlp import ExpertRouter, Routing
from pd_cluster.model.layers.ops import Heads, Norm, Rope
from tests.support import compile_coded, compile_latents, compile_states
from tests.support.ptx import order_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT64 = torch.int64
KNOBS = ("inverse_temperature", "top_p", "log_min_p", "uniform")
OPS = CudaOps(lambda *_: torch.empty(0))
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def empty(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def norm(num_features: int, dtype: torch.dtype, is_wide: bool = False) -> None:
    weight = Norm(empty(num_features, dtype=FP32 if is_wide else dtype), 1e-6)
    OPS.add_norm(empty(8, num_features, dtype=dtype), empty(8, num_features, dtype=dtype), weight)


def skinny_gate(num_rows: int, num_inputs: int, num_features: int, dtype: torch.dtype, pdl: bool = False) -> None:
    weight, bias = empty(2 * num_features, num_inputs, dtype=dtype), empty(2 * num_features, dtype=dtype)
    SkinnyGate(weight, bias if num_rows == 1 else None, "silu", pdl)(empty(num_rows, num_inputs, dtype=dtype))


def overlapping() -> None:
    """Launches kernels that begin before the previous one has ended."""
    ops = CudaOps(lambda *_: torch.empty(0), speedups=["pdl"])
    ops.add_norm(empty(8, 4096), empty(8, 4096), Norm(empty(4096), 1e-6))
    ops.gate(empty(8, 2 * 14336), "silu")
    heads(32, 8, 128, BF16, has_norm=True, pdl=True)
    skinny_gate(8, 4096, 14336, BF16, pdl=True)


def gate(num_rows: int, num_features: int, dtype: torch.dtype) -> None:
    OPS.gate(empty(num_rows, 2 * num_features, dtype=dtype), "gelu_tanh" if dtype == FP32 else "silu")


def heads(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    has_norm: bool,
    wide: bool = False,
    codes: str = "",
    pdl: bool = False,
) -> None:
    weight = Norm(empty(head_dim, dtype=dtype), 1e-6) if has_norm else None
    width = stored_width(codes, head_dim)
    pool = empty(4000, 32, 2, 16, num_kv_heads, width, dtype=torch.uint8 if codes else dtype)
    prepare(
        Heads(3, num_heads, num_kv_heads, head_dim, 1.0, q_norm=weight, k_norm=weight),
        empty(8, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        Rope(*(empty(8, head_dim, dtype=FP32 if wide else dtype) for _ in range(2))),
        PagedKV(pool[:, 3, 0], pool[:, 3, 1], codes),
        empty(8, dtype=torch.int64),
        pdl=pdl,
    )


def linear(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    layer = TritonLinear(empty(num_outputs, num_inputs, dtype=dtype), empty(num_outputs, dtype=dtype))
    layer(empty(8, num_inputs, dtype=dtype))


def sparse(
    num_rows: int,
    hidden_size: int,
    num_features: int,
    num_experts: int,
    top_k: int,
    dtype: Any,
    gpt_oss: bool = False,
    is_deterministic: bool = False,
    num_ranks: int = 1,
) -> None:
    """`num_experts`: the number on each rank."""

    def bias(*size: int) -> torch.Tensor | None:
        return empty(*size, dtype=dtype) if gpt_oss else None

    routing = Routing(top_k, round_weights=num_experts > 8)
    num_routed = num_experts * num_ranks
    router = ExpertRouter(empty(num_routed, hidden_size, dtype=dtype), bias(num_routed), routing)
    gate_up = empty(num_experts, 2 * num_features, hidden_size, dtype=dtype)
    down = empty(num_experts, hidden_size, num_features, dtype=dtype)
    TritonGroupedExperts(
        router,
        BlockMatrices(
            ExpertMatrices.of(gate_up, bias(num_experts, 2 * num_features)),
            ExpertMatrices.of(down, bias(num_experts, hidden_size)),
        ),
        "swigluoai" if gpt_oss else "silu",
        None if num_ranks == 1 else ExpertShare(0, num_ranks),
        is_deterministic,
    )(empty(num_rows, hidden_size, dtype=dtype))


def copies(num_words: int) -> None:
    """Launches copies from blocks of one pool into those of another, which has more layers."""
    blocks = empty(4000, 2 * num_words, dtype=INT64)
    copy_pairs(blocks[:, :num_words], blocks[:, num_words:], empty(5, 2, dtype=INT64))


def argmax(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    argmax_rows(empty(num_rows, vocab_size, dtype=dtype))


def draw(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    knobs = {name: empty(num_rows, dtype=torch.float64) for name in KNOBS} | {"top_k": empty(num_rows, dtype=INT64)}
    best, ids = empty(num_rows, dtype=FP32), empty(num_rows, dtype=INT64)
    draw_rows(empty(num_rows, vocab_size, dtype=dtype), ids, best, ids, knobs)


# Llama 3.1 8B, Qwen3 0.6B, Gemma 2 and Mixtral, one size for each entry of the tables of launch sizes.
FEW: dict[str, Callable[[], None]] = {
    "norm": lambda: norm(4096, BF16),
    "gate, few rows": lambda: gate(32, 14336, BF16),
    "heads": lambda: heads(32, 8, 128, BF16, has_norm=False),
    "heads with norms": lambda: heads(16, 8, 128, BF16, has_norm=True),
    "experts, one row": lambda: sparse(1, 4096, 14336, 8, 2, BF16),
    "experts of a share": lambda: sparse(100, 4096, 14336, 8, 2, BF16, num_ranks=2),
    "experts, 2048 rows": lambda: sparse(2048, 4096, 14336, 8, 2, BF16),
    "experts of gpt-oss": lambda: sparse(64, 2880, 2880, 32, 4, BF16, gpt_oss=True),
    "skinny gate, 64 rows": lambda: skinny_gate(64, 4096, 14336, BF16),
    "linear": lambda: linear(4096, 4096, BF16),
    "deterministic experts": lambda: sparse(100, 4096, 14336, 8, 2, BF16, gpt_oss=True, is_deterministic=True),
    "copied blocks": lambda: copies(8192),
    "argmax, 128 rows": lambda: argmax(128, 151936, FP32),
    "draw, 128 rows": lambda: draw(128, 151936, BF16),
    **compile_coded.FEW,
    **compile_states.FEW,
    **compile_latents.FEW,
}
OTHERS: dict[str, Callable[[], None]] = {
    "gate, many rows": lambda: gate(4096, 14336, BF16),
    "experts, 100 rows": lambda: sparse(100, 4096, 14336, 8, 2, BF16),
    "experts, 192 rows": lambda: sparse(192, 4096, 14336, 8, 2, BF16),
    "skinny gate, one row": lambda: skinny_gate(1, 896, 4864, BF16),
    "wide linear": lambda: linear(4096, 28672, BF16),
    "argmax, one row": lambda: argmax(1, 151936, BF16),
    **{f"norm of {n} {dtype}": lambda n=n, dtype=dtype: norm(n, dtype)
       for n, dtype in ((64, FP16), (896, FP32), (16384, FP16), (32768, BF16))},
    "norm, wide weight": lambda: norm(2304, BF16, is_wide=True),
    "heads by wide tables": lambda: heads(40, 8, 128, BF16, has_norm=False, wide=True),  # OLMo 2
    **{f"heads into {codes}": lambda codes=codes: heads(32, 8, 128, BF16, has_norm=True, codes=codes)
       for codes in CODE_BITS},
    **{f"heads {shape} {dtype}": lambda shape=shape, dtype=dtype: heads(*shape, dtype, has_norm=True)
       for shape in ((14, 2, 64), (32, 32, 80), (16, 8, 256), (1, 1, 2)) for dtype in (FP16, FP32)},
    **{f"gate {dtype}": lambda dtype=dtype: gate(4, 4864, dtype) for dtype in (FP16, FP32)},
    "skinny gate of odd sizes": lambda: skinny_gate(17, 90, 70, FP16),
    **{f"experts of {shape} {dtype}": lambda shape=shape, dtype=dtype: sparse(*shape, dtype)
       for shape in ((700, 2048, 768, 128, 8), (3, 90, 70, 5, 2)) for dtype in (FP16, FP32)},
    "deterministic experts, float32": lambda: sparse(3, 96, 64, 8, 2, FP32, is_deterministic=True),
    **{f"linear of {shape} {dtype}": lambda shape=shape, dtype=dtype: linear(*shape, dtype)
       for shape in ((90, 70), (4096, 128256)) for dtype in (FP16, FP32)},
    "argmax, float16": lambda: argmax(1, 32000, FP16),
    "draw, float32": lambda: draw(256, 262144, FP32),
    **compile_coded.OTHERS,
    **compile_states.OTHERS,
    **compile_latents.OTHERS,
}  # fmt: skip


def launches_of(function: Callable[[], None]) -> list[Launch]:
    found: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(0 < size < (2**31 if axis == 0 else 65536) for axis, size in enumerate(grid)), grid
        found.append((self, args, kwargs))

    original, JITFunction.run = JITFunction.run, record
    try:
        function()
    finally:
        JITFunction.run = original
    return found


def compiled(launch: Launch, target: GPUTarget) -> Any:
    kernel, args, kwargs = launch
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    parsed, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    return compile_kernel(source, target=target, options=parsed.__dict__)


def facts(name: str, launch: Launch, arch: int) -> dict[str, Any]:
    binary = compiled(launch, GPUTarget("cuda", arch, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    usage = dict(re.findall(r"(REG|STACK):(\d+)", text))
    ptx = binary.asm["ptx"]
    return {
        "case": name,
        "kernel": launch[0].__name__,
        "arch": arch,
        "shared_nbytes": binary.metadata.shared,
        "registers": int(usage["REG"]),
        "stack_nbytes": int(usage["STACK"]),
        "num_warps": binary.metadata.num_warps,
        "widest_load_nbytes": max(_widths("ld", ptx), default=0),
        "narrowest_store_nbytes": min(_widths("st", ptx), default=0),
        "copies_16_bytes": "cp.async.cg" in ptx,
        "is_16_bits": any(isinstance(arg, torch.Tensor) and arg.dtype in (BF16, FP16) for arg in launch[1]),
        **order_of(ptx),
        "fuses_doubles": "fma.rn.f64" in ptx,
        "mma": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
    }


def _widths(instruction: str, ptx: str) -> list[int]:
    """Returns, for each occurrence of this global-memory instruction, the bytes that a thread accesses."""
    found = re.findall(rf"\b{instruction}\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)\b", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


def main() -> None:
    cases = {**FEW, **OTHERS} if "all" in sys.argv else FEW
    for arch in (int(word) for word in sys.argv[1:] if word.isdigit()):
        if arch >= 90:
            cases = {**cases, "overlapping": overlapping}
        for name, function in cases.items():
            for launch in launches_of(function):
                print(json.dumps(facts(name, launch, arch)), flush=True)


if __name__ == "__main__":
    main()
