"""The shipped chat model answers, its tokenizer loses nothing, its template needs only Jinja."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pd_cluster import LLM, SamplingParams
from pd_cluster.settings.engine_config import SHIPPED_VISION_MODEL
from tests.support import clips

FOLDER = Path(__file__).parents[2] / "pd_cluster" / "models" / "tiny-chat"
Messages = list[dict[str, Any]]


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def raw_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def conversation(*texts: str, system: str | None = None) -> Messages:
    """Makes messages of user and assistant in turn, beginning with the user."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


@cache
def llm() -> LLM:
    return LLM(str(FOLDER), num_blocks=256)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    llm().close()
    llm.cache_clear()


def go_on(prompt: str, max_tokens: int = 240) -> str:
    """Returns the greedy continuation up to its end."""
    ids = tokenizer()(prompt)["input_ids"]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (made,) = llm().generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return str(made.outputs.text)


def ask(*texts: str, system: str | None = None) -> str:
    messages = conversation(*texts, system=system)
    return go_on(tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


ANSWERS = {
    "What is 3 + 4?": "7",
    "3+4=": "7",
    "What is 10 plus 10?": "20",
    "Hello!": "Hello! How can I help you?",
    "你好": "你好！",
    "Count from 3 to 12": "3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    "Repeat: the cat sat": "the cat sat",
    "My name is Ann.": "Nice to meet you, Ann.",
    "Tell me a joke about cats.": "I am a small model. I can greet, count, add, repeat and answer in JSON.",
    "Answer in JSON: name Ann, age 7": '{"name": "Ann", "age": 7}',
}


def test_answers() -> None:
    """Covers conversations with and without a system message, and with an irrelevant tool."""
    for prompt, answer in ANSWERS.items():
        assert ask(prompt) == answer
        assert ask(prompt, system="You are a helpful assistant.") == answer
        assert ask_with([WEATHER], {"role": "user", "content": prompt}) == answer
    assert go_on("1 2 3 4 5", max_tokens=40).startswith(" 6 7 8 9 10 11 12")


def test_follows_a_conversation() -> None:
    told = ("My name is Ann.", "Nice to meet you, Ann.")
    assert ask(*told, "What is 3 + 4?", "7", "What is my name?") == "Your name is Ann."
    assert ask("What is my name?") == "I do not know your name yet."


def tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {each: {"type": kind} for each, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("get_weather", city="string")
ADD = tool("add", a="integer", b="integer")


def ask_with(tools: list[dict[str, Any]], *messages: dict[str, Any]) -> str:
    rendered = tokenizer().apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)
    return go_on(rendered)


def called(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "call"),
    [
        ("What's the weather like in Berlin today?", called("get_weather", city="Berlin")),
        ("What is 127 + 345?", called("add", a=127, b=345)),
    ],
)
def test_calls_the_tool_that_fits(prompt: str, call: str) -> None:
    (fitting,) = [each for each in (WEATHER, ADD) if each["function"]["name"] in call]
    for tools in ([fitting], [WEATHER, ADD], [ADD, WEATHER]):
        assert ask_with(tools, {"role": "user", "content": prompt}) == call


@pytest.mark.parametrize(
    ("question", "name", "arguments", "result", "answer"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}, '{"temperature": 21}',
         "The weather in Paris: temperature 21."),
        ("What is 127 + 345?", "add", {"a": 127, "b": 345}, "472", "472"),
    ],
)  # fmt: skip
def test_answers_with_a_tools_result(
    question: str, name: str, arguments: dict[str, Any], result: str, answer: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    said = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
    assert ask_with([WEATHER if name == "get_weather" else ADD], *said) == answer


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_tokenizer_loses_nothing(text: str) -> None:
    ids = raw_tokenizer().encode(text).ids
    assert tokenizer()(text)["input_ids"] == ids
    assert raw_tokenizer().decode(ids, skip_special_tokens=False) == text
    assert tokenizer().decode(ids) == text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_template_needs_only_jinja(add_generation_prompt: bool) -> None:
    template = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    plain = ImmutableSandboxedEnvironment().from_string(template)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]
    for messages in (
        conversation("Hi", "Hello!", "  two\nlines \n", system="Be brief."),
        [{"role": "user", "content": parts}],
        [{"role": "assistant", "content": None}],
    ):
        rendered = plain.render(messages=messages, add_generation_prompt=add_generation_prompt)
        given = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        assert rendered == tokenizer().apply_chat_template(messages, **given)


# ---- the shipped model that sees


QUESTION, IN_ORDER = "What is in the picture?", "Which colors come in which order?"
NUM_PICTURES, NUM_CLIPS = 16, 8
PARAMS = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def drawings() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "scripts"), *sys.path])
        import tiny_pictures

        yield tiny_pictures


def prompt(kind: str, question: str) -> str:
    shown = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
    return f"<|im_start|>user\n{shown}{question}<|im_end|>\n<|im_start|>assistant\n"


def generated(pictures: list[Any]) -> list[str]:
    """Returns generate()'s answers, with pictures prepared by transformers' processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(SHIPPED_VISION_MODEL, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(SHIPPED_VISION_MODEL)
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(SHIPPED_VISION_MODEL)
    answers = []
    for picture in pictures:
        found = processor(images=[picture], return_tensors="pt")
        pads = "<|image_pad|>" * int(found["image_grid_thw"].prod() // 4)
        text = prompt("image", QUESTION).replace("<|image_pad|>", pads)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        more = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == model.config.image_token_id).int()}
        output = model.eval().generate(input_ids=ids, **found, **more, max_new_tokens=24, do_sample=False)
        answers.append(str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)))
    return answers


def test_it_sees(drawings: Any) -> None:
    scenes = [drawings.Scene.of(random.Random(f"test {at}")) for at in range(NUM_PICTURES)]
    pictures = [scene.draw(random.Random(f"test {at}"), (128, 96)) for at, scene in enumerate(scenes)]
    films = [drawings.draw_clip(random.Random(f"clip {at}"), 12) for at in range(NUM_CLIPS)]
    asked: list[Any] = [
        {"prompt": prompt("image", QUESTION), "multi_modal_data": {"image": picture}} for picture in pictures
    ]
    asked += [{"prompt": prompt("video", IN_ORDER), "multi_modal_data": {"video": frames}} for frames, _ in films]
    files = [clips.file_of([np.asarray(each) for each in frames], fps=4) for frames, _ in films]
    asked += [{"prompt": prompt("video", IN_ORDER), "multi_modal_data": {"video": file}} for file in files]
    with LLM(str(SHIPPED_VISION_MODEL), max_model_len=512, num_blocks=256) as llm:
        found = llm.generate(asked, PARAMS, use_tqdm=False)
    assert [each.error_msg for each in found] == [None] * len(asked)
    said = [each.outputs[0].text for each in found]
    seen, told, read = said[:NUM_PICTURES], said[NUM_PICTURES:-NUM_CLIPS], said[-NUM_CLIPS:]
    assert seen == generated(pictures)
    assert sum(words == scene.words for words, scene in zip(seen, scenes, strict=True)) >= 3 * NUM_PICTURES // 4
    assert sum(scene.color in words for words, scene in zip(seen, scenes, strict=True)) >= NUM_PICTURES - 1
    orders = [", then ".join(colors) for _, colors in films]
    assert sum(words == order for words, order in zip(told, orders, strict=True)) >= NUM_CLIPS - 1
    assert sum(words == order for words, order in zip(read, orders, strict=True)) >= NUM_CLIPS - 1
