"""A sparse MLP on the device: each row passes through its router's top experts, in one grouped product for gate and up,
and one for down.

Grid sizes depend only on the number of rows, never on the router's choice. So nothing waits for the device, and a CUDA
graph can capture the block. An expert without rows costs nothing. Shared experts are not handled here.
"""

from __future__ import annotations

import torch
import triton

from pd_cluster.model.kernels.cuda.elementwise_kernels import ACTIVATIONS, DTYPES
from pd_cluster.model.kernels.cuda.experts import experts_kernels as kernels
from pd_cluster.model.kernels.cuda.experts.expert_matrices import BlockMatrices, ExpertMatrices
from pd_cluster.model.kernels.cuda.linear.triton_linear import ROW_TILES_TOGETHER, Tiling, TritonLinear
from pd_cluster.model.layers.expert_share import ExpertShare, RankExperts
from pd_cluster.model.layers.expert_weights import ExpertWeights
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter, Routing
from pd_cluster.model.layers.packed_linear import Linear, PlainLinear

MAX_PAIRS_COMPARED = 8192  # with more pairs torch sorts them, because comparing all pairs grows quadratically
SORT_BLOCK = 64
ROUTED_ELEMENTS = 4096  # rows times experts per program
MAX_ROUTED_ROWS = 16  # the most rows per program
SUM_BLOCK = 1024  # columns per program


# The tile for a step is the first one of which an average expert's pairs fill at least half the rows, or the last one.
TILINGS_16_BITS = (
    Tiling(128, 128, 64, 8, 3),
    Tiling(64, 128, 64, 4, 3),
    Tiling(32, 64, 128, 4, 4),
    Tiling(16, 64, 128, 4, 4),
)
TILINGS_32_BITS = (Tiling(64, 64, 32, 8, 2), Tiling(16, 32, 64, 4, 2))
# The tile for any number of pairs if `is_deterministic`. Not measured yet.
FIXED_16_BITS, FIXED_32_BITS = TILINGS_16_BITS[1], TILINGS_32_BITS[0]


def tiling(num_pairs: int, num_experts: int, dtype: torch.dtype, has_words: bool = False) -> Tiling:
    """`has_words`: the experts' weights are four-bit codes. Decoding needs registers, so tiles have fewer rows."""
    tilings = TILINGS_32_BITS if dtype == torch.float32 else TILINGS_16_BITS[int(has_words) :]
    return next((each for each in tilings if 2 * num_pairs >= each.block_m * num_experts), tilings[-1])


def num_row_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Returns the most tiles that this many pairs can need: each expert in use may fill one tile only partly."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


