"""The operations of the OpenAPI document whose prompts are computed and not continued."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pd_cluster.api.document.examples import Examples, example
from pd_cluster.service.schema import pooling_responses as answers
from pd_cluster.service.schema.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest

REQUESTS: tuple[type[BaseModel], ...] = (EmbeddingRequest, ScoreRequest, RerankRequest)
ANSWERS: tuple[type[BaseModel], ...] = (answers.Embeddings, answers.Scores, answers.Reranked)
Operation = tuple[str, str, type[BaseModel], type[BaseModel], Examples]  # name, summary, request, answer, examples


def pooling_operations(model: str) -> dict[str, Operation]:
    """Returns path -> operation."""
    found: dict[str, Operation] = {
        "/v1/embeddings": (
            "embeddings",
            "The vectors of texts.",
            EmbeddingRequest,
            answers.Embeddings,
            embedding_examples(model),
        )
    }
    for path in ("/score", "/v1/score"):
        summary = "How well documents answer a query, or how near texts are to each other."
        found[path] = (named(path), summary, ScoreRequest, answers.Scores, score_examples(model))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        summary = "Documents, those that answer a query best first."
        found[path] = (named(path), summary, RerankRequest, answers.Reranked, rerank_examples(model))
    return found


def named(path: str) -> str:
    return path.strip("/").replace("/", "_")


def embedding_examples(model: str) -> Examples:
    plain: dict[str, Any] = {"model": model, "input": "The capital of France is Paris."}
    return {
        "plain": example("A text", plain),
        "several": example("Several, as bytes", {**plain, "input": ["one", "two"], "encoding_format": "base64"}),
        "token_ids": example("Token ids, and few numbers", {**plain, "input": [1, 2, 3], "dimensions": 8}),
    }


def score_examples(model: str) -> Examples:
    pair = {"queries": "Where is Paris?", "documents": ["Paris is in France.", "Cats purr."]}
    return {"plain": example("Two documents", {"model": model, **pair})}


def rerank_examples(model: str) -> Examples:
    pair = {"query": "Where is Paris?", "documents": ["Cats purr.", "Paris is in France."], "top_n": 1}
    return {"plain": example("The better of two", {"model": model, **pair})}
