"""Beam search over HTTP gives the hypotheses of transformers' generate(), best first, all at the end."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Sampling
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.cluster import LiveCluster
from tests.support.reference_beams import assert_same_beams
from tests.support.sse import chunks_of

PROMPT = "Once upon a time"
MANY_ENDS = list(range(1, 256, 4))
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 12,
    "use_beam_search": True,
    "n": 3,
    "temperature": 0,
    "top_p": 1,
    "top_k": -1,
    "return_token_ids": True,
}


def post(cluster: LiveCluster, **fields: Any) -> dict[str, Any]:
    data: dict[str, Any] = cluster.ask("/v1/completions", {**BODY, **fields})
    return data


def ids_of(data: dict[str, Any]) -> list[list[int]]:
    assert [choice["index"] for choice in data["choices"]] == list(range(len(data["choices"])))
    return [choice["token_ids"] for choice in data["choices"]]


def params(width: int, **fields: Any) -> Sampling:
    return Sampling(**{"n": width, "beam_width": width, "temperature": 0.0, "max_tokens": 12, **fields})


@pytest.mark.parametrize("n", [2, 10])
def test_n_hypotheses(cluster: LiveCluster, model: Path, tokenizer: Tokenizer, n: int) -> None:
    data = post(cluster, n=n)
    found = ids_of(data)
    assert len({tuple(each) for each in found}) == n
    assert_same_beams(model, tokenizer.encode(PROMPT), found, params(n))
    assert data["usage"]["prompt_tokens"] == len(PROMPT)
    assert data["usage"]["completion_tokens"] == sum(map(len, found))
    for choice in data["choices"]:
        is_full = len(choice["token_ids"]) == 12
        assert choice["finish_reason"] == ("length" if is_full else "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 2.0, "early_stopping": True},
        {"length_penalty": -1.0, "early_stopping": "never"},
        {"length_penalty": 0},
    ],
    ids=str,
)
def test_length_penalty_and_early_stopping(
    cluster: LiveCluster, model: Path, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    found = ids_of(post(cluster, n=4, stop_token_ids=MANY_ENDS, **fields))
    sampling = params(4, stop_token_ids=tuple(MANY_ENDS), **fields)
    assert_same_beams(model, tokenizer.encode(PROMPT), found, sampling)
    assert {len(each) == 12 for each in found} != {True}


def test_best_of_is_the_width(cluster: LiveCluster, model: Path, tokenizer: Tokenizer) -> None:
    """In the document's example, best_of is the number of beams, independent of the number of answers."""
    for n in (1, 2):
        found = ids_of(post(cluster, n=n, best_of=5))
        assert found == ids_of(post(cluster, n=5))[:n]
        assert_same_beams(model, tokenizer.encode(PROMPT), found, params(5, n=n))
    example = {"top_k": -1, "use_beam_search": True, "best_of": 2, "length_penalty": 1.5}
    assert len(cluster.ask("/v1/completions", {"prompt": PROMPT, **example})["choices"]) == 1


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_searches_that_end_at_once(cluster: LiveCluster, model: Path, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Covers searches that end on the prefill instance, or in the decode instance's first step."""
    found = ids_of(post(cluster, max_tokens=max_tokens))
    assert_same_beams(model, tokenizer.encode(PROMPT), found, params(3, max_tokens=max_tokens))
    cluster.assert_home()


def test_an_end_of_sequence_is_no_text(cluster: LiveCluster) -> None:
    for choice in post(cluster, stop_token_ids=MANY_ENDS, n=5)["choices"]:
        ended = choice["finish_reason"] == "stop"
        assert (choice["token_ids"][-1] in MANY_ENDS) == ended
    with_stop = post(cluster, stop_token_ids=MANY_ENDS, n=5, include_stop_str_in_output=True)["choices"]
    without = post(cluster, stop_token_ids=MANY_ENDS, n=5)["choices"]
    longer = [len(a["text"]) > len(b["text"]) for a, b in zip(with_stop, without, strict=True)]
    assert longer == [choice["finish_reason"] == "stop" for choice in without]
    assert any(longer)


def test_logprobs(cluster: LiveCluster) -> None:
    data = post(cluster, logprobs=2)
    assert ids_of(data) == ids_of(post(cluster))
    for choice in data["choices"]:
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(choice["token_ids"])
        pairs = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
        assert all(value <= max(top.values()) + 1e-6 for value, top in pairs)
    scores = [sum(c["logprobs"]["token_logprobs"]) / len(c["token_ids"]) for c in data["choices"]]
    assert scores == sorted(scores, reverse=True)


def test_streamed_beams_come_at_the_end_and_are_the_same(cluster: LiveCluster) -> None:
    for fields in ({"n": 3}, {"n": 2, "best_of": 4}):
        whole = post(cluster, **fields)
        body = {**BODY, **fields, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = chunks_of(cluster.client.post(f"{cluster.url}/v1/completions", json=body))
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        for choice in whole["choices"]:
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert "".join(each["text"] for each in mine) == choice["text"]
            assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [choice["finish_reason"]]


def test_who_leaves_a_search_leaves_nothing(cluster: LiveCluster) -> None:
    before = cluster.instance("decode-0")["num_steps"]
    body = json.dumps({**BODY, "n": 10, "max_tokens": MAX_MODEL_LEN - len(PROMPT), "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", cluster.launch.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        cluster.wait_until("the search runs", lambda: cluster.instance("decode-0")["num_steps"] > before)
    cluster.assert_home()
    assert len(post(cluster)["choices"]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 1}, "n"),
        ({"n": None}, "use_beam_search"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "n": 1, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False}, "n"),  # greedy allows one answer only
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(cluster: LiveCluster, fields: dict[str, Any], param: str) -> None:
    for route, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user"}]})):
        stream = route == "completions"
        body = {**{k: v for k, v in BODY.items() if k != "prompt"}, **prompt, "stream": stream, **fields}
        answer = cluster.client.post(f"{cluster.url}/v1/{route}", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert param in answer.json()["error"]["message"]
