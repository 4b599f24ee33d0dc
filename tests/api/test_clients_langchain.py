"""LangChain's OpenAI classes, unmodified, against the cluster: chat, batches of prompts, structured output, tools."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.api.conftest import MAX_MODEL_LEN
from tests.support.cluster import LiveCluster
from tests.support.only_local import only_local
from tests.support.scripted_scenarios import FAMILIES


@pytest.fixture(scope="module")
def langchain() -> Iterator[Any]:
    with only_local():
        from langchain_core.exceptions import ContextOverflowError
        from langchain_openai import ChatOpenAI, OpenAI

        yield SimpleNamespace(ChatOpenAI=ChatOpenAI, OpenAI=OpenAI, ContextOverflowError=ContextOverflowError)


@pytest.fixture
def server(cluster: LiveCluster) -> dict[str, Any]:
    return {"model": "tiny", "base_url": f"{cluster.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}


@pytest.fixture
def chat(langchain: Any, server: dict[str, Any]) -> Any:
    return langchain.ChatOpenAI(**server, temperature=0, max_tokens=12)


@pytest.fixture
def expected(client: openai.OpenAI) -> str:
    return ask(client, "hello")


def ask(client: openai.OpenAI, text: str) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=12
    )
    return str(answer.choices[0].message.content)


def test_invoke(chat: Any, expected: str) -> None:
    answer = chat.invoke("hello")
    assert answer.content == expected
    assert answer.usage_metadata["input_tokens"] == len("<|user|>hello<|assistant|>")
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "tiny"


def test_stream(langchain: Any, server: dict[str, Any], expected: str) -> None:
    chat = langchain.ChatOpenAI(**server, temperature=0, max_tokens=12, stream_usage=True)
    chunks = list(chat.stream("hello"))
    assert len([chunk for chunk in chunks if chunk.content]) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.content == expected
    assert whole.usage_metadata["output_tokens"] == 12


class Pet(pydantic.BaseModel, extra="forbid"):
    """An animal at home."""

    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(langchain: Any, server: dict[str, Any], with_tools: Any, method: str) -> None:
    """Structured output works by response_format, and by a required tool call."""
    chat = langchain.ChatOpenAI(**server, temperature=0, max_tokens=120) if method == "json_schema" else with_tools
    assert isinstance(chat.with_structured_output(Pet, method=method).invoke("hello"), Pet)


def get_weather(city: str, days: int = 1) -> str:
    """Tells the weather."""
    raise NotImplementedError  # LangChain sends only the signature


@pytest.fixture
def with_tools(langchain: Any, scripted: LiveCluster) -> Any:
    """Returns a chat model for the cluster whose model calls tools."""
    fields = {"model": "tiny", "base_url": f"{scripted.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
    return langchain.ChatOpenAI(**fields, temperature=0, max_tokens=200)


def answer_of(chat: Any, messages: Any, streamed: bool) -> Any:
    if not streamed:
        return chat.invoke(messages)
    return functools.reduce(operator.add, chat.stream(messages))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_model_calls_a_tool_and_is_told_what_came_of_it(
    with_tools: Any, scripted_model: Path, streamed: bool
) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.messages.utils import convert_to_openai_messages
    from langchain_core.utils.function_calling import convert_to_openai_tool

    tools = [convert_to_openai_tool(get_weather)]

    def padded(scenario: str, turns: list[Any]) -> list[Any]:
        *_, last = FAMILIES["qwen3"].ask(scripted_model, scenario, convert_to_openai_messages(turns), tools=tools)
        return [*turns[:-1], turns[-1].model_copy(update={"content": last["content"]})]

    chat = with_tools.bind_tools(tools)
    turns = padded("a call after content", [HumanMessage("Is it sunny in Berlin?")])
    answer = answer_of(chat, turns, streamed)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Berlin"})
    assert answer.content.strip() == "I will look."
    turns = [*turns, AIMessage(answer.content, tool_calls=answer.tool_calls)]
    turns = padded("content", [*turns, ToolMessage(json.dumps({"sunny": True}), tool_call_id=call["id"])])
    assert answer_of(chat, turns, streamed).content == "It is sunny in Zürich. ☀"


def test_the_plain_completions_class_sends_prompts_together(
    langchain: Any, server: dict[str, Any], client: openai.OpenAI
) -> None:
    prompts = ["hello", "good bye", "hello again"]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    alone = [client.completions.create(model="tiny", prompt=prompt, **body).choices[0].text for prompt in prompts]
    model = langchain.OpenAI(**server, **body, batch_size=2)
    assert model.invoke("hello") == alone[0]
    assert "".join(model.stream("hello")) == alone[0]
    result = model.generate(prompts)
    assert [generations[0].text for generations in result.generations] == alone
    assert result.llm_output["token_usage"]["completion_tokens"] == 36


def test_errors_are_mapped(langchain: Any, server: dict[str, Any]) -> None:
    with pytest.raises(openai.NotFoundError):
        langchain.ChatOpenAI(**{**server, "model": "nobody"}).invoke("hello")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        langchain.ChatOpenAI(**server, temperature=-1).invoke("hello")
    with pytest.raises(langchain.ContextOverflowError):
        langchain.ChatOpenAI(**server).invoke("x" * MAX_MODEL_LEN)
