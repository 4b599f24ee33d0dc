"""/v1/embeddings, /score and /rerank with OpenAI's client, against transformers' hidden states."""

from __future__ import annotations

import base64
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Pooling
from tests.support.cluster import LiveCluster, in_parallel
from tests.support.vectors import reference_vector

TEXTS = ["The sea is wide.", "Stones sink", "a"]
IDS = [[5, 6, 7, 8], [9] * 40, [10, 11]]


def near(found: Any, expected: Any) -> bool:
    return bool(np.allclose(found, expected, atol=1e-5))


def post(cluster: LiveCluster, path: str, body: Any) -> Any:
    return cluster.client.post(f"{cluster.url}{path}", json=body)


def test_texts_by_openai_s_client(client: openai.OpenAI, model: Path, tokenizer: Tokenizer) -> None:
    """OpenAI's client requests base64 by default."""
    answer = client.embeddings.create(model=str(model), input=TEXTS)
    assert [each.index for each in answer.data] == [0, 1, 2]
    ids = [tokenizer.encode(text) for text in TEXTS]
    for each, prompt in zip(answer.data, ids, strict=True):
        assert near(each.embedding, reference_vector(model, prompt, Pooling()))
        assert math.hypot(*each.embedding) == pytest.approx(1)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


@pytest.mark.parametrize("format", ["float", "base64"])
def test_token_ids_dimensions_and_formats(cluster: LiveCluster, model: Path, format: str) -> None:
    body = {"input": IDS, "encoding_format": format, "dimensions": 7, "normalize": False}
    data = post(cluster, "/v1/embeddings", body).json()["data"]
    for each, prompt in zip(data, IDS, strict=True):
        values = each["embedding"]
        if format == "base64":
            values = np.frombuffer(base64.b64decode(values), "<f4")
        expected = reference_vector(model, prompt, Pooling(dimensions=7, normalizes=False))
        assert len(values) == 7
        assert np.allclose(values, expected, atol=1e-4)


def test_one_input_alone_is_the_same_to_the_bit(cluster: LiveCluster) -> None:
    together = post(cluster, "/v1/embeddings", {"input": [*IDS, [3] * 90]}).json()["data"]
    for at, prompt in enumerate(IDS):
        (alone,) = post(cluster, "/v1/embeddings", {"input": prompt}).json()["data"]
        assert alone["embedding"] == together[at]["embedding"]


def test_nothing_is_decoded_and_nothing_stays(cluster: LiveCluster) -> None:
    """Only the prefill instance works; no KV cache is sent, and nothing stays held."""
    cluster.assert_home()  # earlier tests' KV cache may still be in transit
    before = cluster.instance("decode-0")
    errors = in_parallel([lambda: post(cluster, "/v1/embeddings", {"input": IDS}).json()["data"]] * 8, concurrency=8)
    assert not errors, errors[0]
    cluster.assert_home()
    after = cluster.instance("decode-0")
    assert after["kv_received_nbytes"] == before["kv_received_nbytes"]
    answer = post(cluster, "/v1/embeddings", {"input": "x"})
    assert answer.headers["x-pd-served-by"].startswith("prefill-0")


def test_scores_are_cosines(cluster: LiveCluster, model: Path, tokenizer: Tokenizer) -> None:
    vectors = {text: reference_vector(model, tokenizer.encode(text), Pooling()) for text in TEXTS}
    for path in ("/score", "/v1/score"):
        body = post(cluster, path, {"text_1": TEXTS[0], "text_2": TEXTS}).json()
        assert [each["index"] for each in body["data"]] == [0, 1, 2]
        assert near([each["score"] for each in body["data"]], [vectors[TEXTS[0]] @ vectors[text] for text in TEXTS])
    body = post(cluster, "/score", {"text_1": TEXTS[:2], "text_2": TEXTS[1:]}).json()
    expected = [vectors[a] @ vectors[b] for a, b in itertools.pairwise(TEXTS)]
    assert near([each["score"] for each in body["data"]], expected)


def test_rerank_puts_the_nearest_first(cluster: LiveCluster, model: Path, tokenizer: Tokenizer) -> None:
    vectors = [reference_vector(model, tokenizer.encode(text), Pooling()) for text in TEXTS]
    query = TEXTS[1]
    expected = [float(vectors[1] @ vector) for vector in vectors]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = post(cluster, path, {"query": query, "documents": TEXTS}).json()
        results = body["results"]
        assert [each["index"] for each in results] == sorted(range(3), key=lambda at: -expected[at])
        assert near([each["relevance_score"] for each in results], sorted(expected, reverse=True))
        assert [each["document"]["text"] for each in results] == [TEXTS[each["index"]] for each in results]
        assert body["usage"]["total_tokens"] > 0
    few = post(cluster, "/rerank", {"query": query, "documents": TEXTS, "top_n": 1, "return_documents": False}).json()
    (best,) = few["results"]
    assert best["index"] == 1
    assert "document" not in best


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "input: empty"),
        ("/v1/embeddings", {"input": [[]]}, "input: no tokens"),
        ("/v1/embeddings", {"input": [[1, 10**8]]}, "input: token ids must be in 0 to"),
        ("/v1/embeddings", {"input": [[1], [1] * 300]}, "input[1]: the prompt is too long: 300 tokens"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input: 2049 are more than the 2048"),
        ("/v1/embeddings", {"input": "x", "dimensions": 65}, "dimensions 65: this model's vectors have 64"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format: 'hex'"),
        ("/v1/embeddings", {"input": "x", "priority": 3}, "priority: 3; this server ignores priorities"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1: 2 texts, but text_2 has 3"),
        ("/rerank", {"query": "a", "documents": ["b", 5]}, "documents.1"),
    ],
)
def test_what_is_wrong_is_named(cluster: LiveCluster, path: str, body: Any, message: str) -> None:
    answer = post(cluster, path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def test_an_unknown_model(client: openai.OpenAI, cluster: LiveCluster) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.embeddings.create(model="other", input="x")
    assert post(cluster, "/rerank", {"model": "other", "query": "a", "documents": ["b"]}).status_code == 404
