"""A sparse MLP on the device: each row goes through the experts its router likes best, all of them in two products.

The grids follow from the number of rows alone, never from what the router chose: nothing waits for the device, and
a CUDA graph can hold it. An expert without rows costs nothing. Shared experts are somebody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.nn.functional import linear

from pd_cluster.model.cuda import experts_kernels as kernels
from pd_cluster.model.cuda.ops import DTYPES
from pd_cluster.model.ops import Activation

MAX_PAIRS_COMPARED = 8192  # more are sorted by torch: comparing each with each grows with the square
SORT_BLOCK = 64
ROUTED_ELEMENTS = 4096  # rows times experts, of one program
ROW_TILES_TOGETHER = 16  # that share columns, in the order of programs


@dataclass(frozen=True, slots=True)
class Routing:
    """From router logits to weights: softmax in float32, the `top_k` largest, and what the architecture does then."""

    top_k: int
    renormalise: bool = True  # the chosen weights add up to 1
    round_weights: bool = False  # to the logits' dtype, as all but Mixtral do


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of one program of a grouped product: rows, columns, inner numbers at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# The first whose `block_m` the pairs of one expert fill by half on average, else the last.
TILINGS_16_BITS = (
    Tiling(128, 128, 64, 8, 3),
    Tiling(64, 128, 64, 4, 3),
    Tiling(32, 64, 128, 4, 4),
    Tiling(16, 64, 128, 4, 4),
)
TILINGS_32_BITS = (Tiling(64, 64, 32, 8, 2), Tiling(16, 32, 64, 4, 2))


def tiling(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiling:
    tilings = TILINGS_32_BITS if dtype == torch.float32 else TILINGS_16_BITS
    return next((each for each in tilings if 2 * num_pairs >= each.block_m * num_experts), tilings[-1])


def num_row_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that so many pairs can need, however they are spread: every expert in use wastes part of one."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


def routing_of(gate: Any) -> Routing:
    """Of transformers' router modules."""
    if type(gate).__name__ == "MixtralTopKRouter":
        return Routing(gate.top_k)
    return Routing(gate.top_k, renormalise=gate.norm_topk_prob, round_weights=True)


class GroupedExperts:
    """[num_rows, hidden_size] to the same shape. Takes its weights as they are: contiguous, of one dtype."""

    def __init__(
        self,
        router: torch.Tensor,  # [num_experts, hidden_size]
        gate_up: torch.Tensor,  # [num_experts, 2 * num_features, hidden_size]: gates, then ups
        down: torch.Tensor,  # [num_experts, hidden_size, num_features]
        routing: Routing,
        activation: Activation,
    ) -> None:
        num_experts, hidden_size, num_features = down.shape
        assert router.shape == (num_experts, hidden_size)
        assert gate_up.shape == (num_experts, 2 * num_features, hidden_size)
        assert down.dtype in DTYPES
        assert gate_up.dtype == down.dtype
        assert gate_up.is_contiguous()
        assert down.is_contiguous()
        assert 0 < routing.top_k <= num_experts
        self._router, self._gate_up, self._down = router, gate_up, down
        self._routing, self._gelu = routing, activation == "gelu_tanh"
        self._experts = torch.arange(num_experts + 1, dtype=torch.int32, device=down.device)

    @classmethod
    def of_block(cls, block: Any, activation: Activation) -> GroupedExperts:
        """Of transformers' sparse block, whose experts' module is gone afterwards."""
        gate_up, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        del block.experts
        return cls(block.gate.weight.detach(), gate_up, down, routing_of(block.gate), activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._down.dtype
        assert x.stride(1) == 1
        if not len(x):
            return torch.empty_like(x)
        chosen, weights = route(linear(x, self._router), self._routing)
        order, starts = sort_pairs(chosen, self._experts)
        return self._multiply(x, weights, order, starts)

    def _multiply(
        self, x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        num_experts, hidden_size, num_features = self._down.shape
        num_pairs = len(order)
        tile = tiling(num_pairs, num_experts, x.dtype)
        row_tiles = num_row_tiles(num_pairs, num_experts, tile.block_m)
        common = {
            "num_row_tiles": row_tiles,
            "NUM_EXPERTS": num_experts,
            "HIDDEN_SIZE": hidden_size,
            "NUM_FEATURES": num_features,
            "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP": ROW_TILES_TOGETHER,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        inner = x.new_empty(num_pairs, num_features)
        kernels.gate_up_product[(row_tiles * triton.cdiv(num_features, tile.block_n // 2),)](
            x, self._gate_up, inner, order, starts, x.stride(0), TOP_K=self._routing.top_k, GELU=self._gelu, **common
        )
        out = x.new_empty(num_pairs, hidden_size)
        kernels.down_product[(row_tiles * triton.cdiv(hidden_size, tile.block_n),)](
            inner, self._down, weights, out, order, starts, **common
        )
        return out.view(len(x), self._routing.top_k, hidden_size).sum(1)


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_rows, num_experts], contiguous, to experts (int32) and weights (float32), both [num_rows, top_k].

    Experts come by falling weight, the lowest first among equals.
    """
    num_rows, num_experts = logits.shape
    assert logits.is_contiguous()
    chosen = logits.new_empty(num_rows, routing.top_k, dtype=torch.int32)
    weights = logits.new_empty(num_rows, routing.top_k, dtype=torch.float32)
    rows = min(triton.next_power_of_2(num_rows), max(1, ROUTED_ELEMENTS // triton.next_power_of_2(num_experts)), 16)
    kernels.route[(triton.cdiv(num_rows, rows),)](
        logits,
        chosen,
        weights,
        num_rows,
        NUM_EXPERTS=num_experts,
        TOP_K=routing.top_k,
        RENORMALISE=routing.renormalise,
        ROUND=routing.round_weights,
        ROWS=rows,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TOP_K_BLOCK=triton.next_power_of_2(routing.top_k),
        num_warps=4,
    )
    return chosen, weights


def sort_pairs(chosen: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by expert, then by number, [num_pairs] int32; where each expert's start, [num_experts + 1] int32.

    `experts` counts from 0 to num_experts, itself included.
    """
    pairs, num_experts = chosen.view(-1), len(experts) - 1
    if len(pairs) > MAX_PAIRS_COMPARED:
        found, order = pairs.sort(stable=True)
        return order.to(torch.int32), torch.searchsorted(found, experts, out_int32=True)
    order, starts = torch.empty_like(pairs), torch.empty_like(experts)
    num_pair_tiles = triton.cdiv(len(pairs), SORT_BLOCK)
    kernels.sort_pairs[(num_pair_tiles + triton.cdiv(num_experts + 1, SORT_BLOCK),)](
        pairs,
        order,
        starts,
        len(pairs),
        num_pair_tiles,
        NUM_EXPERTS=num_experts,
        BLOCK=SORT_BLOCK,
        num_warps=4,
    )
    return order, starts
