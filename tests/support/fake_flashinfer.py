"""FlashInfer's two paged wrappers as far as they are used here, on CPU tensors and in plain torch.

Signatures are those of flashinfer-python 0.6.18.post1, and so are the arguments that plan() and run() refuse. The fake
is stricter: inputs of plan() on the host must be ready, nothing may be planned while `forbidden`, and a plan that
another one has overwritten in the same workspace is an error in run().
"""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
from types import ModuleType
from typing import Any

import torch

VERSION = "0.6.18.post1"
# Keywords of decode's plan(); prefill's are in its signature.
PLAN_OPTIONS = """
    pos_encoding_mode window_left window_right logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale
    rope_scale rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req
"""


class Calls:
    """Calls to the fake since it was installed."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.planned: list[Any] = []
        self.forbidden = False
        self.numbers = itertools.count(1)


calls = Calls()


class _Wrapper:
    """The common part of both: planning, and attention over pages."""

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
        """Returns the wrapper's own copies; in graph mode in its fixed buffers, whose sizes are binding."""
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
        assert options.get("pos_encoding_mode", "NONE") == "NONE"
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
        if cap := self.options.get("logits_soft_cap"):
            scores = torch.tanh(scores / cap) * cap
        at = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None]  # a key's distance back
        hidden = at < 0 if causal else torch.zeros_like(at, dtype=torch.bool)
        if (left := self.options.get("window_left", -1)) >= 0:
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
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.buffers: list[Any] = [
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        ]
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
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        assert not deprecated_positional_args
        assert set(kwargs) <= set(PLAN_OPTIONS.split())
        assert kwargs["seq_lens"].is_cpu
        self.pages = self._store([indptr, indices, last_page_len], self.buffers)
        self._finish((num_qo_heads, num_kv_heads, head_dim, page_size), kwargs)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor:
        return self._attend(q, paged_kv_cache, torch.arange(len(self.pages[2]) + 1), self.pages, False)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert not use_cuda_graph, "not in this fake"
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph)

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
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert seq_lens is not None
        self.query_starts, self.causal = qo_indptr.clone(), causal
        self.pages = self._store([paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len], [])
        options = {
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "pos_encoding_mode": pos_encoding_mode,
        }
        self._finish((num_qo_heads, num_kv_heads, head_dim_qk, page_size), options)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor:
        return self._attend(q, paged_kv_cache, self.query_starts, self.pages, self.causal)


def as_module() -> ModuleType:
    """Returns a module for `import flashinfer`, with no calls recorded yet."""
    calls.__init__()  # type: ignore[misc]
    fake = ModuleType("flashinfer")
    fake.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    vars(fake)["__version__"] = "0.6.18"
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(fake, wrapper.__name__, wrapper)
    sys.modules.pop("pd_cluster.model.cuda.flashinfer", None)
    return fake
