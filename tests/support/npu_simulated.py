"""Implements torch-npu's operators in plain torch on CPU; npu_devices.py has the devices, npu_hccl.py process groups.

Requires the real torch_npu in the process (npu_wheel.py): the schemas are its own, and each result must have the shape
that its meta kernel gives. The operators' semantics and limits follow CANN's documentation, independently of the code
under test. Hardware takes 16 bits only; float32 is allowed here, so that whole models can be compared with
transformers exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from pd_cluster.devices import device as devices
from pd_cluster.devices.device import Device
from pd_cluster.model.kernels.npu import npu_attention
from pd_cluster.native import packed_products
from tests.support import npu_quantized, npu_sparse_ops
from tests.support.npu_devices import NUM_DEVICES, FakeNpu, share_memory
from tests.support.npu_hccl import HcclOverGloo

packed_head_dims = {64, 128, 192}  # head sizes of this machine's operator; they depend on chip and CANN version
LATENT_WIDTHS = (512, 64)  # width of a latent and of its rotated part
calls: dict[str, int] = {}  # number of calls by operator
_library = torch.library.Library("npu", "IMPL")


def install() -> None:
    """Installs the simulation for this process."""
    import torch_npu

    for name, compute in REFERENCES.items():
        _library.impl(name, _checked(name, compute), "CPU")
    torch_npu.npu = FakeNpu(torch_npu.npu)
    c10d = torch_npu._C._distributed_c10d
    HcclOverGloo.real = c10d.ProcessGroupHCCL
    c10d.ProcessGroupHCCL = HcclOverGloo
    share_memory()
    Device.torch_name = property(lambda device: "cpu")  # type: ignore[method-assign, assignment]
    npu_attention.DTYPES = ("float32", *npu_attention.DTYPES)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
    for name in ("empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.backends.mkldnn.is_available = lambda: False  # so that no weights are packed for a CPU
    packed_products.load_library = lambda flags: None  # so that no products are those for CPUs
    devices.npu_files = lambda: [f"/dev/davinci{i}" for i in range(NUM_DEVICES)]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *size, pin_memory=False, **options: make(*size, **options)


def _checked(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `compute` to check its results' shapes against torch_npu's meta kernel."""
    operator = getattr(torch.ops.npu, name)

    def call(*args: Any, **options: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        found = compute(*args, **options)
        if name in npu_quantized.WITHOUT_META:
            return found
        to_meta: dict[str, Any] = {key: _meta(value) for key, value in options.items()}
        expected = operator(*(_meta(each) for each in args), **to_meta)
        for ours, theirs in zip(_flat(found), _flat(expected), strict=False):
            assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
            assert ours.dtype == theirs.dtype, (name, ours.dtype, theirs.dtype)
        return found

    return call


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return [_meta(each) for each in value]
    return value


def _flat(found: Any) -> list[torch.Tensor]:
    """Returns the first result; some operators' further results are used in training only."""
    return [found] if isinstance(found, torch.Tensor) else list(found or ())[:1]


# ---- the operators


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str,
    **others: object,
) -> None:
    assert cache_mode == "Norm"
    assert not any(others.values())
    for each in (key, value, key_cache, value_cache):
        assert each.is_contiguous()
        assert each.dtype == key.dtype
    assert len(slot_mapping.unique()) == len(slot_mapping)
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    assert int(slot_mapping.min()) >= 0
    assert int(slot_mapping.max()) < num_slots
    assert key_cache.numel() < 1 << 31
    key_cache.view(num_slots, *key.shape[1:])[slot_mapping] = key
    value_cache.view(num_slots, *value.shape[1:])[slot_mapping] = value


def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    sinks: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert not any(others.values())
    assert block_table is not None
    if query_rope is not None and key_rope is not None:
        given = (query, key, value, query_rope, key_rope)
        _check_latents(*given, input_layout, sparse_mode, atten_mask, actual_seq_lengths)
        query, key = torch.cat((query, query_rope), dim=-1), torch.cat((key, key_rope), dim=-1)
    assert actual_seq_lengths_kv is not None
    assert block_table.dtype == torch.int32
    assert all(each.is_contiguous() for each in (query, key, value, block_table))
    num_blocks, size, width = key.shape
    assert size == block_size
    assert width == num_key_value_heads * query.shape[-1]
    assert size == 128 or input_layout == "BSND" or query_rope is not None
    assert min(actual_seq_lengths_kv) > 0
    assert bool(((block_table >= 0) & (block_table < num_blocks)).all())
    if atten_mask is not None:
        assert atten_mask.dtype == torch.int8
        assert torch.equal(atten_mask, _later_keys())
    width = value.shape[2] // num_key_value_heads
    out = query.new_empty(*query.shape[:-1], width)
    for i, seen, queries, results in _sequences(query, out, input_layout, actual_seq_lengths, actual_seq_lengths_kv):
        assert seen <= block_table.shape[1] * size
        keys = key[block_table[i].long()].view(-1, num_key_value_heads, query.shape[-1])[:seen]
        values = value[block_table[i].long()].view(-1, num_key_value_heads, width)[:seen]
        mask = _mask(len(queries), seen, input_layout, sparse_mode, pre_tokens, next_tokens, atten_mask)
        results.copy_(attended(queries, keys, values, scale, mask, sinks))
    return out, query.new_empty(0, dtype=torch.float32)


