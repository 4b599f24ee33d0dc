"""The scripted checkpoint says its scripts, in transformers and in the engine, and by a wide margin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pd_cluster.types import Sampling
from tests.support.checkpoints import EOS_ID
from tests.support.engines import generate, make_core
from tests.support.scripted_model import MAX_POSITIONS, pad_to
from tests.support.scripted_scenarios import FAMILIES

ASK = [{"role": "user", "content": "Is it sunny?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
LEAST_MARGIN = 10.0

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = FAMILIES[name].make(tmp_path_factory.mktemp(name))
        return folders[name]

    return make


def prompts_of(folder: Path, name: str) -> tuple[Any, list[list[int]]]:
    """The family's tokenizer, and for each scenario the prompt that brings it about."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = []
    for scenario in FAMILIES[name].answers:
        messages = FAMILIES[name].ask(folder, scenario, ASK, tools=TOOLS)
        text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return tokenizer, prompts


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_says_the_scripts(made: Callable[[str], Path], name: str) -> None:
    tokenizer, prompts = prompts_of(made(name), name)
    model = transformers.AutoModelForCausalLM.from_pretrained(made(name)).eval()
    for prompt, expected in zip(prompts, FAMILIES[name].answers.values(), strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=255,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        *said, end = output.sequences[0, len(prompt) :].tolist()
        assert (tokenizer.decode(said, skip_special_tokens=False), end) == (expected, EOS_ID)
        for logits in output.logits:
            best, second = logits[0].topk(2).values.tolist()
            assert best - second > LEAST_MARGIN


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_says_the_scripts(made: Callable[[str], Path], name: str) -> None:
    tokenizer, prompts = prompts_of(made(name), name)
    core = make_core(made(name), max_model_len=MAX_POSITIONS, num_blocks=1200)
    outputs = generate(core, prompts, Sampling(max_tokens=255, temperature=1.0, seed=7))
    said = [tokenizer.decode(output, skip_special_tokens=False) for output in outputs]
    assert said == [f"{answer}<eos>" for answer in FAMILIES[name].answers.values()]


def test_marks_are_one_token_and_only_special_ones_can_be_skipped(made: Callable[[str], Path]) -> None:
    for name, family in FAMILIES.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(made(name))
        for mark in (*family.special_tokens, *family.added_tokens):
            ids = tokenizer.encode(mark, add_special_tokens=False)
            assert len(ids) == 1
            shown = "" if mark in family.special_tokens else mark
            assert tokenizer.decode(ids, skip_special_tokens=True) == shown


def test_a_prompt_is_padded_to_the_token(made: Callable[[str], Path]) -> None:
    folder = made("qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    conversation = [*ASK, {"role": "assistant", "content": "Ja, größtenteils ☀"}, *ASK]
    lengths = []
    for variables in ({}, {"tools": TOOLS}, {"enable_thinking": False}):
        padded = pad_to(folder, conversation, 900, **variables)
        assert padded[:2] == conversation[:2]
        text = tokenizer.apply_chat_template(padded, add_generation_prompt=True, tokenize=False, **variables)
        lengths.append(len(tokenizer.encode(text, add_special_tokens=False)))
    assert lengths == [900] * 3
    with pytest.raises(ValueError, match="already"):
        pad_to(folder, conversation, 20)
