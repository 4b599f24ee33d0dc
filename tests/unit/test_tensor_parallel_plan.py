"""Each rank's share of a weight; together the ranks read all of it, and replicate only on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from pd_cluster.checkpoints.tensor_layouts import WeightFolder
from pd_cluster.checkpoints.weight_files import weight_files
from pd_cluster.errors import ModelError
from pd_cluster.model.layers.linear_weight import PlainWeight, WeightForm, WeightPart
from pd_cluster.model.parallel.parallel_plan import ParallelPlan
from pd_cluster.model.parallel.rank_tensors import RankTensors
from pd_cluster.model.parallel.weight_slices import read_shard
from pd_cluster.model.weights.weight_forms import FORMS

CONFIG: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": None,
}
LAYER = "model.layers.0"


def read_all(tmp_path: Path, config: Any, key: str, shape: tuple[int, ...], size: int) -> list[torch.Tensor]:
    """Returns each rank's part of a tensor with distinct elements."""
    save_file({key: whole(shape)}, tmp_path / "model.safetensors")
    return [
        read_shard(WeightFolder(tmp_path), RankTensors(ParallelPlan(config, size), rank))[key] for rank in range(size)
    ]


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "lm_head.weight"])
def test_the_vocabulary_is_padded_to_equal_shares(tmp_path: Path, key: str) -> None:
    shares = read_all(tmp_path, transformers.LlamaConfig(**CONFIG), key, (10, 16), 4)
    assert {tuple(share.shape) for share in shares} == {(3, 16)}
    assert torch.equal(torch.cat(shares)[:10], whole((10, 16)))
    assert int(torch.cat(shares)[10:].abs().sum()) == 0


def test_norms_are_whole_but_for_those_over_all_heads_which_are_split_like_them(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**CONFIG)
    for norm, shape in (("input_layernorm", (16,)), ("self_attn.q_norm", (4,))):
        shares = read_all(tmp_path, config, f"{LAYER}.{norm}.weight", shape, 2)
        assert all(torch.equal(share, whole(shape)) for share in shares)
    shares = read_all(tmp_path, transformers.Olmo2Config(**CONFIG), f"{LAYER}.self_attn.k_norm.weight", (8,), 4)
    assert [share.tolist() for share in shares] == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]


def test_packed_projections_are_split_part_by_part(tmp_path: Path) -> None:
    config = transformers.Phi3Config(**CONFIG)
    shares = read_all(tmp_path, config, f"{LAYER}.self_attn.qkv_proj.weight", (32, 16), 2)
    rows = whole((32, 16))
    assert torch.equal(shares[0], torch.cat([rows[0:8], rows[16:20], rows[24:28]]))
    assert torch.equal(shares[1], torch.cat([rows[8:16], rows[20:24], rows[28:32]]))
    shares = read_all(tmp_path, config, f"{LAYER}.mlp.gate_up_proj.weight", (48, 16), 2)
    rows = whole((48, 16))
    assert torch.equal(shares[1], torch.cat([rows[12:24], rows[36:48]]))


def test_experts_are_split_and_their_router_is_whole(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**CONFIG)
    half, every = slice(12, 24), slice(None)
    for name, shape, pieces in (
        ("block_sparse_moe.experts.1.w1.weight", (24, 16), (half, every)),
        ("mlp.experts.down_proj", (2, 16, 24), (every, every, half)),
        ("block_sparse_moe.gate.weight", (2, 16), (every, every)),
    ):
        assert torch.equal(read_all(tmp_path, config, f"{LAYER}.{name}", shape, 2)[1], whole(shape)[pieces])


def test_a_bias_that_is_added_to_a_sum_is_added_once(tmp_path: Path) -> None:
    config = transformers.Starcoder2Config(**CONFIG)
    shares = read_all(tmp_path, config, f"{LAYER}.mlp.c_proj.bias", (16,), 2)
    assert torch.equal(shares[0], whole((16,)))
    assert int(shares[1].abs().sum()) == 0


def test_a_style_that_is_not_known_is_refused() -> None:
    config = transformers.LlamaConfig(**CONFIG)
    config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "sequence_parallel"}
    with pytest.raises(ModelError, match="unknown style sequence_parallel"):
        ParallelPlan(config, 2)


def test_an_index_names_the_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    assert [file.stem for file in weight_files(tmp_path)] == ["a", "b", "c"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "c.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}')
    assert [file.stem for file in weight_files(tmp_path)] == ["a", "c"]
    index.write_text("{")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: cannot be read"):
        list(weight_files(tmp_path))


def test_another_form_of_weight_is_cut_by_its_own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"words": WeightPart(outputs=1, inputs=0), "scales": WeightPart(outputs=0, inputs=None)}
    monkeypatch.setitem(FORMS, "another", WeightForm(parts, PlainWeight))
    for name, shape, dim in (
        ("k_proj.words", (16, 8), 1),  # stored transposed
        ("o_proj.words", (16, 16), 0),
        ("k_proj.scales", (8,), 0),
        ("o_proj.scales", (16,), None),  # scales of output features, which every rank has
    ):
        found = read_all(tmp_path, transformers.LlamaConfig(**CONFIG), f"{LAYER}.self_attn.{name}", shape, 2)
        expected = [whole(shape)] * 2 if dim is None else whole(shape).chunk(2, dim)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


