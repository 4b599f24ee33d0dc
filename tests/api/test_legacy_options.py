"""USE_OPENAI=0 with several answers, logprobs and the other sampling parameters."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

from pd_cluster.text.tokenizer import Tokenizer
from tests.support.cluster import LiveCluster

PROMPT = "Once upon a time"
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 1, "seed": 3, "max_tokens": 12, "ignore_eos": True}


def generate(plain: LiveCluster, **fields: Any) -> dict[str, Any]:
    answer = plain.client.post(f"{plain.url}/generate", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


def test_n_texts_each_with_the_prompt(plain: LiveCluster) -> None:
    texts = generate(plain, n=3)["text"]
    assert len(set(texts)) == 3
    assert all(text.startswith(PROMPT) for text in texts)
    assert generate(plain, n=2)["text"] == texts[:2]
    assert list(generate(plain)) == ["text"]


def test_a_stream_of_several_is_cumulative(plain: LiveCluster) -> None:
    whole = generate(plain, n=3, logprobs=1)
    answer = plain.client.post(f"{plain.url}/generate", json={**BODY, "n": 3, "logprobs": 1, "stream": True})
    *frames, end = answer.content.split(b"\0")
    assert end == b""
    told = [json.loads(frame) for frame in frames]
    assert all(len(each["text"]) == 3 for each in told)
    for before, after in itertools.pairwise(told):
        assert all(b.startswith(a) for a, b in zip(before["text"], after["text"], strict=True))
    assert told[-1]["text"] == whole["text"]
    assert [len(each["tokens"]) for each in told[-1]["logprobs"]] == [12] * 3


def test_best_of(plain: LiveCluster) -> None:
    candidates = generate(plain, n=5, logprobs=0)
    scores = [math.fsum(each["token_logprobs"]) for each in candidates["logprobs"]]
    best = candidates["text"][scores.index(max(scores))]
    assert generate(plain, best_of=5) == {"text": [best]}


def test_prompt_logprobs(plain: LiveCluster, tokenizer: Tokenizer) -> None:
    found = generate(plain, prompt_logprobs=1)["prompt_logprobs"]
    assert found[0] is None
    assert [next(iter(entry)) for entry in found[1:]] == [str(i) for i in tokenizer.encode(PROMPT)[1:]]


def test_sampling_parameters(plain: LiveCluster, tokenizer: Tokenizer) -> None:
    (x,) = tokenizer.encode("x")
    forced: dict[str, Any] = {"logit_bias": {str(x): 100}, "temperature": 0}
    assert generate(plain, **forced)["text"] == [PROMPT + "x" * 12]
    assert generate(plain, **forced, stop="x", min_tokens=4)["text"] == [PROMPT + "xxxx"]
    kept = generate(plain, **forced, stop="x", min_tokens=4, include_stop_str_in_output=True)
    assert kept["text"] == [PROMPT + "xxxxx"]
    allowed = [tokenizer.encode(letter)[0] for letter in "abc"]
    (text,) = generate(plain, allowed_token_ids=allowed, bad_words=["a"])["text"]
    assert set(text.removeprefix(PROMPT)) <= {"b", "c"}
    (cut,) = generate(plain, truncate_prompt_tokens=4)["text"]
    assert cut.startswith(PROMPT[-4:])