class TritonGroupedExperts:
    """Maps [num_rows, hidden_size] to the same shape. Does not copy its weights: they are contiguous, of one dtype."""

    def __init__(
        self,
        router: ExpertRouter,
        matrices: BlockMatrices,
        activation: Activation,
        share: ExpertShare | None = None,
        is_deterministic: bool = False,
    ) -> None:
        """`share`: see `Experts`. `is_deterministic`: a row's bits do not depend on the other rows."""
        self._gate_up, self._down, self._rows = matrices.gate_up, matrices.down, matrices.rows
        num_experts, device = self._down.shape[0], router.weight.device
        self._num_routed, hidden_size = router.weight.shape
        matrices.check(hidden_size)
        assert router.weight.dtype in DTYPES
        assert num_experts == (self._num_routed if share is None else len(share.own(self._num_routed)))
        assert share is None or matrices.rows is None  # the experts of a share are whole
        assert 0 < router.routing.top_k <= self._num_routed
        self._own = None if share is None else RankExperts(share, self._num_routed, torch.int32)
        self._router_dtype = torch.float32 if router.routing.in_float32 else router.weight.dtype
        self._is_deterministic = is_deterministic
        linear = TritonLinear if is_deterministic else PlainLinear
        self._router: Linear = linear(router.weight.to(self._router_dtype), router.bias)
        self._routing, self._activation = router.routing, ACTIVATIONS[activation]
        self._experts = torch.arange(num_experts + 1, dtype=torch.int32, device=device)

    @classmethod
    def of(
        cls,
        router: ExpertRouter,
        weights: ExpertWeights,
        activation: Activation,
        share: ExpertShare | None = None,
        is_deterministic: bool = False,
    ) -> TritonGroupedExperts:
        """Makes the block from a router and the weights of its experts."""
        gate_up, down = (ExpertMatrices.from_weight(each.whole()) for each in (weights.gate_up, weights.down))
        return cls(router, BlockMatrices(gate_up, down, weights.rows), activation, share, is_deterministic)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._router_dtype or self._routing.in_float32
        assert x.stride(1) == 1
        if not len(x):
            return torch.empty_like(x)
        most_rows = MAX_ROUTED_ROWS if self._is_deterministic else len(x)
        chosen, weights = route(self._router(x.to(self._router_dtype)), self._routing, most_rows, x.dtype)
        if self._own is None:
            return self._compute(x, chosen, weights)
        return self._own.through(self._compute, x, chosen, weights)

    def take_part(self) -> None:
        assert self._own is not None
        self._own.take_part(self._compute)

    def _compute(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`chosen` [num_rows, top_k] int32: an index past the last expert belongs to another rank."""
        order, starts = sort_pairs(chosen, self._experts)
        pairs = self._multiply(x, weights, order, starts).view(len(x), self._routing.top_k, -1)
        added = self._added(pairs, chosen)
        return added if self._rows is None else self._rows.placed(added)

    def _multiply(
        self, x: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Returns [num_pairs, num_outputs]; the values of pairs with other ranks' experts are undefined."""
        (_, width, hidden_size), num_pairs = self._gate_up.shape, len(order)
        num_features = width // 2
        tile, common = self._launch(x, num_pairs)
        row_tiles = common["num_row_tiles"]
        inner = x.new_empty(num_pairs, num_features)
        taken, taken_scales = self._gate_up.taken(x)
        kernels.gate_up_product[(row_tiles * triton.cdiv(num_features, tile.block_n // 2),)](
            taken,
            taken_scales,
            *self._gate_up.tensors,
            inner if self._gate_up.bias is None else self._gate_up.bias,
            inner,
            order,
            starts,
            taken.stride(0),
            TOP_K=self._routing.top_k,
            ACTIVATION=self._activation,
            HAS_BIAS=self._gate_up.bias is not None,
            HIDDEN_SIZE=hidden_size,
            NUM_FEATURES=num_features,
            **self._gate_up.constants(tile),
            **common,
        )
        if self._rows is not None:
            inner = self._rows.gathered(inner)
        _, num_outputs, num_inputs = self._down.shape
        out = x.new_empty(num_pairs, num_outputs)
        taken, taken_scales = self._down.taken(inner)
        kernels.down_product[(row_tiles * triton.cdiv(num_outputs, tile.block_n),)](
            taken,
            taken_scales,
            *self._down.tensors,
            out if self._down.bias is None else self._down.bias,
            weights,
            out,
            order,
            starts,
            HAS_BIAS=self._down.bias is not None,
            HIDDEN_SIZE=num_outputs,
            NUM_FEATURES=num_inputs,
            **self._down.constants(tile),
            **common,
        )
        return out

    def _launch(self, x: torch.Tensor, num_pairs: int) -> tuple[Tiling, dict[str, int]]:
        """Returns the tile for this number of pairs, and the launch arguments of both kernels."""
        num_experts = self._down.shape[0]
        if self._is_deterministic:
            tile = FIXED_32_BITS if x.dtype == torch.float32 else FIXED_16_BITS
        else:
            tile = tiling(num_pairs, self._num_routed, x.dtype, self._gate_up.has_words or self._down.has_words)
        return tile, {
            "num_row_tiles": num_row_tiles(num_pairs, num_experts, tile.block_m),
            "NUM_EXPERTS": num_experts,
            "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "GROUP": ROW_TILES_TOGETHER,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def _added(self, pairs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Adds up the pairs of each row: [num_rows, top_k, num_outputs] to [num_rows, num_outputs]."""
        num_rows, top_k, num_outputs = pairs.shape
        if not self._is_deterministic and self._own is None:
            return pairs.sum(1)
        total = pairs.new_empty(num_rows, num_outputs)
        kernels.sum_pairs[(num_rows, triton.cdiv(num_outputs, SUM_BLOCK))](
            pairs,
            chosen,
            total,
            NUM_EXPERTS=len(self._experts) - 1,
            HAS_OTHERS=self._own is not None,
            NUM_FEATURES=num_outputs,
            TOP_K=top_k,
            BLOCK=SUM_BLOCK,
            num_warps=4,
        )
        return total


def route(
    logits: torch.Tensor,
    routing: Routing,
    most_rows: int = MAX_ROUTED_ROWS,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps contiguous logits [num_rows, num_experts] to experts (int32) and weights (float32), both [num_rows, top_k].

    Experts are in order of decreasing weight; of equal ones the lowest is first. `most_rows`: the most rows per
    program. A row's weights have the same bits only for the same number of rows per program. The kernel supports only
    plain routing. `dtype`: see `Routing.weigh`.
    """
    if not routing.is_plain:
        weights, experts = routing.weigh(logits, dtype)
        return experts.to(torch.int32), weights
    num_rows, num_experts = logits.shape
    assert logits.is_contiguous()
    chosen = logits.new_empty(num_rows, routing.top_k, dtype=torch.int32)
    weights = logits.new_empty(num_rows, routing.top_k, dtype=torch.float32)
    rows = min(
        triton.next_power_of_2(most_rows),
        max(1, ROUTED_ELEMENTS // triton.next_power_of_2(num_experts)),
        MAX_ROUTED_ROWS,
    )
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
    """Sorts pairs by expert, then by index: [num_pairs] int32. Also returns the experts' starts, [num_experts + 1]
    int32.

    `experts`: 0 to num_experts, inclusive. Pairs of experts past the end come last.
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