STATES: dict[str, Any] = {**CONFIG, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 3}


def test_a_key_head_goes_with_its_value_heads(tmp_path: Path) -> None:
    """With two key heads of two value heads each, the third of four ranks has the second key and third value head."""
    config = transformers.Qwen3NextConfig(**STATES, **DELTA)
    config.layer_types = STATES["layer_types"]
    # A key head has 26 rows: q and k of 3, two value heads of 5, and their gates.
    for name, num_rows, rows in (
        ("in_proj_qkvz.weight", 52, [*range(26, 32), *range(32, 37), *range(42, 47)]),
        ("in_proj_ba.weight", 8, [4, 6]),
        ("conv1d.weight", 32, [*range(3, 6), *range(9, 12), *range(22, 27)]),
        ("dt_bias", 4, [2]),
        ("A_log", 4, [2]),
        ("norm.weight", 5, range(5)),
    ):
        shape = (num_rows,) if num_rows < 6 else (num_rows, 1, 4) if name == "conv1d.weight" else (num_rows, 16)
        found = read_all(tmp_path, config, f"{LAYER}.linear_attn.{name}", shape, 4)[2]
        assert torch.equal(found, whole(shape)[list(rows)]), name
    found = read_all(tmp_path, config, f"{LAYER}.linear_attn.out_proj.weight", (16, 20), 4)[2]
    assert torch.equal(found, whole((16, 20))[:, 10:15])


def test_the_parts_of_mamba_are_cut_apart(tmp_path: Path) -> None:
    """Gates, x and steps are divided by heads; two of four ranks share a group's B and C."""
    config = transformers.GraniteMoeHybridConfig(**STATES, **MAMBA)
    x, b, c, steps = range(48, 56), range(67, 70), range(73, 76), (80, 81)  # 32 rows of gates, 32 of x, 6 of B, 6 of C
    shares = read_all(tmp_path, config, f"{LAYER}.mamba.in_proj.weight", (84, 16), 4)
    assert torch.equal(shares[2], whole((84, 16))[[*range(16, 24), *x, *b, *c, *steps]])
    shares = read_all(tmp_path, config, f"{LAYER}.mamba.conv1d.bias", (44,), 4)
    assert shares[2].tolist() == [*range(16, 24), *range(35, 38), *range(41, 44)]
    local = ParallelPlan(config, 4).local_config()
    assert (local.mamba_n_heads, local.mamba_n_groups, int(local.mamba_expand * local.hidden_size)) == (2, 1, 8)
    attention = read_all(tmp_path, config, "model.layers.1.self_attn.o_proj.weight", (16, 16), 4)[2]
    assert torch.equal(attention, whole((16, 16))[:, 8:12])
    experts = read_all(tmp_path, config, f"{LAYER}.block_sparse_moe.input_linear.weight", (2, 48, 16), 4)[2]
    assert torch.equal(experts, whole((2, 48, 16))[:, [*range(12, 18), *range(36, 42)]])


def test_channels_of_short_convolutions_are_cut_in_whole_heads_of_the_pool(tmp_path: Path) -> None:
    sizes = {**STATES, "hidden_size": 64, "layer_types": ["conv", "full_attention"]}
    config = transformers.Lfm2Config(**sizes, block_auto_adjust_ff_dim=True, block_multiple_of=8)
    shares = read_all(tmp_path, config, f"{LAYER}.conv.in_proj.weight", (192, 64), 2)
    assert torch.equal(shares[1], whole((192, 64))[[*range(32, 64), *range(96, 128), *range(160, 192)]])
    local = ParallelPlan(config, 2).local_config()
    assert (local.intermediate_size, local.block_auto_adjust_ff_dim) == (8, False)  # 24 * 2 / 3 = 16
    with pytest.raises(ModelError, match="64 channels of convolutions cannot be split by multiples of 16"):
        ParallelPlan(config, 8)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 4}, 8, "4 heads of states cannot be split evenly"),
        (
            {"mamba_n_heads": 12, "mamba_n_groups": 3},
            2,
            "3 heads of conv_b in states can be neither split evenly over 2",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(changes: dict[str, int], size: int, message: str) -> None:
    sizes = {**MAMBA, **changes}
    expand = sizes["mamba_n_heads"] * sizes["mamba_d_head"] // 16
    config = transformers.GraniteMoeHybridConfig(**STATES, **sizes, mamba_expand=expand)
    with pytest.raises(ModelError, match=f"--tensor-parallel-size {size}: {message}"):
        ParallelPlan(config, size)
