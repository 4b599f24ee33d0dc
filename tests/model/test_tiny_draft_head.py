"""The shipped draft head is complete, and its acceptance rate for the shipped chat model matches its card."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support.eagle3_eager import EagerEagle3

FOLDER = SHIPPED_MODEL.with_name("tiny-chat-eagle3")
QUESTIONS = ("Count from 3 to 12", "Repeat: the fox sings", "Tell me a joke about rain.")
NUM_DRAFTS, TAPS = 4, [1, 2, 3]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "scripts"), *sys.path])
        import draft_head_answers
        import draft_head_eval
        import draft_head_model

        yield SimpleNamespace(answers=draft_head_answers, eval=draft_head_eval, model=draft_head_model)


def test_its_files_fit_the_model_and_a_megabyte() -> None:
    sizes = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert sorted(sizes) == ["README.md", "config.json", "model.safetensors"]
    assert sum(sizes.values()) <= 1_000_000
    config, target = (json.loads((each / "config.json").read_text("utf-8")) for each in (FOLDER, SHIPPED_MODEL))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    for field in ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size", "rope_parameters"):
        assert config[field] == target[field]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == TAPS
    tensors = load_file(FOLDER / "model.safetensors")
    assert not any("embed" in name for name in tensors)
    ids = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert f"{sizes['model.safetensors']:,} bytes" in (FOLDER / "README.md").read_text("utf-8")


def foreseen(head: EagerEagle3, tapped: list[torch.Tensor], ids: list[int], start: int) -> list[int]:
    """For each of ids[start:-1], returns how many drafts after it are right, up to the first wrong one."""
    states, found = head.project(tapped), []
    for stop in range(start + 1, len(ids)):
        drafts, _ = head.drafts(ids[:stop], states[: stop - 1], NUM_DRAFTS)
        pairs = zip(drafts, ids[stop:], strict=False)
        found.append([*(draft == token_id for draft, token_id in pairs), False].index(False))
    return found


@torch.no_grad()
def test_it_foresees_answers_as_its_format_says(scripts: Any) -> None:
    target = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype="float32").eval()
    tokenizer, head = Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json")), scripts.model.Eagle3Head.load(FOLDER)
    reference, places = EagerEagle3(FOLDER, SHIPPED_MODEL), list[int]()
    for question in QUESTIONS:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        sequence = scripts.answers.Sequence(tokenizer.encode(prompt).ids)
        scripts.answers.answer(target, [sequence])
        ((start, _),) = sequence.answers
        found = scripts.eval.num_foreseen(head, target, sequence.ids, start)
        hidden = target(torch.tensor([sequence.ids]), output_hidden_states=True).hidden_states
        assert found == foreseen(reference, [hidden[layer][0] for layer in TAPS], sequence.ids, start)
        places += found
    assert len(places) > 50
    assert sum(each > 0 for each in places) >= 0.6 * len(places)


@pytest.mark.slow
def test_its_card_says_what_an_evaluation_gives(scripts: Any) -> None:
    *_, score = scripts.eval.evaluate(SHIPPED_MODEL, FOLDER)
    *_, row = (FOLDER / "README.md").read_text("utf-8").splitlines()
    told, given = (
        [float(each.strip(" %")) for each in cells[1:]] for cells in (row.strip("| ").split("|"), score.cells())
    )
    assert score.acceptance >= 0.6
    assert told == pytest.approx(given, rel=0.01)  # a near tie in 10,000 tokens may go another way on another processor
