"""--try-unlisted: types that transformers has and no list, served if more of a proof holds, refused with the reason."""

from __future__ import annotations

import dataclasses
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import LLM
from pd_cluster.errors import ModelError
from pd_cluster.model.attention import sdpa
from pd_cluster.model.layers import packing
from pd_cluster.model.trial import Lengths
from pd_cluster.numerics import RopeScaling
from pd_cluster.types import Sampling
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.unlisted import FAILED, SERVED, make

GREEDY = Sampling(max_tokens=20, temperature=0.0)
LENGTHS = (1, 2, 16, 17, 40, 41, 100, 70)
QUICK = ("helium", "mellum")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SERVED]


@pytest.mark.parametrize("architecture", ALL)
def test_one_that_may_be_tried(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, all in one batch; then again from the prefix cache."""
    folder = make(tmp_path, architecture, monkeypatch)
    core = make_core(
        folder, block_size=16, max_num_batched_tokens=40, num_blocks=96, try_unlisted=("falcon", architecture)
    )
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    for _ in range(2):
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


def test_the_flag_is_needed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, "helium", monkeypatch)
    with pytest.raises(ModelError, match=r"'helium' is not supported: .*; --try-unlisted helium serves it as unproven"):
        make_core(folder)
    with pytest.raises(ModelError, match="try_unlisted helium serves it as unproven"):
        LLM(str(folder))
    with LLM(str(folder), try_unlisted=["helium"], num_blocks=64) as llm:
        assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs


@pytest.mark.parametrize("architecture", FAILED)
def test_one_that_fails_the_proof(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, architecture, monkeypatch)
    why = f"^--try-unlisted {architecture}: the proof at load failed: .*{FAILED[architecture][1]}"
    with pytest.raises(ModelError, match=why):
        make_core(folder, num_blocks=512, try_unlisted=(architecture,))


def test_ranks_that_share_it_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.ranks import ranks

    folder = make(tmp_path, "helium", monkeypatch)
    with (
        pytest.raises(ModelError, match="--tensor-parallel-size 2: no proof would see a wrong split; use 1"),
        ranks(folder, 2, num_blocks=64, try_unlisted=("helium",)),
    ):
        pass


# ---- lengths


def test_what_changes_beyond_a_length_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that is right in 12 tokens, with windows shortened to 3, and wrong beyond a window of 100."""
    folder = make(tmp_path, "mellum", monkeypatch, sliding_window=100)
    attend = sdpa.write_and_attend

    def careless(*arguments: Any) -> torch.Tensor:
        window = arguments[-1].sliding_window
        forgotten = {"sliding_window": None} if window == 100 else {}
        return attend(*arguments[:-1], dataclasses.replace(arguments[-1], **forgotten))

    make_core(folder, num_blocks=64, try_unlisted=("mellum",))
    monkeypatch.setattr(sdpa, "write_and_attend", careless)
    with pytest.raises(ModelError, match="mellum: beyond sliding_window 100 the logits differ from transformers' own"):
        make_core(folder, num_blocks=64, try_unlisted=("mellum",))
    make_core(folder, num_blocks=64, try_unlisted=("mellum",), max_model_len=100)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_positions_by_length(
    tmp_path: Path, rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With --max-model-len beyond the trained length, the proof runs there, too."""
    folder = make(tmp_path, "helium", monkeypatch, rope_parameters=rope, max_position_embeddings=128)
    length = 128 if rope["rope_type"] == "dynamic" else 64
    with caplog.at_level(logging.WARNING, "pd_cluster"):
        make_core(folder, num_blocks=64, try_unlisted=("helium",), max_model_len=length)
        make_core(folder, num_blocks=64, try_unlisted=("helium",), max_model_len=2 * length)
    proven = [message for message in caplog.messages if "proven at load" in message]
    assert [str(length) in message for message in proven] == [False, True]
    monkeypatch.setattr(RopeScaling, "length", lambda self, num_tokens: 0)
    with pytest.raises(ModelError, match=f"helium: beyond .* {length} the logits differ from transformers' own"):
        make_core(folder, num_blocks=64, try_unlisted=("helium",), max_model_len=2 * length)


class Settings:
    """A config with three lengths."""

    num_attention_heads = 4

    def to_dict(self) -> dict[str, Any]:
        rope = {"original_max_position_embeddings": 16384}
        return {"sliding_window": 64, "block_size": 4096, "rope_parameters": rope}


def test_lengths_within_the_work_that_a_load_may_cost() -> None:
    small = Lengths.of(Settings(), 1_000_000, 32768, "cpu", RopeScaling())
    assert (list(small.proven), list(small.skipped)) == ([64, 4096], [16384])  # its scores are too large
    large = Lengths.of(Settings(), 8_000_000_000, 32768, "cpu", RopeScaling())
    assert (list(large.proven), list(large.skipped)) == ([64], [4096, 16384])
    assert list(Lengths.of(Settings(), 8_000_000_000, 32768, "cuda", RopeScaling()).proven) == [64, 4096]
    short = Lengths.of(Settings(), 1_000_000, 4096, "cpu", RopeScaling())
    assert (list(short.proven), list(short.skipped)) == ([64], [])


def test_packing_that_changes_a_module_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof runs packed modules on both sides, so they are held against the model's own before."""
    folder = make(tmp_path, "helium", monkeypatch)
    pack = packing.pack_modules

    def careless(model: torch.nn.Module) -> int:
        with torch.no_grad():
            model.model.norm.weight.mul_(torch.linspace(0.5, 1.5, 64))  # type: ignore[union-attr, operator]
        return pack(model)

    monkeypatch.setattr("pd_cluster.model.trial.pack_modules", careless)
    with pytest.raises(ModelError, match="helium: with packed modules the logits differ"):
        make_core(folder, num_blocks=64, try_unlisted=("helium",))
