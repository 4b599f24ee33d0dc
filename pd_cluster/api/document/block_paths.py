"""The paths of /v1/responses and /v1/messages in the OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel

from pd_cluster.api.document import examples
from pd_cluster.api.document.parts import ERRORS, OF_MESSAGES, Json, answers, body_of, operation_of, with_stream
from pd_cluster.api.openai.response_routes import DEFAULT_LISTED, MAX_LISTED
from pd_cluster.service.schema import messages_answers, responses_answers
from pd_cluster.service.schema.messages_protocol import MessagesPrompt, MessagesRequest
from pd_cluster.service.schema.responses_protocol import ResponsesRequest


def responses_paths(model: str) -> Json:
    parts = {"requestBody": body_of(ResponsesRequest), **answers(responses_answers.ResponseObject, *ERRORS)}
    with_stream(parts, responses_answers.ResponseEvent)
    summary = "Answer items of a conversation with items."
    create = operation_of("responses", summary, parts, examples.responses_examples(model))
    name = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    text = {"type": "string"}
    schemas = {
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
        "after": text,
    }
    queries = [{"name": field, "in": "query", "schema": schema} for field, schema in schemas.items()]

    def kept(name_of: str, summary: str, answer: type[BaseModel], *queries: Json) -> Json:
        return operation_of(name_of, summary, answers(answer, 400, 404)) | {"parameters": [name, *queries]}

    one = responses_answers.ResponseObject
    cancel = kept("cancel_response", "Cancel a response: none runs in the background, so there is none to cancel.", one)
    compact = operation_of("compact", "Shorten a conversation: not supported here.", answers(one, 400, 413))
    for refused in (cancel, compact):
        del refused["responses"]["200"]
    return {
        "/v1/responses": {"post": create},
        "/v1/responses/input_tokens": {
            "post": operation_of(
                "count_input_tokens",
                "The number of tokens of the prompt that /v1/responses would compute.",
                {
                    "requestBody": body_of(ResponsesRequest),
                    **answers(responses_answers.ResponseInputTokens, 400, 404, 413, 429),
                },
                {"plain": examples.responses_examples(model)["plain"]},
            )
        },
        "/v1/responses/compact": {"post": compact},
        "/v1/responses/{response_id}": {
            "get": kept("response", "A response that was kept (--response-store).", one),
            "delete": kept("delete_response", "Forget a response.", responses_answers.ResponseDeleted),
        },
        "/v1/responses/{response_id}/cancel": {"post": cancel},
        "/v1/responses/{response_id}/input_items": {
            "get": kept("input_items", "What a response answered.", responses_answers.InputItems, *queries)
        },
    }


def messages_paths(model: str) -> Json:
    """Anthropic's routes, whose errors have a shape of their own."""
    messages = {
        "requestBody": body_of(MessagesRequest),
        **answers(messages_answers.MessageAnswer, *ERRORS, prefix=OF_MESSAGES),
    }
    with_stream(messages, messages_answers.MessageEvent)
    counted = answers(messages_answers.TokensCount, 400, 404, 413, 429, prefix=OF_MESSAGES)
    count = {"requestBody": body_of(MessagesPrompt), **counted}
    tries = examples.messages_examples(model)
    summary = "Answer a conversation, in Anthropic's form."
    return {
        "/v1/messages": {"post": operation_of("messages", summary, messages, tries)},
        "/v1/messages/count_tokens": {
            "post": operation_of(
                "count_tokens", "The number of a conversation's tokens.", count, examples.count_examples(model)
            )
        },
    }
