"""Packs a piece of a prompt's KV cache as one payload, and unpacks it in a pool of any block size, dtype and heads.

Only this module converts dtypes and block sizes. Payloads do not depend on the order of a pool's memory. Knows nothing
of transports.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from pd_cluster.kv.kv_layout import KVLayout, stored_width
from pd_cluster.kv.kv_vectors import convert
from pd_cluster.kv.pool_memory import TORCH_DTYPES, Memory
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.wire import KVPiece, Plane


def pack(memory: Memory, piece: KVPiece, route: PoolRoute) -> torch.Tensor:
    """Returns the payload as bytes, [payload_nbytes] uint8; a view of the pool if possible.

    A converted payload has the layers in order, each with its planes in order, each [num_tokens, the plane's heads,
    stored width].
    """
    if route.is_verbatim:
        return memory.gather(piece)
    found = []
    for own, part in route.source.parts_of(piece):
        planes = [
            convert(vectors, route.source.dtype, route.wire_dtype)
            for vectors in memory.heads_of(part, route.heads_in(route.source, own))
        ]
        joined = _joined(planes, part, memory.layout, TORCH_DTYPES[route.wire_dtype])
        found.append(joined.view(torch.uint8).view(-1))
    return found[0] if len(found) == 1 else torch.cat(found)


def unpack(payload: torch.Tensor, piece: KVPiece, route: PoolRoute, memory: Memory, into: list[int]) -> None:
    """Writes to a pool a payload that `pack` returned. `into`: the blocks of the piece's tokens in that pool."""
    if route.is_verbatim:
        memory.scatter(payload, piece, into)
        return
    at = 0
    for own, part in route.source.parts_of(piece):
        nbytes = route.payload_nbytes(part)
        numbers = payload[at : at + nbytes].view(TORCH_DTYPES[route.wire_dtype])
        planes = [
            convert(vectors, route.wire_dtype, route.target.dtype) for vectors in _planes_of(numbers, part, route, own)
        ]
        memory.put_vectors(planes, part, into, route.heads_in(route.target, own))
        at += nbytes


def vectors_of(blocks: torch.Tensor, piece: KVPiece, layout: KVLayout) -> torch.Tensor:
    """Cuts a plane from `Memory.heads_of` to the piece's tokens: [num_layers, num_tokens, num_heads, width]."""
    start = piece.first_token % layout.block_size
    return blocks.flatten(1, 2)[:, start : start + piece.num_tokens]


def _joined(planes: list[torch.Tensor], piece: KVPiece, layout: KVLayout, dtype: torch.dtype) -> torch.Tensor:
    """Joins the tokens of all planes: [num_layers, elements]. Needs only one pass if the tokens fill their blocks."""
    is_whole = piece.num_tokens == len(piece.block_ids) * layout.block_size
    planes = planes if is_whole else [vectors_of(blocks, piece, layout) for blocks in planes]
    ends = list(itertools.accumulate(plane[0].numel() for plane in planes))
    result = torch.empty(piece.num_layers, ends[-1], dtype=dtype, device=planes[0].device)
    for plane, at, end in zip(planes, [0, *ends], ends, strict=False):
        result[:, at:end].view(plane.shape).copy_(plane)
    return result


def _planes_of(
    numbers: torch.Tensor, piece: KVPiece, route: PoolRoute, planes: tuple[Plane, ...]
) -> Iterator[torch.Tensor]:
    """Inverts `_joined`: yields each plane, [num_layers, num_tokens, num_heads, width]."""
    layers, at = numbers.view(piece.num_layers, -1), 0
    for plane in planes:
        (start, stop), width = route.heads_of(plane), stored_width(route.wire_dtype, plane.width)
        end = at + piece.num_tokens * (stop - start) * width
        yield layers[:, at:end].view(piece.num_layers, piece.num_tokens, stop - start, width)
        at = end
