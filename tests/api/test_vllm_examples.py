"""The requests of vLLM's examples of online serving, with their parameters, and the fields that they read.

The tools and reasoning of the examples come from a scripted model; the rest from the random one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch

from pd_cluster.text.tokenizer import Tokenizer
from tests.support.checkpoints import reference_model
from tests.support.cluster import LiveCluster
from tests.support.scripted_scenarios import FAMILIES

PROMPT = "A robot may not"
TALK: list[Any] = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Who won in 2020?"},
    {"role": "assistant", "content": "The Dodgers."},
    {"role": "user", "content": "Where was it?"},
]
PLACE = {"type": "string", "maxLength": 6}
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"Does {name}", "parameters": parameters}}


TOOLS = [tool("get_weather", city=PLACE, unit=UNIT), tool("get_forecast", days={"enum": [1, 5, 7]}, unit=UNIT)]
ASK = [{"role": "user", "content": "What will the weather be in Dallas?"}]


# ---- completions and chat


def test_the_completion_client(client: openai.OpenAI) -> None:
    """Two choices with the logprobs of three tokens each, whole and as one stream."""
    name = client.models.list().data[0].id
    fields: dict[str, Any] = {"prompt": PROMPT, "echo": False, "n": 2, "logprobs": 3, "seed": 5, "max_tokens": 12}
    whole = client.completions.create(model=name, **fields)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = {0: "", 1: ""}
    logprobs: dict[int, list[float | None]] = {0: [], 1: []}
    for chunk in client.completions.create(model=name, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        assert all(3 <= len(top) <= 4 or "\ufffd" in top for top in choice.logprobs.top_logprobs)
        assert texts[choice.index] == choice.text
        assert logprobs[choice.index] == choice.logprobs.token_logprobs
    assert texts[0] != texts[1]


def test_the_chat_client(client: openai.OpenAI) -> None:
    """A conversation of all three roles, whole and streamed."""
    name = client.models.list().data[0].id
    whole = client.chat.completions.create(model=name, messages=TALK, seed=3, max_tokens=20)
    chunks = client.chat.completions.create(model=name, messages=TALK, seed=3, max_tokens=20, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == streamed != ""


def test_the_token_client(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    """Text to tokens and back; a conversation's are those of its prompt."""
    found = cluster.client.post(f"{cluster.url}/tokenize", json={"model": "tiny", "prompt": PROMPT}).json()
    assert (found["tokens"], found["count"]) == (tokenizer.encode(PROMPT), len(PROMPT))
    assert found["max_model_len"] == 256
    body = {"model": "tiny", "tokens": found["tokens"]}
    assert cluster.client.post(f"{cluster.url}/detokenize", json=body).json() == {"prompt": PROMPT}
    talk = cluster.client.post(f"{cluster.url}/tokenize", json={"model": "tiny", "messages": TALK}).json()
    rendered = "".join(f"<|{message['role']}|>{message['content']}" for message in TALK) + "<|assistant|>"
    assert talk["tokens"] == tokenizer.encode(rendered)


def test_prompt_logprobs(client: openai.OpenAI, model: Path, tokenizer: Tokenizer) -> None:
    """vLLM's shape: for each prompt token but the first, an object of token ids with logprob, rank and text."""
    extra = {"prompt_logprobs": 2}
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body=extra)
    (found,) = [choice.to_dict()["prompt_logprobs"] for choice in answer.choices]
    token_ids = tokenizer.encode(PROMPT)
    with torch.inference_mode():
        expected = reference_model(model)(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    first, *rest = found
    assert first is None
    assert len(rest) == len(token_ids) - 1
    for row, token_id, entries in zip(expected, token_ids[1:], rest, strict=False):
        assert entries[str(token_id)]["logprob"] == pytest.approx(float(row[token_id]), abs=1e-3)
        assert entries[str(token_id)]["rank"] == 1 + int((row > row[token_id]).sum())
        assert {int(each) for each in entries} == {token_id, *row.topk(2).indices.tolist()}


def test_beam_search(client: openai.OpenAI) -> None:
    extra = {"use_beam_search": True}
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=3, temperature=0, max_tokens=8, extra_body=extra)
    assert len({choice.text for choice in answer.choices}) == 3


# ---- structured outputs

CAR = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 5}, "car_type": {"enum": ["SEDAN", "SUV", "TRUCK"]}},
    "required": ["brand", "car_type"],
    "additionalProperties": False,
}
MAIL = r"[a-z0-9.]{1,9}@[a-z]{2,6}\.com\n"
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
QUERY = re.compile(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ")
CALL = re.compile(r"<function=get>(\{.*?\})</function>", re.DOTALL)
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=get>", "schema": CAR, "end": "</function>"}],
    "triggers": ["<function="],
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "car", "schema": CAR}}


def is_car(text: str) -> bool:
    jsonschema.validate(json.loads(text), CAR)
    return True


STRUCTURED: dict[str, tuple[dict[str, Any], Any]] = {
    "guided_choice": (
        {"extra_body": {"guided_choice": ["positive", "negative"]}},
        {"positive", "negative"}.__contains__,
    ),
    "guided_regex": (
        {"extra_body": {"guided_regex": MAIL}, "stop": ["\n"]},
        re.compile(MAIL.removesuffix(r"\n")).fullmatch,
    ),
    "guided_json": ({"extra_body": {"guided_json": CAR}}, is_car),
    "guided_grammar": ({"extra_body": {"guided_grammar": SQL}}, QUERY.fullmatch),
    "choice": ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, {"yes", "no"}.__contains__),
    "regex": ({"extra_body": {"structured_outputs": {"regex": MAIL}}}, re.compile(MAIL).fullmatch),
    "json": ({"extra_body": {"structured_outputs": {"json": CAR}}}, is_car),
    "grammar": ({"extra_body": {"structured_outputs": {"grammar": SQL}}}, QUERY.fullmatch),
    "response_format": ({"response_format": JSON_FORMAT}, is_car),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_outputs(client: openai.OpenAI, name: str, stream: bool) -> None:
    fields, fits = STRUCTURED[name]
    said, reason = chat_text(client, stream, max_tokens=150, seed=1, **fields)
    assert reason == "stop"
    assert fits(said), said


