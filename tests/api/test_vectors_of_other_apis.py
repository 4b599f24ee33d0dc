"""/pooling, Cohere's /v2/embed, and truncation of scored texts, against the equivalent routes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.support.asking import post, right
from tests.support.cluster import LiveCluster

TEXTS = ["The sea is wide.", "Stones sink", "word " * 30]


def vectors(cluster: LiveCluster, texts: list[Any], **more: Any) -> list[list[float]]:
    return [each["embedding"] for each in right(post(cluster, "/v1/embeddings", input=texts, **more))["data"]]


def test_pooling_gives_the_embeddings(cluster: LiveCluster) -> None:
    for more in ({}, {"use_activation": False}, {"dimensions": 8}, {"encoding_format": "base64"}):
        answer = right(post(cluster, "/pooling", input=TEXTS, task="embed", **more))
        assert [each["data"] for each in answer["data"]] == vectors(cluster, TEXTS, **more)
    assert answer["id"].startswith("pool-")
    assert {each["object"] for each in answer["data"]} == {"pooling"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "task": "token_embed"}, "task"),
        ({"data": {}}, "data"),
        ({"messages": []}, "messages"),
        ({"input": "a", "padding": "max_length"}, "padding"),
    ],
)
def test_pooling_refuses_by_name(cluster: LiveCluster, body: dict[str, Any], param: str) -> None:
    answer = post(cluster, "/pooling", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(param)


def test_only_a_classifier_classifies(cluster: LiveCluster) -> None:
    for path, more in (("/classify", {}), ("/pooling", {"task": "classify"})):
        answer = post(cluster, path, input="a", **more)
        assert answer.status_code == 400
        assert "/generative_scoring" in answer.json()["error"]["message"]


def test_cohere_s_forms_of_a_vector(cluster: LiveCluster) -> None:
    forms = ["float", "base64", "binary", "ubinary"]
    answer = right(post(cluster, "/v2/embed", texts=TEXTS, input_type="search_document", embedding_types=forms))
    expected = vectors(cluster, TEXTS)
    found = answer["embeddings"]
    assert found["float"] == expected
    assert [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in found["base64"]] == expected
    signs = np.packbits(np.array(expected) >= 0, axis=-1)
    assert found["ubinary"] == signs.tolist()
    assert found["binary"] == (signs.astype(int) - 128).tolist()
    assert (answer["texts"], answer["response_type"]) == (TEXTS, "embeddings_by_type")
    assert answer["meta"]["api_version"] == {"version": "2"}
    short = right(post(cluster, "/v2/embed", texts=TEXTS, output_dimension=8))
    assert short["embeddings"] == {"float": vectors(cluster, TEXTS, dimensions=8)}
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    again = right(post(cluster, "/v2/embed", inputs=inputs))
    assert (again["embeddings"]["float"], again.get("texts")) == (expected, None)


def test_cohere_s_truncation(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXTS[0])
    for side, cut in (("END", ids[:5]), ("START", ids[-5:])):
        found = right(post(cluster, "/v2/embed", texts=TEXTS[:1], truncate=side, max_tokens=5))
        assert found["embeddings"]["float"] == vectors(cluster, [cut])
        assert found["meta"]["billed_units"] == {"input_tokens": 5}
    right(post(cluster, "/v2/embed", texts=["a" * 4000]))  # END is the default
    side = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
    assert vectors(cluster, TEXTS[:1], **side) == vectors(cluster, [ids[:5]])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": ["a"], "input_type": "nonexistent"}, "input_type"),
        ({"images": ["data:image/png;base64,AA"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs"),
        ({}, "texts"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["hello there"], "truncate": "NONE", "max_tokens": 1}, "max_tokens"),
        ({"texts": ["a" * 4000], "truncate": "NONE"}, "texts"),
    ],
)
def test_cohere_s_refusals(cluster: LiveCluster, body: dict[str, Any], param: str) -> None:
    answer = post(cluster, "/v2/embed", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_texts_of_a_score_are_cut_behind_their_tokens(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    query, document = "where is the sea", "the sea is wide and deep"
    short = [tokenizer.decode(tokenizer.encode(text, False)[:4]) for text in (query, document)]
    assert short[0] != query
    assert query.startswith(short[0])
    expected = right(post(cluster, "/score", queries=short[0], documents=[short[1]]))["data"]
    limits = {"max_tokens_per_query": 4, "max_tokens_per_doc": 4}
    assert right(post(cluster, "/score", queries=query, documents=[document], **limits))["data"] == expected
    (ranked,) = right(post(cluster, "/rerank", query=query, documents=[document], **limits))["results"]
    assert ranked["relevance_score"] == expected[0]["score"]
    assert ranked["document"]["text"] == document
    whole = right(post(cluster, "/score", queries=query, documents=[document]))["data"]
    none = {"max_tokens_per_query": 0, "max_tokens_per_doc": 99}
    assert right(post(cluster, "/score", queries=query, documents=[document], **none))["data"] == whole != expected
