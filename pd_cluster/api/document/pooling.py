"""The operations of the OpenAPI document whose prompts are computed and not continued."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pd_cluster.api.document.examples import Examples, example
from pd_cluster.service.schema import pooling_responses as answers
from pd_cluster.service.schema.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest

EMBEDDING_MODELS: tuple[type[BaseModel], ...] = (EmbeddingRequest, answers.Embeddings)
SCORE_MODELS: tuple[type[BaseModel], ...] = (ScoreRequest, answers.Scores, RerankRequest, answers.Reranked)
Operation = tuple[str, str, type[BaseModel], type[BaseModel], Examples]  # name, summary, request, answer, examples


def pooling_operations(model: str, has_scores: bool) -> dict[str, Operation]:
    """Returns path -> operation. `has_scores`: the model can score."""
    found: dict[str, Operation] = {
        "/v1/embeddings": (
            "embeddings",
            "The vectors of texts.",
            EmbeddingRequest,
            answers.Embeddings,
            embedding_examples(model),
        )
    }
    for prefix, name in (("", ""), ("/v1", "_v1")) if has_scores else ():
        scores, ranks = score_examples(model), rerank_examples(model)
        found[f"{prefix}/score"] = (
            f"score{name}",
            "How well documents answer a query, 0 to 1.",
            ScoreRequest,
            answers.Scores,
            scores,
        )
        found[f"{prefix}/rerank"] = (
            f"rerank{name}",
            "Documents by how well they answer a query.",
            RerankRequest,
            answers.Reranked,
            ranks,
        )
    return found


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