def chat_text(client: openai.OpenAI, stream: bool, **fields: Any) -> tuple[str, str | None]:
    """Returns the answer to a short question, and why it ended."""
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Go on"}], **fields}
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        return str(choice.message.content), choice.finish_reason
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason


# ---- tools and reasoning


@pytest.fixture(scope="module")
def scripted_client(scripted: LiveCluster) -> Iterator[openai.OpenAI]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
            yield made


def collected(chunks: Any) -> dict[str, Any]:
    """Assembles a stream as the examples do: text, reasoning, and calls by their index."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for chunk in chunks:
        choice = chunk.choices[0]
        found["content"] += choice.delta.content or ""
        found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        found["finish_reason"] = choice.finish_reason or found["finish_reason"]
        for call in choice.delta.tool_calls or []:
            own = found["calls"].setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            own["id"] = call.id or own["id"]
            own["name"] = call.function.name or own["name"]
            own["arguments"] += call.function.arguments or ""
    found["calls"] = [found["calls"][index] for index in sorted(found["calls"])]
    return found


def told(answer: Any) -> dict[str, Any]:
    """The same of a whole answer."""
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [{"id": call.id, **call.function.model_dump(include={"name", "arguments"})} for call in calls],
        "finish_reason": choice.finish_reason,
    }


def ask(client: openai.OpenAI, stream: bool, **fields: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 250, **fields}
    answer = client.chat.completions.create(stream=stream, **fields)
    return collected(answer) if stream else told(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("scenario", ["a call after content", "two calls", "reasoning, a call"])
def test_tools_as_the_model_likes(
    scripted_client: openai.OpenAI, scripted_model: Path, scenario: str, stream: bool
) -> None:
    messages = FAMILIES["qwen3"].ask(scripted_model, scenario, ASK, tools=TOOLS)
    found = ask(scripted_client, stream, messages=messages, tools=TOOLS, tool_choice="auto")
    calls = [(call["name"], json.loads(call["arguments"])) for call in found["calls"]]
    berlin = ("get_weather", {"city": "Berlin"})
    second = ("get_weather", {"city": "Paris, \u00cele-de-France", "days": 3})
    assert calls == ([berlin, second] if scenario == "two calls" else [berlin])
    assert len({call["id"] for call in found["calls"]}) == len(calls)
    assert found["finish_reason"] == "tool_calls"
    assert found["content"].strip() == ("I will look." if scenario == "a call after content" else "")
    assert found["reasoning"].strip() == ("I need a tool." if scenario == "reasoning, a call" else "")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["required", "get_forecast"])
def test_tools_that_must_be_called(scripted_client: openai.OpenAI, choice: str, stream: bool) -> None:
    named = {"type": "function", "function": {"name": choice}}
    tool_choice = choice if choice == "required" else named
    found = ask(scripted_client, stream, messages=ASK, tools=TOOLS, tool_choice=tool_choice)
    assert found["calls"]
    for call in found["calls"]:
        (wanted,) = [each["function"] for each in TOOLS if each["function"]["name"] == call["name"]]
        jsonschema.validate(json.loads(call["arguments"]), wanted["parameters"])
    assert "</tool_call>" not in found["content"]
    if choice != "required":
        assert [call["name"] for call in found["calls"]] == [choice]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning(scripted_client: openai.OpenAI, scripted_model: Path, stream: bool) -> None:
    messages = FAMILIES["qwen3"].ask(scripted_model, "reasoning, content", ASK)
    found = ask(scripted_client, stream, messages=messages)
    assert found["reasoning"].strip() == "They ask for the sun."
    assert found["content"].strip() == "It shines."
    assert (found["finish_reason"], found["calls"]) == ("stop", [])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_structural_tag(scripted_client: openai.OpenAI, scripted_model: Path, stream: bool) -> None:
    """Text is free until a trigger; behind it the model, which wants to say "TRAIN", is kept to the tag's schema."""
    messages = FAMILIES["qwen3"].ask(scripted_model, "a function's tag", ASK)
    free = ask(scripted_client, stream, messages=messages)["content"]
    assert "TRAIN" in free
    said = ask(scripted_client, stream, messages=messages, response_format=TAG)["content"]
    assert said.startswith("Let me see. <function=get>")
    (inner,) = CALL.findall(said)
    assert is_car(inner)


# ---- the plain API


def test_the_plain_client(plain: LiveCluster) -> None:
    """Beams by POST /generate; a stream's frames end with NUL and are split there, wherever the network cut them."""
    body = {"prompt": PROMPT, "n": 4, "use_beam_search": True, "temperature": 0.0, "max_tokens": 16}
    whole = plain.client.post(f"{plain.url}/generate", headers={"User-Agent": "Test Client"}, json=body)
    texts = whole.json()["text"]
    assert len(set(texts)) == 4
    assert all(text.startswith(PROMPT) for text in texts)
    frames, rest = [], b""
    with plain.client.stream("POST", f"{plain.url}/generate", json={**body, "stream": True}) as answer:
        for part in answer.iter_bytes(chunk_size=7):
            *ended, rest = (rest + part).split(b"\0")
            frames += [json.loads(frame)["text"] for frame in ended]
    assert rest == b""
    assert frames[-1] == texts