def _check_latents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    layout: str,
    mode: int,
    mask: torch.Tensor | None,
    ends: list[int] | None,
) -> None:
    """Asserts all operator versions' requirements for latents; older ones take at most 16 tokens of a sequence."""
    assert (query.shape[-1], query_rope.shape[-1]) == (key.shape[-1], key_rope.shape[-1]) == LATENT_WIDTHS
    assert query.shape[:-1] == query_rope.shape[:-1]
    assert key.shape[:-1] == key_rope.shape[:-1]
    assert key.data_ptr() == value.data_ptr()
    assert key.shape[1] in (16, 128)
    assert query.shape[1] in (1, 2, 4, 8, 16, 32, 64, 128)
    assert all(each.is_contiguous() for each in (query_rope, key_rope))
    assert layout == "TND"
    assert ends is not None
    longest = max(stop - start for start, stop in zip([0, *ends[:-1]], ends, strict=True))
    assert longest <= 16
    assert (mode, mask is None) == ((0, True) if longest == 1 else (3, False))


def _sequences(
    query: torch.Tensor, out: torch.Tensor, layout: str, ends: list[int] | None, lens: list[int]
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    if layout == "BSND":
        assert ends is None
        assert query.shape[1] == 1
        assert len(query) == len(lens)
        assert query.shape[-1] % 16 == 0
        for i, seen in enumerate(lens):
            yield i, seen, query[i], out[i]
        return
    assert layout == "TND"
    assert ends is not None
    if query.shape[-1] not in (*packed_head_dims, sum(LATENT_WIDTHS)):
        raise RuntimeError(f"EZ1001: head dim {query.shape[-1]} is not supported in layout TND")
    assert len(ends) == len(lens) <= 4096
    assert ends[-1] == len(query)
    for i, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        assert stop > start
        yield i, lens[i], query[start:stop], out[start:stop]


def _mask(
    num_queries: int, seen: int, layout: str, mode: int, before: int, after: int, given: torch.Tensor | None
) -> torch.Tensor:
    """Returns [num_queries, seen] bool: visible keys. Modes 3 and 4 count from the last query and the last key."""
    at = torch.arange(seen - num_queries, seen)[:, None]
    keys = torch.arange(seen)[None]
    if mode == 0:
        assert layout == "BSND" or num_queries == 1
        assert given is None
        return keys >= 0
    assert given is not None
    if mode == 3:
        return keys <= at
    assert mode == 4
    return (keys >= at - before) & (keys <= at + after)


@cache
def _later_keys() -> torch.Tensor:
    """Returns [2048, 2048] int8: 1 where a key comes after the query, the only mask allowed in modes 3 and 4."""
    return torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Returns [num_queries, num_heads, head_dim]."""
    group = queries.shape[1] // keys.shape[1]
    k, v = (each.repeat_interleave(group, dim=1).float() for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), k) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(queries), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(queries.dtype)


NAMES_OF_V2 = {
    "learnable_sink": "sinks",
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
}


def fused_infer_attention_score_v2(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return fused_infer_attention_score(*tensors, **{NAMES_OF_V2.get(name, name): options[name] for name in options})


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dtype == gamma.dtype
    assert x.shape[-1:] == gamma.shape
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale * gamma.float()).to(x.dtype), scale


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    left, right = x.float().chunk(2, dim=dim)
    return (torch.nn.functional.silu(left) * right).to(x.dtype)


def rotary_mul(
    x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: object = None
) -> torch.Tensor:
    assert rotary_mode == "half"
    assert rotate is None
    assert x.dim() == r1.dim() == r2.dim() == 4
    assert x.dtype == r1.dtype == r2.dtype
    assert x.is_contiguous()
    left, right = x.chunk(2, dim=-1)
    return x * r1 + torch.cat((-right, left), dim=-1) * r2


def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    scale: list[torch.Tensor] | None = None,
    antiquant_scale: list[torch.Tensor] | None = None,
    antiquant_offset: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    output_dtype: int | None = None,
    **others: object,
) -> list[torch.Tensor]:
    """Accepts rows after the last group; their result is undefined, here NaN."""
    assert not any(others.values())
    assert (split_item, group_type, group_list_type) == (2, 0, 0)
    assert group_list is not None
    assert group_list.dtype == torch.int64
    ends = group_list.tolist()
    assert ends[-1] <= len(x[0])
    groups = list(enumerate(zip([0, *ends[:-1]], ends, strict=True)))
    if scale is None and antiquant_scale is None:
        products = [x[0][start:stop] @ weight[0][i] for i, (start, stop) in groups]
        return [_with_undefined(torch.cat(products), len(x[0]))]
    dtype = x[0].dtype if output_dtype is None else npu_quantized.DTYPES[output_dtype]
    coded = [
        npu_quantized.coded_group(
            x[0][start:stop],
            weight[0][i],
            None if scale is None else scale[0][i],
            None if antiquant_scale is None else antiquant_scale[0][i].view(-1, weight[0].shape[2]),
            None if antiquant_offset is None else antiquant_offset[0][i].view(-1, weight[0].shape[2]),
            None if per_token_scale is None else per_token_scale[0][start:stop],
            dtype,
        )
        for i, (start, stop) in groups
    ]
    return [_with_undefined(torch.cat(coded), len(x[0]))]


def _with_undefined(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.cat((rows, rows.new_full((num_rows - len(rows), rows.shape[1]), float("nan"))))


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fused_infer_attention_score_v2": fused_infer_attention_score_v2,
    "npu_rms_norm": rms_norm,
    "npu_swiglu": swiglu,
    "npu_rotary_mul": rotary_mul,
    "npu_grouped_matmul": grouped_matmul,
    **npu_quantized.REFERENCES,
    **npu_sparse_ops.REFERENCES,
}
