"""Packs a piece of a prompt's KV cache as one payload, out of one pool into another of any block size, dtype and heads.

The only place that converts. Payloads are the same however the pools lie in memory. Knows nothing of their transport.
"""

from __future__ import annotations

import itertools

import torch

from pd_cluster.kv.layout import SCALE_NBYTES, KVLayout, Route
from pd_cluster.kv.memory import TORCH_DTYPES, Memory
from pd_cluster.wire import KVPiece

INT8_MAX = 127


def pack(memory: Memory, piece: KVPiece, route: Route) -> torch.Tensor:
    """Returns the payload as bytes, [payload_nbytes] uint8; a view of the pool where possible.

    A converted payload goes layer by layer, plane by plane, [num_tokens, num_heads, width].
    """
    if route.is_verbatim:
        return memory.gather(piece)
    planes = memory.heads_of(piece, route.heads_in(route.source))
    if route.is_int8:
        found = [quantize(x) for x in planes]
        values = _joined([values for values, _ in found], piece, memory.layout, torch.int8)
        scales = _joined([scales for _, scales in found], piece, memory.layout, torch.float32)
        return torch.cat([part.view(torch.uint8).view(-1) for part in (values, scales)])
    return _joined(planes, piece, memory.layout, TORCH_DTYPES[route.wire_dtype]).view(torch.uint8).view(-1)


def unpack(payload: torch.Tensor, piece: KVPiece, route: Route, memory: Memory, into: list[int]) -> None:
    """Writes a payload of `pack` to a pool: `into` are the blocks that hold the piece's tokens there."""
    if route.is_verbatim:
        memory.scatter(payload, piece, into)
        return
    widths = [plane.width for plane in route.source.planes]
    if route.is_int8:
        num_scales = piece.num_layers * len(widths) * piece.num_tokens * route.num_heads
        split = len(payload) - num_scales * SCALE_NBYTES
        scales = _planes_of(payload[split:].clone().view(torch.float32), piece, route, [1] * len(widths))
        values = _planes_of(payload[:split].view(torch.int8), piece, route, widths)
        planes = [x * scale for x, scale in zip(values, scales, strict=True)]
    else:
        planes = _planes_of(payload.view(TORCH_DTYPES[route.wire_dtype]), piece, route, widths)
    memory.put_vectors(planes, piece, into, route.heads_in(route.target))


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 values and float32 scales [..., 1] of vectors [..., width]: |x - value * scale| <= scale / 2."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / INT8_MAX
    values = (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-INT8_MAX, INT8_MAX)
    return values.to(torch.int8), scales


def vectors_of(blocks: torch.Tensor, piece: KVPiece, layout: KVLayout) -> torch.Tensor:
    """Returns the piece's tokens of one plane of `Memory.heads_of`: [num_layers, num_tokens, num_heads, width]."""
    start = piece.first_token % layout.block_size
    return blocks.flatten(1, 2)[:, start : start + piece.num_tokens]


def _joined(planes: list[torch.Tensor], piece: KVPiece, layout: KVLayout, dtype: torch.dtype) -> torch.Tensor:
    """Joins the tokens of all planes, [num_layers, numbers of all], in one pass where they fill their blocks."""
    is_whole = piece.num_tokens == len(piece.block_ids) * layout.block_size
    planes = planes if is_whole else [vectors_of(blocks, piece, layout) for blocks in planes]
    ends = list(itertools.accumulate(plane[0].numel() for plane in planes))
    result = torch.empty(piece.num_layers, ends[-1], dtype=dtype, device=planes[0].device)
    for plane, at, end in zip(planes, [0, *ends], ends, strict=False):
        result[:, at:end].view(plane.shape).copy_(plane)
    return result


def _planes_of(numbers: torch.Tensor, piece: KVPiece, route: Route, widths: list[int]) -> list[torch.Tensor]:
    """Inverts `_joined`: [num_layers, num_tokens, num_heads, width] of each plane."""
    num_vectors = piece.num_tokens * route.num_heads
    ends = list(itertools.accumulate(num_vectors * width for width in widths))
    layers = numbers.view(piece.num_layers, -1)
    shape = (piece.num_layers, piece.num_tokens, route.num_heads, -1)
    return [layers[:, at:end].view(shape) for at, end in zip([0, *ends], ends, strict=False)]
