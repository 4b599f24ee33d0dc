"""LiteLLM, unmodified, against the cluster: its answers, streams and errors match the server's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.api.conftest import MAX_MODEL_LEN
from tests.support.cluster import LiveCluster
from tests.support.only_local import only_local

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
PREFIXES = ["openai", "hosted_vllm"]


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    with only_local():
        import litellm

        litellm.suppress_debug_info = True
        yield litellm


@pytest.fixture
def server(cluster: LiveCluster) -> dict[str, Any]:
    return {"api_base": f"{cluster.url}/v1", "api_key": "none", "num_retries": 0, "timeout": 60}


@pytest.fixture
def expected(client: openai.OpenAI) -> str:
    return str(client.chat.completions.create(model="tiny", **CHAT).choices[0].message.content)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_completion(litellm: Any, server: dict[str, Any], expected: str, prefix: str) -> None:
    answer = litellm.completion(model=f"{prefix}/tiny", **CHAT, **server)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    usage = answer.usage
    assert usage.prompt_tokens == len("<|user|>hello<|assistant|>")  # one token per byte
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_stream(litellm: Any, server: dict[str, Any], expected: str, prefix: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(model=f"{prefix}/tiny", **CHAT, **options, **server))
    told = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in told) == expected
    assert len([choice for choice in told if choice.delta.content]) > 3
    assert {choice.finish_reason for choice in told} == {None, "length"}
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.completion_tokens == 12
    whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert whole.choices[0].message.content == expected


@pytest.mark.parametrize("prefix", ["text-completion-openai", "hosted_vllm"])
def test_a_text_completion(litellm: Any, server: dict[str, Any], client: openai.OpenAI, prefix: str) -> None:
    body: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 12}
    same = client.completions.create(model="tiny", **body, logprobs=2)
    answer = litellm.text_completion(model=f"{prefix}/tiny", **body, logprobs=2, **server)
    assert answer.choices[0].text == same.choices[0].text
    assert same.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == same.choices[0].logprobs.token_logprobs
    assert answer.choices[0].logprobs.top_logprobs == same.choices[0].logprobs.top_logprobs
    chunks = list(litellm.text_completion(model=f"{prefix}/tiny", **body, stream=True, **server))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == same.choices[0].text


class Pet(pydantic.BaseModel, extra="forbid"):
    kind: Literal["cat", "dog"]
    is_old: bool


def test_a_response_format(litellm: Any, server: dict[str, Any]) -> None:
    fields = {**CHAT, "max_tokens": 120}
    answer = litellm.completion(model="openai/tiny", response_format=Pet, **fields, **server)
    assert answer.choices[0].finish_reason == "stop"
    assert Pet.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize(("prefix", "stream"), [(PREFIXES[0], False), (PREFIXES[1], True)])
def test_errors_are_mapped(litellm: Any, server: dict[str, Any], prefix: str, stream: bool) -> None:
    def ask(name: str = "tiny", **fields: Any) -> None:
        litellm.completion(model=f"{prefix}/{name}", **{**CHAT, **fields}, stream=stream, **server)

    with pytest.raises(litellm.NotFoundError, match="nobody"):
        ask("nobody")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(temperature=-1)


def test_too_long_a_prompt_can_fall_back_to_a_larger_model(litellm: Any, server: dict[str, Any]) -> None:
    """LiteLLM recognizes such errors by their text, on which its `context_window_fallbacks` depend."""
    messages = [{"role": "user", "content": "x" * MAX_MODEL_LEN}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/tiny", messages=messages, **server)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/tiny", messages=HELLO, max_tokens=MAX_MODEL_LEN + 1, **server)
