"""Answers to requests that pool, as models for the OpenAPI document; see responses.py."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from pd_cluster.service.schema.responses import PromptTokensDetails


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingItem(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or with base64 their float32 bytes, little endian.")


class Embeddings(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PoolingUsage


class ScoreItem(BaseModel):
    object: Literal["score"]
    index: int
    score: float = Field(description="A probability or a cosine; with `use_activation` false any number.")


class Scores(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: PoolingUsage


class RerankedText(BaseModel):
    text: str


class RerankItem(BaseModel):
    index: int = Field(description="The document's place in the request.")
    relevance_score: float
    document: RerankedText | None = None


class Reranked(BaseModel):
    id: str
    model: str
    results: list[RerankItem] = Field(description="The best first.")
    usage: PoolingUsage
