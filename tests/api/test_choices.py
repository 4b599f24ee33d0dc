"""n and best_of: prefill computes the prompt once, decode continues with every sequence."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.test_beam_requests import ids_of
from tests.support.cluster import LiveCluster
from tests.support.sse import chunks_of

PROMPT = "Once upon a time"
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 16,
    "temperature": 1,
    "seed": 4,
    "ignore_eos": True,
    "return_token_ids": True,
}


def post(cluster: LiveCluster, **fields: Any) -> dict[str, Any]:
    data: dict[str, Any] = cluster.ask("/v1/completions", {**BODY, **fields})
    return data


@pytest.mark.parametrize("n", [1, 10])
def test_n_answers(cluster: LiveCluster, n: int) -> None:
    data = post(cluster, n=n, top_k=100)
    found = ids_of(data)
    assert len(found) == n
    assert [len(each) for each in found] == [16] * n
    assert len({tuple(each) for each in found}) == n
    assert data["usage"]["completion_tokens"] == 16 * n
    assert data["usage"]["prompt_tokens"] == len(PROMPT)
    cluster.assert_home()


def test_a_seed_repeats_every_choice_whatever_n(cluster: LiveCluster) -> None:
    """Choice k is drawn from (seed, k), so more choices do not change the first ones."""
    five = ids_of(post(cluster, n=5))
    assert ids_of(post(cluster, n=5)) == five
    assert ids_of(post(cluster, n=2)) == five[:2]
    assert ids_of(post(cluster)) == five[:1]
    assert ids_of(post(cluster, n=5, seed=5)) != five


def test_more_sequences_than_the_pool_holds(cluster: LiveCluster) -> None:
    """128 sequences of two blocks each in 128 blocks are slow or refused, while other requests are served."""
    greedy = {**BODY, "temperature": 0}
    expected = cluster.client.post(f"{cluster.url}/v1/completions", json=greedy).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(cluster.client.post, f"{cluster.url}/v1/completions", json={**BODY, "n": 128})
        while not many.done():
            other = cluster.client.post(f"{cluster.url}/v1/completions", json=greedy)
            assert other.json()["choices"] == expected
    answer = many.result()
    if answer.status_code == 200:
        assert [len(each) for each in ids_of(answer.json())] == [16] * 128
    else:
        assert answer.json()["error"]["message"]
    cluster.assert_home()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_sequences_that_end_on_the_first_tokens(cluster: LiveCluster, max_tokens: int) -> None:
    found = ids_of(post(cluster, n=6, max_tokens=max_tokens))
    assert found == [each[:max_tokens] for each in ids_of(post(cluster, n=6))]
    cluster.assert_home()


def test_some_end_at_token_one_and_others_go_on(cluster: LiveCluster) -> None:
    full = ids_of(post(cluster, n=8))
    stop = full[3][0]
    data = post(cluster, n=8, stop_token_ids=[stop])
    for choice, whole in zip(data["choices"], full, strict=True):
        length = whole.index(stop) + 1 if stop in whole else len(whole)
        assert choice["token_ids"] == whole[:length]
        assert choice["finish_reason"] == ("stop" if stop in whole else "length")
    assert len(data["choices"][3]["token_ids"]) == 1
    assert any(len(choice["token_ids"]) > 1 for choice in data["choices"])
    cluster.assert_home()


def test_a_stop_string_ends_only_its_own_choice(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    """A stop string in token one ends a choice while the others are still being handed over."""
    allowed = {"allowed_token_ids": [tokenizer.encode(letter)[0] for letter in "abcdefgh"], "temperature": 2}
    full = [choice["text"] for choice in post(cluster, n=6, **allowed)["choices"]]
    for stop in (full[2][4:6], full[3][0]):
        choices = post(cluster, n=6, stop=stop, **allowed)["choices"]
        for choice, whole in zip(choices, full, strict=True):
            assert choice["text"] == (whole[: whole.index(stop)] if stop in whole else whole)
            assert choice["finish_reason"] == ("stop" if stop in whole else "length")
        assert "stop" in {choice["finish_reason"] for choice in choices}
    assert post(cluster, n=6, stop=list("abcdefgh"), **allowed)["usage"]["completion_tokens"] == 6
    cluster.assert_home()


def test_streamed_choices_are_the_whole_ones(cluster: LiveCluster) -> None:
    whole = post(cluster, n=3, logprobs=1)
    body = {**BODY, "n": 3, "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(cluster.client.post(f"{cluster.url}/v1/completions", json=body))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert [i for each in mine for i in each.get("token_ids", [])] == choice["token_ids"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["length"]
        told = [x for each in mine if each["logprobs"] for x in each["logprobs"]["tokens"]]
        assert told == choice["logprobs"]["tokens"]


# ---- best_of


def mean_logprob(choice: dict[str, Any]) -> float:
    values = choice["logprobs"]["token_logprobs"]
    return math.fsum(values) / len(values)


def test_best_of_answers_the_likeliest(cluster: LiveCluster) -> None:
    candidates = post(cluster, n=6, logprobs=0)["choices"]
    ranked = sorted(candidates, key=mean_logprob, reverse=True)
    data = post(cluster, n=2, best_of=6)
    assert ids_of(data) == [choice["token_ids"] for choice in ranked[:2]]
    assert data["usage"]["completion_tokens"] == 32
    assert all(choice["logprobs"] is None for choice in data["choices"])
    with_logprobs = post(cluster, best_of=6, logprobs=0)["choices"]
    assert [choice["token_ids"] for choice in with_logprobs] == [ranked[0]["token_ids"]]
    assert mean_logprob(with_logprobs[0]) == pytest.approx(mean_logprob(ranked[0]), abs=1e-4)
    cluster.assert_home()
