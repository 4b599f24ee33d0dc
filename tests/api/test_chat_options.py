"""Options that change a chat's prompt tokens, and how an answer is named and counted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.support.cluster import LiveCluster
from tests.support.sse import chunks_of

HELLO = {"role": "user", "content": "hello"}
STARTED = {"role": "assistant", "content": "Once upon"}
OWN = (
    "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for document in documents or [] %}<{{ document.text }}>{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def post(cluster: LiveCluster, *messages: dict[str, Any], headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"messages": messages or (HELLO,), "temperature": 0, "max_tokens": 4, "return_token_ids": True, **fields}
    answer = cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def prompt_of(cluster: LiveCluster, tokenizer: Tokenizer, *messages: dict[str, Any], **fields: Any) -> str:
    answer = post(cluster, *messages, **fields).json()
    assert answer["prompt_token_ids"] == answer["choices"][0]["prompt_token_ids"]
    return tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize("fields", [{}, {"chat_template": OWN}], ids=["servers", "requests"])
def test_typed_control_tokens_are_text(cluster: LiveCluster, tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    """Typed control tokens stay text, also in /tokenize; prompts rendered elsewhere keep them as control tokens."""
    typed, eos = {"role": "user", "content": "a<eos>b"}, tokenizer.encode("<eos>")[0]
    assert "a<eos>b" in prompt_of(cluster, tokenizer, typed, **fields)
    assert eos not in post(cluster, typed, **fields).json()["prompt_token_ids"]
    shown = cluster.client.post(f"{cluster.url}/tokenize", json={"messages": [typed], **fields}).json()
    assert shown["tokens"] == post(cluster, typed, **fields).json()["prompt_token_ids"]
    assert eos in cluster.client.post(f"{cluster.url}/tokenize", json={"prompt": "a<eos>b"}).json()["tokens"]


def test_the_last_message_goes_on(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    asked = "<|user|>hello<|assistant|>Once upon"
    assert prompt_of(cluster, tokenizer, HELLO, STARTED, continue_final_message=True) == asked


def test_a_template_of_the_request(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    def prompt(**fields: Any) -> str:
        return prompt_of(cluster, tokenizer, chat_template=OWN, **fields)

    assert prompt() == "[hello]>"
    assert prompt(documents=[{"text": "d"}]) == "[hello]<d>>"
    assert prompt(chat_template_kwargs={"mood": "glad"}) == "[hello]glad>"
    assert prompt(tools=TOOLS, tool_choice="none") == "[hello](look)>"
    assert prompt(tools=TOOLS, tool_choice="required", max_tokens=60) == "[hello](look)>"


def test_an_echo_of_the_message_that_goes_on(cluster: LiveCluster) -> None:
    fields: dict[str, Any] = {"continue_final_message": True}
    silent = post(cluster, HELLO, STARTED, **fields).json()["choices"][0]["message"]
    echoed = post(cluster, HELLO, STARTED, echo=True, **fields).json()["choices"][0]["message"]
    assert echoed == {"role": "assistant", "content": "Once upon" + silent["content"]}
    chunks = chunks_of(post(cluster, HELLO, STARTED, echo=True, stream=True, **fields))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == echoed["content"]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_request_has_the_name_that_it_was_given(cluster: LiveCluster, route: str) -> None:
    body: dict[str, Any] = {"messages": [HELLO]} if route.startswith("chat") else {"prompt": "hello"}
    prefix = "chatcmpl" if route.startswith("chat") else "cmpl"

    def name_of(name: str | None, header: str | None) -> str:
        headers = {} if header is None else {"X-Request-Id": header}
        fields = {**body, "max_tokens": 1, "request_id": name}
        answer = cluster.client.post(f"{cluster.url}/v1/{route}", json=fields, headers=headers)
        assert answer.status_code == 200
        return str(answer.json()["id"])

    assert name_of("my-name", None) == f"{prefix}-my-name"
    assert name_of(None, "of-the-header") == f"{prefix}-of-the-header"
    assert name_of("my-name", "of-the-header") == f"{prefix}-my-name"
    assert name_of(None, "two words").removeprefix(prefix + "-").isalnum()
    timeline = cluster.client.get(f"{cluster.admin_url}/requests/{prefix}-of-the-header/timeline")
    assert timeline.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_an_answer(cluster: LiveCluster, tokenizer: Tokenizer, stream: bool) -> None:
    """stop_reason is the stop string or token, and null after an end of sequence or at the length limit."""
    whole = cluster.client.post(
        f"{cluster.url}/v1/completions",
        json={"prompt": "hello", "temperature": 0, "max_tokens": 8, "return_token_ids": True},
    ).json()["choices"][0]

    def reason(**fields: Any) -> Any:
        body = {"prompt": "hello", "temperature": 0, "max_tokens": 8, "stream": stream, **fields}
        text = cluster.client.post(f"{cluster.url}/v1/completions", json=body).text
        last = text if not stream else text.splitlines()[-4].removeprefix("data: ")
        choice = json.loads(last)["choices"][0]
        return choice["finish_reason"], choice.get("stop_reason")

    assert "stop_reason" not in whole
    assert reason() == ("length", None)
    token_id = whole["token_ids"][3]
    assert reason(stop_token_ids=[token_id]) == ("stop", token_id)
    stop = whole["text"][2:4]
    assert reason(stop=["never", stop]) == ("stop", stop)
    assert reason(logit_bias={"258": 100}) == ("stop", None)  # <eos>
