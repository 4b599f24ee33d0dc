"""The scripted checkpoint says its scripts, in transformers and in the engine, and by a wide margin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from pd_cluster.types import Sampling
from tests.support.engines import generate, make_core
from tests.support.scripted_model import MAX_POSITIONS
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
def test_the_engine_says_the_scripts(made: Callable[[str], Path], name: str) -> None:
    tokenizer, prompts = prompts_of(made(name), name)
    core = make_core(made(name), max_model_len=MAX_POSITIONS, num_blocks=1200)
    outputs = generate(core, prompts, Sampling(max_tokens=255, temperature=1.0, seed=7))
    said = [tokenizer.decode(output, skip_special_tokens=False) for output in outputs]
    assert said == [f"{answer}<eos>" for answer in FAMILIES[name].answers.values()]
