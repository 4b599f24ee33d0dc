"""The grouped experts under Triton's interpreter, against `fuse.Experts` and transformers' sparse blocks."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pd_cluster.model.kernels.cuda.experts import grouped_experts as module
from pd_cluster.model.kernels.cuda.experts.grouped_experts import (
    TritonGroupedExperts,
    num_row_tiles,
    route,
    sort_pairs,
    tiling,
)
from pd_cluster.model.language_model.architecture_quirks import ARCHITECTURES
from pd_cluster.model.language_model.fuse_mlp import _experts
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertLayers, ExpertWeights, experts_of
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter, Experts, Routing
from pd_cluster.model.layers.ops import TorchOps
from pd_cluster.settings.engine_config import ExpertPlacement
from tests.support.expert_shares import Members, rows_without, weights_of
from tests.support.interpreted import DTYPES, choose_device

choose_device()


def mixtral(hidden_size: int, num_features: int, num_experts: int, top_k: int, act: str = "silu") -> Any:
    config = MixtralConfig(
        hidden_size=hidden_size,
        intermediate_size=num_features,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        hidden_act=act,
    )
    return filled(MixtralSparseMoeBlock(config))


def grouped_of(block: Any, activation: Activation) -> TritonGroupedExperts:
    return TritonGroupedExperts.of(ExpertRouter.of(block), experts_of(block.experts), activation)


def copied(block: Any) -> TritonGroupedExperts:
    """Copies the block first, because `expected_of` converts its weights to float64."""
    return grouped_of(copy.deepcopy(block), "silu")


def filled(block: Any) -> Any:
    for parameter in block.parameters():
        parameter.data.normal_(std=0.2)
    return block.eval()


def expected_of(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes transformers' block in float64, except for the choice of experts, which uses the dtype under test."""
    with torch.no_grad():
        _, weights, chosen = block.gate(x)
        experts = block.experts.double()
        result: torch.Tensor = experts(x.double(), chosen, weights.double())
    return result


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_of_sigmoids_biases_and_groups(dtype: torch.dtype) -> None:
    """The router's product is float32 even for 16-bit models, as in transformers."""
    config = Glm4MoeConfig(
        hidden_size=64, moe_intermediate_size=48, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2,
        routed_scaling_factor=1.5,
    )  # fmt: skip
    block = filled(Glm4MoeMoE(config))
    block.gate.e_score_correction_bias.normal_(-1.5, 0.2)
    block, x = block.to(dtype), torch.randn(9, 64).to(dtype)
    block.gate.float()  # as transformers keeps it
    assert_near(grouped_of(block, "silu")(x), expected_of(block, x), dtype)


