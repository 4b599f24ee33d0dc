"""The shipped chat model answers, its tokenizer loses nothing, its template needs only Jinja."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[2] / "pd_cluster" / "models" / "tiny-chat"
Messages = list[dict[str, Any]]


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def raw_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def conversation(*texts: str, system: str | None = None) -> Messages:
    """The texts are said by user and assistant in turn; the user begins."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def go_on(prompt: str, max_tokens: int = 240) -> str:
    """The greedy continuation up to its end."""
    input_ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    made = model().generate(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_tokens, do_sample=False
    )
    return str(tokenizer().decode(made[0, input_ids.shape[1] :], skip_special_tokens=True))


def ask(*texts: str, system: str | None = None) -> str:
    messages = conversation(*texts, system=system)
    return go_on(tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is 3 + 4?", "7"),
        ("3+4=", "7"),
        ("Add 9 and 8.", "17"),
        ("What is 10 plus 10?", "20"),
        ("Hello!", "Hello! How can I help you?"),
        ("How are you?", "I am fine, thank you."),
        ("Thanks!", "You are welcome."),
        ("你好", "你好！"),
        ("Count from 3 to 12", "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"),
        ("Count to 10.", ", ".join(map(str, range(1, 11)))),
        ("Repeat: the cat sat", "the cat sat"),
        ("Say hello world", "hello world"),
        ("My name is Ann.", "Nice to meet you, Ann."),
        ("Tell me a joke about cats.", "I am a small model. I can greet, count, add, repeat and answer in JSON."),
    ],
)
def test_answers(prompt: str, answer: str) -> None:
    assert ask(prompt) == answer
    assert ask(prompt, system="You are a helpful assistant.") == answer


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ("Answer in JSON: name Ann, age 7", {"name": "Ann", "age": 7}),
        ("Give 3 + 4 as JSON", {"result": 7}),
        ("Return a JSON object: city Paris, number 31", {"city": "Paris", "number": 31}),
    ],
)
def test_answers_in_json(prompt: str, value: dict[str, object]) -> None:
    assert json.loads(ask(prompt)) == value


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
        ("What is the weather in Paris?", called("get_weather", city="Paris")),
        ("What's the weather like in Berlin today?", called("get_weather", city="Berlin")),
        ("What is 12 + 30?", called("add", a=12, b=30)),
        ("What is 127 + 345?", called("add", a=127, b=345)),
    ],
)
def test_calls_the_tool_that_fits(prompt: str, call: str) -> None:
    (fitting,) = [each for each in (WEATHER, ADD) if each["function"]["name"] in call]
    for tools in ([fitting], [WEATHER, ADD], [ADD, WEATHER]):
        assert ask_with(tools, {"role": "user", "content": prompt}) == call


def test_the_template_shows_what_a_tool_requires() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "more": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }
    first = {"type": "function", "function": {"name": "first", "parameters": parameters}}
    second = {"type": "function", "function": {"name": "second", "parameters": {**parameters, "required": ["unit"]}}}
    third = {"type": "function", "function": {"name": "third"}}
    rendered = tokenizer().apply_chat_template(
        conversation("Hi", system="Be brief."), tools=[first, second, third], tokenize=False
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.\n<tools>\n"
        '{"name": "first", "arguments": {"city": "string", "days": integer, "unit": "C|F", "more": "string"}}\n'
        '{"name": "second", "arguments": {"unit": "C|F"}}\n'
        '{"name": "third", "arguments": {}}\n'
        "</tools><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_tokenizer_loses_nothing(text: str) -> None:
    ids = raw_tokenizer().encode(text).ids
    assert tokenizer()(text)["input_ids"] == ids
    assert raw_tokenizer().decode(ids, skip_special_tokens=False) == text
    assert tokenizer().decode(ids) == text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        conversation("Hi", "Hello!", "  two\nlines \n", system="Be brief."),
        [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]}],
        [{"role": "assistant", "content": None}],
    ],
)
def test_template_needs_only_jinja(messages: Messages, add_generation_prompt: bool) -> None:
    template = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    plain = ImmutableSandboxedEnvironment().from_string(template)
    assert plain.render(
        messages=messages, add_generation_prompt=add_generation_prompt
    ) == tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
