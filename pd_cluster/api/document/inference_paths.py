"""The paths of the OpenAPI document for routers and frameworks: tokens in and out, rendered prompts, batches."""

from __future__ import annotations

from pydantic import BaseModel

from pd_cluster.api.document import examples
from pd_cluster.api.document.parts import ERRORS, Json, answers, body_of, generates, operation_of, ref
from pd_cluster.service.schema import pooling_responses, responses
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from pd_cluster.service.schema.protocol import CompletionRequest
from pd_cluster.service.schema.tokens_protocol import BatchChatRequest, TokensRequest

INVOKED = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest)
INVOKED_ANSWERS: tuple[type[BaseModel], ...] = (
    *(responses.ChatCompletion, responses.Completion),
    *(pooling_responses.Embeddings, pooling_responses.Reranked, pooling_responses.Scores),
)


def inference_paths(model: str) -> Json:
    tokens = generates(TokensRequest, responses.GeneratedTokens, responses.GeneratedTokensChunk)
    batch = {"requestBody": body_of(BatchChatRequest), **answers(responses.ChatCompletion, *ERRORS)}
    return {
        "/inference/v1/generate": {
            "post": operation_of("generate_tokens", "Tokens in, tokens out.", tokens, examples.tokens_examples(model))
        },
        "/v1/chat/completions/batch": {
            "post": operation_of(
                "chat_batch", "Answer several conversations, each by a choice.", batch, examples.batch_examples(model)
            )
        },
        "/v1/chat/completions/render": {
            "post": operation_of(
                "render_chat",
                "The body of /inference/v1/generate that answers this conversation.",
                _rendered(ChatCompletionRequest, is_several=False),
                {"plain": examples.chat_examples(model, has_tools=False)["plain"]},
            )
        },
        "/v1/completions/render": {
            "post": operation_of(
                "render_completion",
                "The body of /inference/v1/generate for each prompt.",
                _rendered(CompletionRequest, is_several=True),
                {"plain": examples.completion_examples(model)["plain"]},
            )
        },
        "/invocations": {"post": operation_of("invocations", *_invocations(), examples.invocation_examples(model))},
    }


def _rendered(request: type[BaseModel], is_several: bool) -> Json:
    parts = {"requestBody": body_of(request), **answers(responses.RenderedPrompt, *ERRORS)}
    if is_several:
        schema = {"type": "array", "items": ref(responses.RenderedPrompt)}
        parts["responses"]["200"]["content"]["application/json"]["schema"] = schema
    return parts


def _invocations() -> tuple[str, Json]:
    parts = generates(ChatCompletionRequest, responses.ChatCompletion, responses.ChatCompletionChunk)
    parts["requestBody"] = body_of(*INVOKED)
    content = parts["responses"]["200"]["content"]
    content["application/json"]["schema"] = {"anyOf": [ref(kind) for kind in INVOKED_ANSWERS]}
    event = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"][1]
    event["contentSchema"] = {"anyOf": [ref(responses.ChatCompletionChunk), ref(responses.CompletionChunk)]}
    return "Answer whichever of these requests the body is.", parts
