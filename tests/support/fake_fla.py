"""fla's chunk kernels, as far as fla_chunks.py uses them: token by token in torch, from what fla's docstrings say.

For tests on CPUs. Arguments have the checks, names and defaults of fla-core 0.6.0, where test_fla_chunks.py compares
them if it is installed. Knows nothing of the kernels in this repository.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

VERSION = "0.6.0"
Tensor = torch.Tensor
calls: list[int] = []  # numbers of sequences


def chunk_gated_delta_rule(
    q: Tensor,  # [1, T, H, K], like k
    k: Tensor,
    v: Tensor,  # [1, T, HV, V]
    g: Tensor,  # [1, T, HV]: decays, natural logarithms
    beta: Tensor,  # [1, T, HV]
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [N, HV, K, V]
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert g.shape == v.shape[:3]
    decays = g[..., None].expand(*g.shape, k.shape[-1])
    return _delta_rule(
        q, k, v, decays, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        cu_seqlens_cpu,
    )  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,  # [1, T, HV, K]: decays, natural logarithms; with use_gate_in_kernel what they are computed from
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    assert g.shape == (*v.shape[:3], k.shape[-1])
    assert kwargs.keys() == ({"A_log", "dt_bias"} if use_gate_in_kernel else set())
    decays = g.float()
    if use_gate_in_kernel:
        rates, bias = kwargs["A_log"].exp(), kwargs["dt_bias"].view(g.shape[2:])
        decays = -rates[:, None] * torch.nn.functional.softplus(decays + bias)
    return _delta_rule(
        q, k, v, decays, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        cu_seqlens_cpu,
    )  # fmt: skip


def chunk_simple_gla(
    q: Tensor,  # [1, T, H, K], like k
    k: Tensor,
    v: Tensor,  # [1, T, H, V]
    g: Tensor | None = None,  # [1, T, H]
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,  # [N, H, K, V]; [N, H, V, K] with state_v_first
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert q.shape == k.shape
    assert k.shape[:3] == v.shape[:3]
    assert g is not None
    assert g.shape == k.shape[:3]
    assert initial_state is not None
    state = initial_state.transpose(2, 3) if state_v_first else initial_state
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    out, finals = torch.empty_like(v), []
    for seq, (first, stop) in enumerate(_bounds(cu_seqlens, cu_seqlens_cpu, k.shape[1], len(state))):
        s = state[seq].float().clone()
        for t in range(first, stop):
            s = s * g[0, t].float().exp()[:, None, None] + k[0, t, :, :, None].float() * v[0, t, :, None].float()
            out[0, t] = (torch.einsum("hk,hkv->hv", q[0, t].float(), s) * scale).to(v.dtype)
        finals.append(s)
    final = torch.stack(finals)
    assert output_final_state
    return out, (final.transpose(2, 3) if state_v_first else final).contiguous()


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,  # [1, T, HV, K]
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    has_norm: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor, Tensor]:
    assert q.shape == k.shape
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[:2] == v.shape[:2] == beta.shape[:2]
    assert v.shape[2] % k.shape[2] == 0
    assert initial_state is not None
    assert initial_state.dtype == torch.float32
    assert initial_state.shape[1:] == (v.shape[2], k.shape[3], v.shape[3])
    assert output_final_state
    share = v.shape[2] // k.shape[2]
    wide = [each[0].float().repeat_interleave(share, dim=1) for each in (q, k)]
    if has_norm:
        wide = [each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in wide]
    queries, keys = wide
    queries = queries * (k.shape[-1] ** -0.5 if scale is None else scale)
    out, finals = torch.empty_like(v), []
    for seq, (first, stop) in enumerate(_bounds(cu_seqlens, cu_seqlens_cpu, k.shape[1], len(initial_state))):
        s = initial_state[seq].clone()
        for t in range(first, stop):
            s = s * decays[0, t].float().exp()[..., None]
            delta = (v[0, t].float() - torch.einsum("hk,hkv->hv", keys[t], s)) * beta[0, t].float()[:, None]
            s = s + keys[t][..., None] * delta[:, None]
            out[0, t] = torch.einsum("hk,hkv->hv", queries[t], s).to(v.dtype)
        finals.append(s)
    return out, torch.stack(finals)


def _bounds(
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, num_rows: int, num_seqs: int
) -> Iterator[tuple[int, int]]:
    assert cu_seqlens is not None
    assert cu_seqlens_cpu is not None
    assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
    ends = cu_seqlens.tolist()
    calls.append(num_seqs)
    assert ends == cu_seqlens_cpu.tolist()
    assert len(ends) == num_seqs + 1
    assert ends[0] == 0
    assert ends[-1] == num_rows
    return itertools.pairwise(ends)


FUNCTIONS = {
    "gated_delta_rule": chunk_gated_delta_rule,
    "kda": chunk_kda,
    "simple_gla": chunk_simple_gla,
}


@contextmanager
def installed() -> Iterator[None]:
    """Puts the fake where `import fla` finds it, and forgets the module that has imported it."""
    user = "pd_cluster.model.kernels.cuda.states.fla_chunks"
    modules: dict[str, Any] = {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops")}
    modules["fla"].__version__, modules["fla"].__spec__ = VERSION, ModuleSpec("fla", None)
    for name, function in FUNCTIONS.items():
        module: Any = ModuleType(f"fla.ops.{name}")
        setattr(module, function.__name__, function)
        modules[module.__name__] = module
    before = {name: sys.modules.pop(name) for name in (*modules, user) if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in (*modules, user):
            sys.modules.pop(name, None)
        sys.modules.update(before)
