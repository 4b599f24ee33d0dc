"""Each rank's share of a weight: together the ranks read all of it, with deliberate replication only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from pd_cluster.checkpoints.layouts import WeightFolder
from pd_cluster.checkpoints.weight_files import weight_files
from pd_cluster.errors import ModelError
from pd_cluster.model.known_forms import FORMS
from pd_cluster.model.layers.weight import Part, PlainWeight, WeightForm
from pd_cluster.model.parallel.plan import ParallelPlan
from pd_cluster.model.parallel.shard import read_shard

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
    """Returns each rank's part of a tensor whose elements are all different."""
    save_file({key: whole(shape)}, tmp_path / "model.safetensors")
    return [read_shard(WeightFolder(tmp_path), ParallelPlan(config, size), rank)[key] for rank in range(size)]


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
    parts = {"words": Part(outputs=1, inputs=0), "scales": Part(outputs=0, inputs=None)}
    monkeypatch.setitem(FORMS, "another", WeightForm(parts, PlainWeight))
    for name, shape, dim in (
        ("k_proj.words", (16, 8), 1),  # stored the other way round
        ("o_proj.words", (16, 16), 0),
        ("k_proj.scales", (8,), 0),
        ("o_proj.scales", (16,), None),  # of output features, which every rank has
    ):
        found = read_all(tmp_path, transformers.LlamaConfig(**CONFIG), f"{LAYER}.self_attn.{name}", shape, 2)
        expected = [whole(shape)] * 2 if dim is None else whole(shape).chunk(2, dim)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