@pytest.mark.parametrize(
    ("num_rows", "hidden_size", "num_features", "num_experts", "top_k", "dtype"),
    [
        (1, 64, 48, 8, 2, torch.bfloat16),
        (5, 80, 72, 4, 1, torch.float16),
        (33, 48, 16, 6, 3, torch.float32),
        (7, 32, 200, 5, 5, torch.bfloat16),
    ],
)
def test_experts_are_those_of_transformers(
    num_rows: int, hidden_size: int, num_features: int, num_experts: int, top_k: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_rows)
    block = mixtral(hidden_size, num_features, num_experts, top_k).to(dtype)
    x, grouped = torch.randn(num_rows, hidden_size).to(dtype), copied(block)
    assert_near(grouped(x), expected_of(block, x), dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_experts_are_those_of_the_fused_model(activation: Activation) -> None:
    torch.manual_seed(1)
    name = "silu" if activation == "silu" else "gelu_pytorch_tanh"
    block, other = (mixtral(64, 96, 8, 2, name) for _ in range(2))
    other.load_state_dict(block.state_dict())
    x = torch.randn(20, 64)
    expected = Experts(ExpertRouter.of(other), ExpertLayers(experts_of(other.experts)), TorchOps(), activation)(x)
    grouped = grouped_of(block, activation)
    assert_near(grouped(x), expected.double(), torch.float32)


@pytest.mark.parametrize(("dtype", "renormalise"), [(torch.bfloat16, True), (torch.float32, False)])
def test_other_architectures_route_in_their_own_way(dtype: torch.dtype, renormalise: bool) -> None:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": renormalise}
    blocks = [
        Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, moe_intermediate_size=40)),
        OlmoeSparseMoeBlock(OlmoeConfig(**sizes, intermediate_size=40)),
    ]
    x = torch.randn(9, 32).to(dtype)
    for block in blocks:
        filled(block).to(dtype)
        logits, weights, chosen = block.gate(x)
        actual_chosen, actual_weights = route(logits.detach(), ExpertRouter.of(block).routing)
        assert actual_chosen.tolist() == chosen.tolist()
        assert (actual_weights - weights.float()).abs().max() <= (1e-6 if dtype == torch.float32 else 4e-3)
        assert torch.equal(actual_weights.to(dtype).float(), actual_weights)
        expected = expected_of(block, x)
        block.to(dtype)
        assert_near(grouped_of(block, "silu")(x), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_with_biases_and_limited_gates_are_those_of_gpt_oss(dtype: torch.dtype) -> None:
    """Also checks the fused model. transformers' weights are a softmax over the chosen experts only."""
    torch.manual_seed(6)
    config = GptOssConfig(hidden_size=48, intermediate_size=40, num_local_experts=6, num_experts_per_tok=3)
    block: Any = filled(GptOssMLP(config))
    for parameter in block.parameters():
        parameter.data.mul_(5)  # exceeds the gate's limits
    block = block.to(dtype)
    x = torch.randn(9, 48).to(dtype)
    _, weights, chosen = block.router(x)
    expected = copy.deepcopy(block.experts).double()(x.double(), chosen, weights.double()).detach()
    experts = _experts(block, ARCHITECTURES["GptOssForCausalLM"])
    if dtype == torch.float32:
        assert_near(
            Experts(ExpertRouter.of(block, "router"), ExpertLayers(experts), TorchOps(), "swigluoai")(x),
            expected,
            dtype,
        )
    assert_near(TritonGroupedExperts.of(ExpertRouter.of(block, "router"), experts, "swigluoai")(x), expected, dtype)


def test_equal_logits_choose_the_lowest_experts() -> None:
    chosen, weights = route(torch.zeros(3, 6), Routing(4))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.tolist() == [[0.25] * 4] * 3


def test_experts_without_any_weight_are_chosen_once() -> None:
    """Experts whose weight is exactly 0 fill up the choice to top_k, each at most once."""
    chosen, weights = route(torch.tensor([[-500.0, 500.0, -500.0, -500.0]]), Routing(3))
    assert chosen.tolist() == [[1, 0, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def test_a_row_of_nan_hurts_only_itself() -> None:
    torch.manual_seed(3)
    block = mixtral(32, 32, 4, 2)
    grouped = grouped_of(block, "silu")
    x = torch.randn(6, 32)
    expected = grouped(x)
    x[2] = float("nan")
    x[4, 7] = float("inf")
    actual = grouped(x)
    fine = [0, 1, 3, 5]
    assert_near(actual[fine], expected[fine].double(), torch.float32)
    assert actual[[2, 4]].isnan().any(1).all()


@pytest.mark.parametrize("chosen", [[3, 3, 3, 3, 3], [0, 4, 0, 4, 0], [4] * 70, [2] * 64 + [0] * 64])
def test_experts_without_rows_and_experts_with_all(chosen: list[int]) -> None:
    pairs = torch.tensor(chosen, dtype=torch.int32)[:, None]
    order, starts = sort_pairs(pairs, torch.arange(6, dtype=torch.int32))
    assert order.tolist() == sorted(range(len(chosen)), key=lambda pair: chosen[pair])
    assert starts.tolist() == [sum(expert < e for expert in chosen) for e in range(6)]


@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (64, 8), (130, 3)])
def test_sorting_is_the_same_on_both_ways(num_experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(top_k)
    chosen = torch.randint(0, num_experts, (5 * top_k, top_k), dtype=torch.int32)
    experts = torch.arange(num_experts + 1, dtype=torch.int32)
    compared = sort_pairs(chosen, experts)
    monkeypatch.setattr(module, "MAX_PAIRS_COMPARED", 0)
    for mine, theirs in zip(compared, sort_pairs(chosen, experts), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype == torch.int32


def test_tiles_suffice_however_pairs_are_spread() -> None:
    """The bound on the number of tiles is reached and never exceeded."""
    rng = random.Random(0)
    for _ in range(300):
        num_experts, block_m, num_pairs = rng.randint(1, 9), rng.choice([4, 16]), rng.randint(1, 100)
        most = num_row_tiles(num_pairs, num_experts, block_m)
        weights = [rng.choice([0, 1, 50]) for _ in range(num_experts)]
        drawn = rng.choices(range(num_experts), [*weights[1:], 1], k=num_pairs)
        assert sum(-(-drawn.count(expert) // block_m) for expert in range(num_experts)) <= most
        spread = [1] * (min(num_experts, num_pairs) - 1)
        counts = [*spread, num_pairs - len(spread)]
        assert most - len(counts) < sum(-(-count // block_m) for count in counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tiling_computes_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers experts with rows for several tiles, and row tiles in more than one group."""
    torch.manual_seed(5)
    monkeypatch.setattr(module, "ROW_TILES_TOGETHER", 2)
    block = mixtral(48, 72, 3, 2).to(dtype)
    x, grouped = torch.randn(75, 48).to(dtype), copied(block)
    expected = expected_of(block, x)
    tilings = module.TILINGS_32_BITS if dtype == torch.float32 else module.TILINGS_16_BITS
    for tile in tilings:
        monkeypatch.setattr(module, "tiling", lambda *_, tile=tile: tile)
        assert_near(grouped(x), expected, dtype)


def test_tilings_grow_with_the_rows_of_an_expert() -> None:
    for dtype in DTYPES:
        sizes = [tiling(num_pairs, 8, dtype).block_m for num_pairs in (1, 60, 130, 300, 2000, 100000)]
        assert sizes == sorted(sizes)
        assert sizes[0] == 16


def test_no_rows_at_all() -> None:
    block = mixtral(32, 16, 4, 2)
    assert grouped_of(block, "silu")(torch.empty(0, 32)).shape == (0, 32)


def test_rows_may_be_strided() -> None:
    torch.manual_seed(7)
    grouped = grouped_of(mixtral(32, 16, 4, 2), "silu")
    wide = torch.randn(5, 96)
    assert torch.equal(grouped(wide[:, 32:64]), grouped(wide[:, 32:64].contiguous()))


def gpt_oss(dtype: torch.dtype) -> tuple[ExpertRouter, ExpertWeights]:
    """Returns six experts with biases, which must be added once for any number of ranks."""
    config = GptOssConfig(hidden_size=48, intermediate_size=40, num_local_experts=6, num_experts_per_tok=2)
    block = filled(GptOssMLP(config)).to(dtype)
    return ExpertRouter.of(block, "router"), _experts(block, ARCHITECTURES["GptOssForCausalLM"])


@pytest.mark.parametrize(("placement", "is_deterministic"), [("linear", False), ("round_robin", True)])
def test_shares_of_ranks_add_up_to_the_whole(placement: ExpertPlacement, is_deterministic: bool) -> None:
    """Each rank's part equals that of the CPU's layers; a row routed only to other ranks' experts is exactly 0."""
    torch.manual_seed(8)
    router, weights = gpt_oss(torch.float32)
    whole = Experts(router, ExpertLayers(weights), TorchOps(), "swigluoai")
    shares = [ExpertShare(rank, 2, placement) for rank in range(2)]
    own = [weights_of(weights, share) for share in shares]
    on_cpu = [
        Experts(router, ExpertLayers(each), TorchOps(), "swigluoai", share)
        for each, share in zip(own, shares, strict=True)
    ]
    ranks = [
        TritonGroupedExperts.of(router, each, "swigluoai", share, is_deterministic)
        for each, share in zip(own, shares, strict=True)
    ]
    num_zero = 0
    for num_rows in (1, 3, 33):
        x = torch.randn(num_rows, 48)
        found = [rank(x) for rank in ranks]
        for share, part, expected in zip(shares, found, on_cpu, strict=True):
            assert_near(part, expected(x).double(), torch.float32)
            zero = rows_without(router, share, x)
            assert not part[zero].any()
            assert part[~zero].any(1).all()
            num_zero += int(zero.sum())
        assert_near(sum(found, torch.zeros_like(x)), whole(x).double(), torch.float32)
    assert num_zero > 3


def test_what_is_undefined_never_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of other ranks' experts are never written, and their memory is NaN here. Covers both ways of sorting."""
    torch.manual_seed(9)
    router, weights = gpt_oss(torch.bfloat16)
    share = ExpertShare(1, 2, "round_robin")
    rank = TritonGroupedExperts.of(router, weights_of(weights, share), "swigluoai", share)
    x = torch.randn(20, 48).bfloat16()
    expected = rank(x)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for most in (module.MAX_PAIRS_COMPARED, 0):
            monkeypatch.setattr(module, "MAX_PAIRS_COMPARED", most)
            assert torch.equal(rank(x), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not expected.isnan().any()


def test_members_of_a_unit_compute_their_experts_for_all_rows() -> None:
    """In one step one member has no rows; in the last step none has."""
    torch.manual_seed(10)
    router, weights = gpt_oss(torch.float32)
    whole = Experts(router, ExpertLayers(weights), TorchOps(), "swigluoai")

    def member(share: ExpertShare) -> TritonGroupedExperts:
        return TritonGroupedExperts.of(router, weights_of(weights, share), "swigluoai", share)

    members = Members(member, 3)
    members.step([torch.randn(2, 48)] * 3)  # the step of the check at load
    rows = [torch.randn(num_rows, 48) for num_rows in (3, 0, 5)]
    for x, found in zip(rows, members.step(rows), strict=True):
        if len(x):
            assert_near(found, whole(x).double(), torch.float32)
    assert all(len(found) == 0 for found in members.step([torch.empty(0, 48)] * 3))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU")
def test_a_graph_captures_a_share() -> None:
    torch.manual_seed(11)
    router, weights = gpt_oss(torch.bfloat16)
    share = ExpertShare(0, 2)
    rank = TritonGroupedExperts.of(router, weights_of(weights, share), "swigluoai", share)
    x, graph = torch.randn(8, 48).bfloat16(), torch.cuda.CUDAGraph()
    rank(x)
    with torch.cuda.graph(graph):
        captured = rank(x)
    for _ in range(3):
        x.copy_(torch.randn(8, 48))
        graph.replay()
        assert torch.equal(captured, rank(x))
