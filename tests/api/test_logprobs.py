"""Logprobs of answers and prompts against transformers'."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import KEYS
from tests.support.checkpoints import VOCAB_SIZE, reference_model
from tests.support.cluster import LiveCluster

PROMPT = "Once upon a time"
NUM_TOKENS = 12
EXACT = 2e-3  # float32 with another order of summation


def post(cluster: LiveCluster, route: str = "completions", **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked = {"messages": [{"role": "user", "content": "hello"}]} if route.startswith("chat") else {"prompt": PROMPT}
    data: dict[str, Any] = cluster.ask(f"/v1/{route}", {**asked, **body, **fields})
    return data


def reference(model: Path, token_ids: list[int]) -> torch.Tensor:
    """Returns logprobs of the next token after each token, [num_tokens, vocab_size]."""
    with torch.inference_mode():
        logits = reference_model(model)(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "sampled"])
def test_logprobs_are_the_models(
    cluster: LiveCluster, model: Path, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """Logprobs are the model's distribution at any temperature; each token has the three likeliest ones."""
    (choice,) = post(cluster, logprobs=3, return_tokens_as_token_ids=True, **fields)["choices"]
    prompt = tokenizer.encode(PROMPT)
    expected = reference(model, [*prompt, *choice["token_ids"]])[len(prompt) - 1 :]
    found = choice["logprobs"]
    assert found["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    for at, token_id in enumerate(choice["token_ids"]):
        assert found["token_logprobs"][at] == pytest.approx(float(expected[at, token_id]), abs=EXACT)
        best = expected[at].topk(3)
        top = {f"token_id:{i}": float(v) for v, i in zip(best.values, best.indices, strict=True)}
        assert found["top_logprobs"][at] == pytest.approx(
            {**top, found["tokens"][at]: float(expected[at, token_id])}, abs=EXACT
        )
    if not fields:
        assert all(
            max(top.values()) == own for top, own in zip(found["top_logprobs"], found["token_logprobs"], strict=True)
        )


def test_offsets_are_places_in_the_text(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    assert post(cluster)["choices"][0]["logprobs"] is None
    letters = [tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    for echo in (False, True):
        (choice,) = post(cluster, logprobs=0, allowed_token_ids=letters, echo=echo)["choices"]
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(choice["text"]) == NUM_TOKENS + echo * len(PROMPT)
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)


def test_a_chats_logprobs(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    data = post(cluster, "chat/completions", logprobs=True, top_logprobs=2)
    (choice,) = data["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == NUM_TOKENS
    for entry, token_id in zip(content, choice["token_ids"], strict=True):
        assert bytes(entry["bytes"]) == tokenizer.token_bytes(token_id)
        assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
        assert len(entry["top_logprobs"]) == 2
        first, second = entry["top_logprobs"]
        assert first["logprob"] >= second["logprob"]
        assert (entry["token"], entry["logprob"]) == (first["token"], first["logprob"]), (
            "greedy takes the likeliest token"
        )
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == choice["message"]["content"]
    (choice,) = post(cluster, "chat/completions", logprobs=True)["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


# ---- logprobs of prompts


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_prompt_logprobs_are_the_models(cluster: LiveCluster, model: Path, route: str) -> None:
    data = post(cluster, route, prompt_logprobs=2)
    (choice,) = data["choices"]
    found = (data if route.startswith("chat") else choice)["prompt_logprobs"]
    prompt = choice["prompt_token_ids"]
    expected = reference(model, prompt)
    assert len(found) == len(prompt) == data["usage"]["prompt_tokens"]
    assert found[0] is None
    for at, entry in enumerate(found[1:]):
        token_id = prompt[at + 1]
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(float(expected[at, token_id]), abs=EXACT)
        assert own["rank"] == 1 + int((expected[at] > expected[at, token_id]).sum())
        assert {1, 2} <= {other["rank"] for other in entry.values()}
        assert 2 <= len(entry) <= 3


def test_an_echo_scores_a_text(cluster: LiveCluster, model: Path, tokenizer: Tokenizer) -> None:
    """Evaluation harnesses request only the prompt's logprobs, without generated tokens."""
    prompt = tokenizer.encode(PROMPT)
    data = post(cluster, echo=True, logprobs=1, max_tokens=0)
    (choice,) = data["choices"]
    assert (choice["text"], choice["token_ids"], data["usage"]["completion_tokens"]) == (PROMPT, [], 0)
    found = choice["logprobs"]
    assert found["tokens"] == list(PROMPT)
    assert found["text_offset"] == list(range(len(PROMPT)))
    assert found["token_logprobs"][0] is None
    expected = reference(model, prompt)
    values = [float(expected[at, token_id]) for at, token_id in enumerate(prompt[1:])]
    assert found["token_logprobs"][1:] == pytest.approx(values, abs=EXACT)
    longer = post(cluster, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert len(longer["tokens"]) == len(PROMPT) + NUM_TOKENS
    assert longer["token_logprobs"][1 : len(PROMPT)] == pytest.approx(found["token_logprobs"][1:], abs=EXACT)
    cluster.assert_home()


def test_every_token_of_the_vocabulary(guarded: LiveCluster) -> None:
    """With --max-logprobs -1, the whole vocabulary's probabilities add up to one, across the split and over HTTP."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_tokens_as_token_ids": True}
    answer = guarded.client.post(
        f"{guarded.url}/v1/completions",
        json={**body, "logprobs": -1, "prompt_logprobs": -1},
        headers={"Authorization": f"Bearer {KEYS['one']}"},
    )
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    rows = [list(each.values()) for each in choice["logprobs"]["top_logprobs"]]
    rows += [[told["logprob"] for told in each.values()] for each in choice["prompt_logprobs"][1:]]
    assert [len(row) for row in rows] == [VOCAB_SIZE] * (4 + 2)
    for row in rows:
        assert sum(map(math.exp, row)) == pytest.approx(1.0, abs=1e-4)
