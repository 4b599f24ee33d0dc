"""A piece of a prompt's KV cache as one payload: out of one pool, into another of whatever block size, dtype and heads.

The one place that converts. Pools are data [num_blocks, num_layers, 2, block_size, local_kv_heads, head_dim], or lie by
layers; payloads are the same for both. Knows nothing of how payloads travel.
"""

from __future__ import annotations

import torch

from pd_cluster.kv.layered import LayerMajor
from pd_cluster.kv.layout import SCALE_NBYTES, Route
from pd_cluster.kv.pool import TORCH_DTYPES, Memory, shape_of
from pd_cluster.wire import KVPiece

INT8_MAX = 127


def pack(data: Memory, piece: KVPiece, route: Route) -> torch.Tensor:
    """The payload as bytes, [payload_nbytes] uint8; a view of the pool where that is possible."""
    if route.is_verbatim:
        return _blocks_of(data, piece)
    x = _vectors_of(data, piece, route)  # [num_layers, 2, num_tokens, num_heads, head_dim]
    if route.is_int8:
        values, scales = quantize(x)
        return torch.cat([values.view(torch.uint8).reshape(-1), scales.view(torch.uint8).reshape(-1)])
    return x.to(TORCH_DTYPES[route.wire_dtype]).contiguous().view(torch.uint8).reshape(-1)


def unpack(payload: torch.Tensor, piece: KVPiece, route: Route, data: Memory, into: list[int]) -> None:
    """Writes a payload of `pack` to a pool: `into` are the blocks that hold the piece's tokens there."""
    if route.is_verbatim:
        if isinstance(data, LayerMajor):
            _, _, *of_layer = shape_of(route.target, 1)
            blocks = payload.view(data.dtype).view(len(into), piece.num_layers, *of_layer)
            data.scatter(ids_on(data.device, torch.tensor(into)), blocks.to(data.device), piece.first_layer)
            return
        blocks = as_layers(data)[:, piece.first_layer : piece.stop_layer]  # [num_blocks, num_layers, layer_nbytes]
        payload = payload.view(len(into), piece.num_layers, -1)
        at = 0
        for first, count in runs(into):
            blocks[first : first + count].copy_(payload[at : at + count])
            at += count
        return
    shape = (piece.num_layers, 2, piece.num_tokens, route.num_heads, route.source.k_head_dim)
    if route.is_int8:
        num_scales = piece.num_layers * 2 * piece.num_tokens * route.num_heads
        split = len(payload) - num_scales * SCALE_NBYTES
        scales = payload[split:].clone().view(torch.float32)  # its bytes may begin anywhere
        x = payload[:split].view(torch.int8).view(shape) * scales.view(*shape[:-1], 1)
    else:
        x = payload.view(TORCH_DTYPES[route.wire_dtype]).view(shape)
    tokens = torch.arange(piece.num_tokens) + piece.first_token % route.target.block_size
    block = ids_on(data.device, torch.tensor(into)[tokens // route.target.block_size])
    offset = ids_on(data.device, tokens % route.target.block_size)
    if isinstance(data, LayerMajor):
        data.put_tokens(block, offset, route.heads_in(route.target), x, piece.first_layer)
        return
    target = data[:, piece.first_layer : piece.stop_layer, :, :, route.heads_in(route.target)]
    target[block, :, :, offset] = x.permute(2, 0, 1, 3, 4).to(data.dtype)  # [num_tokens, num_layers, 2, heads, dim]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and float32 scales [..., 1] of vectors [..., head_dim]: |x - value * scale| <= scale / 2."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / INT8_MAX
    values = (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-INT8_MAX, INT8_MAX)
    return values.to(torch.int8), scales


def as_layers(data: torch.Tensor) -> torch.Tensor:
    """A pool as bytes, by layer: [num_blocks, num_layers, layer_nbytes] uint8."""
    return data.view(data.shape[0], data.shape[1], -1).view(torch.uint8)


def ids_on(device: torch.device, ids: torch.Tensor) -> torch.Tensor:
    """The host's numbers on a device, brought there in the current stream's order without waiting for it."""
    return ids if device.type == "cpu" else ids.pin_memory().to(device, non_blocking=True)


def runs(ids: list[int]) -> list[tuple[int, int]]:
    """Consecutive ids joined: [3, 4, 5, 9] -> [(3, 3), (9, 1)] as (first, count)."""
    found: list[tuple[int, int]] = []
    for block in ids:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


def _blocks_of(data: Memory, piece: KVPiece) -> torch.Tensor:
    if isinstance(data, LayerMajor):
        return _gathered(data, piece).view(-1).view(torch.uint8)
    blocks = as_layers(data)[:, piece.first_layer : piece.stop_layer]
    pieces = [blocks[first : first + count] for first, count in runs(piece.block_ids)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole.reshape(-1)  # copies what is not contiguous


def _gathered(data: LayerMajor, piece: KVPiece) -> torch.Tensor:
    return data.gather(ids_on(data.device, torch.tensor(piece.block_ids)), piece.first_layer, piece.stop_layer)


def _vectors_of(data: Memory, piece: KVPiece, route: Route) -> torch.Tensor:
    """[num_layers, 2, num_tokens, num_heads, head_dim]"""
    heads = route.heads_in(route.source)
    if isinstance(data, LayerMajor):
        blocks = _gathered(data, piece)[:, :, :, :, heads]
    else:
        layers = data[:, piece.first_layer : piece.stop_layer, :, :, heads]
        blocks = layers.index_select(0, ids_on(data.device, torch.tensor(piece.block_ids)))
    x = blocks.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)  # blocks are [n, num_layers, 2, block_size, heads, dim]
    start = piece.first_token % route.source.block_size
    return x[:, :, start : start + piece.num_tokens]
