"""USE_OPENAI=0: vLLM's plain API, POST /generate."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.api.openapi.request_examples import GENERATE
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Sampling
from tests.support.checkpoints import reference_greedy
from tests.support.cluster import LiveCluster
from tests.support.documented import answer_validator
from tests.support.reference_beams import generate_beams

PROMPT = "Once upon a time"
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "ignore_eos": True}


def generate(plain: LiveCluster, **fields: Any) -> httpx.Response:
    return plain.client.post(f"{plain.url}/generate", json={**BODY, **fields})


def test_the_answer_begins_with_the_prompt(plain: LiveCluster, model: Path, tokenizer: Tokenizer) -> None:
    answer = generate(plain, ignore_eos=False, stream=False)
    assert answer.status_code == 200
    expected = tokenizer.decode(reference_greedy(model, tokenizer.encode(PROMPT), 20))
    assert answer.json() == {"text": [PROMPT + expected]}


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1, "seed": 3, "logprobs": 1}], ids=["one", "several"])
def test_a_stream_is_cumulative(plain: LiveCluster, fields: dict[str, Any]) -> None:
    whole = generate(plain, **fields).json()
    *frames, end = generate(plain, stream=True, **fields).content.split(b"\0")
    assert end == b""
    told = [json.loads(frame) for frame in frames]
    assert {len(each["text"]) for each in told} == {fields.get("n", 1)}
    assert told[-1]["text"] == whole["text"]
    assert len(told) > 5
    for before, after in itertools.pairwise(told):
        assert all(b.startswith(a) for a, b in zip(before["text"], after["text"], strict=True))
    assert all(text.startswith(PROMPT) for text in told[0]["text"])
    assert [len(each["tokens"]) for each in told[-1].get("logprobs", [])] == [20] * len(whole.get("logprobs", []))


def test_16_tokens_by_default_of_a_model_without_a_name(plain: LiveCluster) -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens"}
    short = plain.client.post(f"{plain.url}/generate", json=body)
    assert short.json() == generate(plain, max_tokens=16, model="anything").json() != generate(plain).json()


def test_sampling_and_stops(plain: LiveCluster) -> None:
    text = generate(plain).json()["text"][0].removeprefix(PROMPT)
    stop = next(text[i : i + 3] for i in range(3, len(text)) if "\ufffd" not in text[i : i + 3])
    assert generate(plain, stop=[stop]).json() == {"text": [PROMPT + text[: text.index(stop)]]}
    drawn = [generate(plain, temperature=1, seed=seed).json()["text"][0] for seed in (4, 4, 5)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("name", list(GENERATE))
def test_examples_of_the_document_are_answered_as_it_says(plain: LiveCluster, name: str) -> None:
    written = plain.client.get(f"{plain.url}/openapi.json").json()
    operation = written["paths"]["/generate"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["examples"][name]["value"]
    answer = plain.client.post(f"{plain.url}/generate", json=body)
    assert answer.status_code == 200, answer.text
    media_type = answer.headers["content-type"]
    validator = answer_validator(written, operation["responses"]["200"]["content"][media_type]["schema"])
    for frame in answer.content.rstrip(b"\0").split(b"\0"):
        validator.validate(json.loads(frame))


def test_openai_routes_are_not_there(plain: LiveCluster) -> None:
    for method, route in (("POST", "completions"), ("GET", "models")):
        answer = plain.client.request(method, f"{plain.url}/v1/{route}", json=BODY)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"n": 2}, "n"),  # greedy
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_k": 10**30}, "top_k"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_bad_requests(plain: LiveCluster, fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = generate(plain, stream=stream, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert generate(plain, max_tokens=1).status_code == 200


def test_beams(plain: LiveCluster, model: Path, tokenizer: Tokenizer) -> None:
    """Beams come whole, and as a stream's last frame; each hypothesis's text follows the prompt."""
    beams = Sampling(n=3, beam_width=4, max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = [tokenizer.decode(each) for each in generate_beams(model, tokenizer.encode(PROMPT), beams)]
    fields = {"use_beam_search": True, "n": 3, "best_of": 4, "max_tokens": 8}
    whole = generate(plain, **fields)
    assert whole.status_code == 200
    assert whole.json()["text"] == [PROMPT + text for text in expected]
    frames = generate(plain, stream=True, **fields).content.split(b"\0")
    assert json.loads(frames[-2])["text"] == whole.json()["text"]


# ---- several answers, logprobs and the other sampling parameters

DRAWN: dict[str, Any] = {"prompt": PROMPT, "temperature": 1, "seed": 3, "max_tokens": 12, "ignore_eos": True}


def drawn(plain: LiveCluster, **fields: Any) -> dict[str, Any]:
    answer = generate(plain, **{**DRAWN, **fields})
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


def test_n_texts_each_with_the_prompt(plain: LiveCluster, tokenizer: Tokenizer) -> None:
    texts = drawn(plain, n=3)["text"]
    assert len(set(texts)) == 3
    assert all(text.startswith(PROMPT) for text in texts)
    assert drawn(plain, n=2)["text"] == texts[:2]
    assert list(drawn(plain)) == ["text"]
    found = drawn(plain, prompt_logprobs=1)["prompt_logprobs"]
    assert found[0] is None
    assert [next(iter(entry)) for entry in found[1:]] == [str(i) for i in tokenizer.encode(PROMPT)[1:]]


def test_sampling_parameters(plain: LiveCluster, tokenizer: Tokenizer) -> None:
    (x,) = tokenizer.encode("x")
    forced: dict[str, Any] = {"logit_bias": {str(x): 100}, "temperature": 0}
    assert drawn(plain, **forced)["text"] == [PROMPT + "x" * 12]
    assert drawn(plain, **forced, stop="x", min_tokens=4)["text"] == [PROMPT + "xxxx"]
    kept = drawn(plain, **forced, stop="x", min_tokens=4, include_stop_str_in_output=True)
    assert kept["text"] == [PROMPT + "xxxxx"]
    allowed = [tokenizer.encode(letter)[0] for letter in "abc"]
    (text,) = drawn(plain, allowed_token_ids=allowed, bad_words=["a"])["text"]
    assert set(text.removeprefix(PROMPT)) <= {"b", "c"}
    (cut,) = drawn(plain, truncate_prompt_tokens=4)["text"]
    assert cut.startswith(PROMPT[-4:])
