"""The used part of FlashInfer's two paged wrappers, in plain torch on CPU tensors.

Signatures follow flashinfer-python 0.6.18.post1, without parameters that keep their defaults. The fake is stricter:
plan()'s host inputs must be ready, plan() fails while `forbidden`, and run() fails if another plan has overwritten
its own in the same workspace.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
from types import ModuleType
from typing import Any

import torch

# Keywords that both plan() methods take besides those in their signatures.
OPTIONS = {"sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"}


class Calls:
    """Counts calls to the fake since it was installed."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.planned: list[Any] = []
        self.forbidden = False
        self.numbers = itertools.count(1)


calls = Calls()


class _Wrapper:
    """The base of both wrappers: planning, and attention over pages."""

    _shape: tuple[int, int, int, int]

    def _begin(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8
        calls.made.append(self)
        self.float_workspace, self.is_graph = workspace, use_cuda_graph
        self.int_workspace = torch.zeros(8 << 20, dtype=torch.uint8)
        self.number = 0
        self.addresses: list[int] = []

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self.float_workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer

    def _store(self, given: list[torch.Tensor], buffers: list[Any]) -> list[torch.Tensor]:
        """Copies the inputs; in graph mode into the wrapper's fixed buffers, whose sizes must match."""
        assert not calls.forbidden, "planned while a graph is captured or replayed"
        for tensor in given:
            assert tensor.dtype == torch.int32
            assert tensor.is_cpu
        if not self.is_graph:
            return [tensor.clone() for tensor in given]
        for i, (tensor, buffer) in enumerate(zip(given, buffers, strict=True)):
            assert len(tensor) <= len(buffer) if i == 1 else len(tensor) == len(buffer)
            buffer[: len(tensor)].copy_(tensor)
        return buffers

    def _finish(self, heads: tuple[int, int, int, int], options: dict[str, Any]) -> None:
        assert set(options) == OPTIONS
        self.heads, self.options = heads, options
        self.number = next(calls.numbers)
        self.int_workspace[:8].view(torch.int64)[0] = self.number
        calls.planned.append(self)

    def _attend(
        self, q: torch.Tensor, cache: Any, query_starts: torch.Tensor, pages: list[torch.Tensor], causal: bool
    ) -> torch.Tensor:
        keys, values = cache
        num_heads, num_kv_heads, head_dim, page_size = self.heads
        assert int(self.int_workspace[:8].view(torch.int64)[0]) == self.number, "another plan is in the workspace"
        assert keys.stride() == values.stride()
        assert q.shape == (int(query_starts[-1]), num_heads, head_dim)
        assert keys.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert (q.dtype, keys.dtype) == (self.options["q_data_type"], self.options["kv_data_type"])
        starts, indices, last = pages
        out = torch.zeros_like(q)
        for i, num_pages in enumerate((starts[1:] - starts[:-1]).tolist()):
            if num_pages:
                table = indices[int(starts[i]) : int(starts[i + 1])].long()
                seen = (num_pages - 1) * page_size + int(last[i])
                assert 0 < int(last[i]) <= page_size
                rows = slice(int(query_starts[i]), int(query_starts[i + 1]))
                k, v = (pool[table].flatten(0, 1)[:seen] for pool in (keys, values))
                out[rows] = self._sequence(q[rows], k, v, causal)
        return out

    def _sequence(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        """Attends with q [query_len, num_heads, head_dim], k and v [seen, num_kv_heads, head_dim]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * self.options["sm_scale"]
        if cap := self.options["logits_soft_cap"]:
            scores = torch.tanh(scores / cap) * cap
        at = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None]  # key's distance to its query
        hidden = at < 0 if causal else torch.zeros_like(at, dtype=torch.bool)
        if (left := self.options["window_left"]) >= 0:
            hidden |= at > left
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.double()).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.buffers: list[Any] = [paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
        assert use_cuda_graph == all(buffer is not None for buffer in self.buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        seq_lens: torch.Tensor,
        **options: Any,
    ) -> None:
        assert seq_lens.is_cpu
        self.pages = self._store([indptr, indices, last_page_len], self.buffers)
        self._finish((num_qo_heads, num_kv_heads, head_dim, page_size), options)

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        return self._attend(q, paged_kv_cache, torch.arange(len(self.pages[2]) + 1), self.pages, False)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph=False)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        seq_lens: torch.Tensor,
        **options: Any,
    ) -> None:
        assert seq_lens.is_cpu
        self.query_starts, self.causal = qo_indptr.clone(), causal
        self.pages = self._store([paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len], [])
        self._finish((num_qo_heads, num_kv_heads, head_dim_qk, page_size), options)

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        return self._attend(q, paged_kv_cache, self.query_starts, self.pages, self.causal)


def as_module() -> ModuleType:
    """Returns a module for `import flashinfer` without recorded calls."""
    calls.__init__()  # type: ignore[misc]
    fake = ModuleType("flashinfer")
    fake.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    vars(fake)["__version__"] = "0.6.18"
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(fake, wrapper.__name__, wrapper)
    sys.modules.pop("pd_cluster.model.kernels.cuda.attention.flashinfer", None)
    return fake
