"""OpenAI's own Python client against the cluster, and the reference document's curl."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pd_cluster.text.tokenizer import Tokenizer
from ranktable_tools.cluster_keys import SECRET_FILE, read_secret
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.cluster import LiveCluster
from tests.support.start_servers import document_body

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 24}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 24}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
EXACTLY: dict[str, Any] = {"extra_body": {"ignore_eos": True}}  # forces exactly the requested number of tokens


def test_chat(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    before_s = int(time.time())
    answer = client.chat.completions.create(**CHAT, **EXACTLY)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert before_s <= answer.created <= time.time()
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.message.content
    num_prompt = len(tokenizer.encode("<|user|>hello<|assistant|>"))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 24)
    assert answer.usage.total_tokens == num_prompt + 24
    assert answer.usage.prompt_tokens_details is not None
    assert 0 <= (answer.usage.prompt_tokens_details.cached_tokens or 0) < num_prompt


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream(client: openai.OpenAI, is_chat: bool) -> None:
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    fields = CHAT if is_chat else COMPLETION
    whole = create(**fields, **EXACTLY)
    *chunks, last = list(create(**fields, **EXACTLY, **USAGE))
    assert len({(c.id, c.created, c.model, c.object) for c in [*chunks, last]}) == 1
    choices = [chunk.choices[0] for chunk in chunks]
    if is_chat:
        assert chunks[0].object == "chat.completion.chunk"
        assert [choice.delta.role for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    else:
        assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 5, "the text must come in several pieces"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.id != whole.id


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(**COMPLETION, **EXACTLY)
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 24, 29)


# ---- errors


def test_a_bad_request_is_told_as_such(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**CHAT, stream=stream, n=2)
        assert (caught.value.status_code, caught.value.param) == (400, "n")
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(**{**COMPLETION, "model": "gpt-4o"})
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_too_long_a_prompt_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**COMPLETION, "prompt": "x" * MAX_MODEL_LEN})
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert str(MAX_MODEL_LEN) in str(caught.value)


# ---- the reference document


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_reference_documents_curl(cluster: LiveCluster, client: openai.OpenAI, model: Path) -> None:
    url = f"{cluster.url}/v1/chat/completions"
    body = json.dumps(document_body(str(model)))
    command = ["curl", "-sS", "--noproxy", "*", "-X", "POST", url, "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert answer["model"] == str(model)
    assert answer["usage"]["completion_tokens"] <= 100
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == ("length" if answer["usage"]["completion_tokens"] == 100 else "stop")
    same = client.chat.completions.create(**{**CHAT, "max_tokens": 100}, top_p=1, extra_body={"top_k": -1})
    assert choice["message"] == {"role": "assistant", "content": same.choices[0].message.content}


def test_the_model_is_the_served_name_or_the_path_or_left_out(cluster: LiveCluster, model: Path) -> None:
    url = f"{cluster.url}/v1/chat/completions"
    named = {name: cluster.client.post(url, json=document_body(name)).json() for name in ("tiny", str(model))}
    assert [answer["model"] for answer in named.values()] == list(named)
    body = document_body("")
    assert cluster.client.post(url, json=body).status_code == 404
    del body["model"]
    assert cluster.client.post(url, json=body).json()["model"] == "tiny"
    assert len({json.dumps(answer["choices"]) for answer in named.values()}) == 1


# ---- health


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_workers_own_answers(cluster: LiveCluster, name: str) -> None:
    url = f"http://127.0.0.1:{cluster.members[name].port}"
    health = httpx.get(f"{url}/health", trust_env=False)
    assert (health.status_code, health.json()) == (200, {"status": "ready", "name": name, "error": None})
    answer = httpx.get(f"{url}/instance", trust_env=False)
    assert answer.status_code == 200
    info = answer.json()
    assert (info["name"], info["state"], info["max_model_len"]) == (name, "ready", MAX_MODEL_LEN)
    missing = httpx.get(f"{url}/v1/models", trust_env=False)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    secret = read_secret(cluster.folder / SECRET_FILE).secret
    for content in (health.content, answer.content):  # nor anything that would let guesses be checked
        assert not [each for each in (secret, secret.hex()[:12].encode(), b"secret", b"digest") if each in content]
