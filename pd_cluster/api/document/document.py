"""The OpenAPI document of the public port: built once, from the models of requests and answers.

Knows nothing of FastAPI: the inputs and outputs of routes are repeated here, and tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from pd_cluster import __version__
from pd_cluster.api.document import examples, pooling
from pd_cluster.api.document.block_paths import messages_paths, responses_paths
from pd_cluster.api.document.descriptions import DESCRIPTIONS, LIMITS
from pd_cluster.api.document.inference_paths import inference_paths
from pd_cluster.api.document.parts import (
    ERRORS,
    OF_MESSAGES,
    REF,
    Json,
    answers,
    body_of,
    generates,
    json_of,
    operation_of,
    ref,
)
from pd_cluster.api.openai.token_routes import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from pd_cluster.service.schema import messages_answers, responses, responses_answers
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.json_body import MAX_CONTAINERS
from pd_cluster.service.schema.lax_numbers import PATTERN, number_fields
from pd_cluster.service.schema.messages_protocol import MessagesPrompt, MessagesRequest
from pd_cluster.service.schema.protocol import HARMLESS, CompletionRequest, GenerateRequest
from pd_cluster.service.schema.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.tokens_protocol import BatchChatRequest, TokensRequest
from pd_cluster.service.status import MAX_BODY_NBYTES

KEY = "api_key"
NUMBER_IN_STRING = {"type": "string", "pattern": PATTERN}
PROBES = ("/health", "/ping", "/live")
REQUESTS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    DetokenizeRequest,
    *pooling.REQUESTS,
    MessagesPrompt,
    MessagesRequest,
    ResponsesRequest,
    TokensRequest,
    BatchChatRequest,
)
ANSWERS: tuple[type[BaseModel], ...] = (
    responses.ChatCompletion,
    responses.ChatCompletionChunk,
    responses.Completion,
    responses.CompletionChunk,
    responses.Tokenized,
    responses.Detokenized,
    responses.ModelList,
    responses.Model,
    *pooling.ANSWERS,
    messages_answers.MessageAnswer,
    messages_answers.MessageEvent,
    messages_answers.MessageError,
    messages_answers.TokensCount,
    responses_answers.ResponseObject,
    responses_answers.ResponseEvent,
    responses_answers.ResponseInputTokens,
    responses_answers.ResponseDeleted,
    responses_answers.InputItems,
    responses.GeneratedTokens,
    responses.GeneratedTokensChunk,
    responses.RenderedPrompt,
)
COMMON: tuple[type[BaseModel], ...] = (
    responses.Error,
    responses.Health,
    responses.Alive,
    responses.ServerLoad,
    responses.Version,
)
OF_ALL = (
    f"A body has at most {MAX_BODY_NBYTES >> 20} MiB, and {MAX_CONTAINERS:,} arrays and objects. Chats and completions "
    f"take these without effect: {', '.join(sorted(HARMLESS))}."
)


def document(model: str, openai: bool, has_keys: bool, has_tools: bool = False) -> Json:
    """Builds the document. `model`: the name used in examples. `has_keys`: clients need an API key.

    `has_tools`: the model accepts tools.
    """
    own = (*REQUESTS, *ANSWERS) if openai else (GenerateRequest, responses.Generated)
    paths = _openai_paths(model, has_tools) | _pooling_paths(model) if openai else _plain_paths()
    paths |= _common_paths()
    written: Json = {
        "openapi": "3.1.0",
        "info": {"title": "pd-cluster", "version": __version__, "description": OF_ALL},
        "paths": paths,
        "components": {"schemas": _schemas((*own, *COMMON)), "responses": _error_responses(openai, has_keys)},
    }
    if has_keys:
        written["components"]["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
        written["security"] = [{KEY: []}]
        for operation in _operations(paths):
            operation["responses"]["401"] = {"$ref": "#/components/responses/Unauthorized"}
        for path in PROBES:
            paths[path]["get"]["security"] = []
            del paths[path]["get"]["responses"]["401"]
    return written


# ---- operations


def _openai_paths(model: str, has_tools: bool) -> Json:
    chat = generates(ChatCompletionRequest, responses.ChatCompletion, responses.ChatCompletionChunk)
    completions = generates(CompletionRequest, responses.Completion, responses.CompletionChunk)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    forms = (TokenizeCompletionRequest, TokenizeChatRequest)
    return {
        "/v1/chat/completions": {
            "post": operation_of("chat", "Answer a conversation.", chat, examples.chat_examples(model, has_tools))
        },
        "/v1/completions": {
            "post": operation_of("completions", "Go on with a text.", completions, examples.completion_examples(model))
        },
        "/v1/models": {"get": operation_of("models", "The model, by all its names.", answers(responses.ModelList))},
        "/v1/models/{name}": {
            "get": {
                **operation_of("model", "One name of the model.", answers(responses.Model, 404)),
                "parameters": [name],
            }
        },
        "/tokenize": {
            "post": operation_of(
                "tokenize",
                "The token ids of a text, or of a conversation.",
                {"requestBody": body_of(*forms), **answers(responses.Tokenized, 400, 404, 413, 429)},
                examples.tokenize_examples(model),
            )
        },
        "/detokenize": {
            "post": operation_of(
                "detokenize",
                "The text of token ids, special tokens included.",
                {"requestBody": body_of(DetokenizeRequest), **answers(responses.Detokenized, 400, 404, 413, 429)},
                examples.detokenize_examples(model),
            )
        },
        **responses_paths(model),
        **messages_paths(model),
        **inference_paths(model),
    }


def _pooling_paths(model: str) -> Json:
    return {
        path: {"post": operation_of(name, summary, {"requestBody": body_of(asked), **answers(answer, *ERRORS)}, tries)}
        for path, (name, summary, asked, answer, tries) in pooling.pooling_operations(model).items()
    }


def _plain_paths() -> Json:
    generate = {"requestBody": body_of(GenerateRequest), **answers(responses.Generated, *ERRORS)}
    ok = generate["responses"]["200"]
    ok["description"] = "The texts. With `stream` such an object for each new piece of text, with a NUL after each."
    return {
        "/generate": {"post": operation_of("generate", "Go on with a text.", generate, examples.generate_examples())}
    }


def _common_paths() -> Json:
    health = answers(responses.Health)
    health["responses"]["503"] = {"description": "Requests cannot be served.", "content": json_of(responses.Health)}
    text = {"responses": {"200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}}}
    alive = "Whether requests can be served."
    return {
        "/health": {"get": operation_of("health", alive, health)},
        "/ping": {"get": operation_of("ping", alive, health), "post": operation_of("ping_post", alive, health)},
        "/live": {"get": operation_of("live", "Whether this process answers.", answers(responses.Alive))},
        "/metrics": {"get": operation_of("metrics", "For Prometheus.", text)},
        "/load": {"get": operation_of("load", "Requests in flight.", answers(responses.ServerLoad))},
        "/version": {"get": operation_of("version", "The server's version.", answers(responses.Version))},
    }


def _operations(paths: Json) -> Iterator[Json]:
    for operations in paths.values():
        yield from operations.values()


# ---- components


class _Schemas(GenerateJsonSchema):
    """Component schemas without titles that repeat a field's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schemas(kinds: tuple[type[BaseModel], ...]) -> Json:
    _, written = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=REF, schema_generator=_Schemas
    )
    found: Json = written["$defs"]
    requests: tuple[type[BaseModel], ...] = (*REQUESTS, GenerateRequest)
    asked = {kind.__name__ for kind in requests}
    for schema in (found[name] for name in asked & found.keys()):
        for name, field in schema["properties"].items():
            _describe(name, field)
    for request in requests:
        if request.__name__ in found:
            for name in number_fields(request):
                _also_in_strings(found[request.__name__]["properties"][name])
    return found


def _also_in_strings(field: Json) -> None:
    """Documents that a number may be in a string, by itself or as an item."""
    if field.get("type") in ("integer", "number"):
        field["anyOf"] = [{name: field.pop(name) for name in [*field] if name != "description"}]
    for each in field.get("anyOf", [field]):
        if each.get("type") in ("array", "object"):
            item = "items" if each["type"] == "array" else "additionalProperties"
            each[item] = {"anyOf": [each[item], NUMBER_IN_STRING]}
        elif each.get("type") in ("integer", "number") and NUMBER_IN_STRING not in field["anyOf"]:
            field["anyOf"].append(NUMBER_IN_STRING)


def _describe(name: str, field: Json) -> None:
    if name in DESCRIPTIONS:
        field.setdefault("description", DESCRIPTIONS[name])
    for each in field.get("anyOf", [field]):
        each.update(LIMITS.get(name, {}).get(each.get("type"), {}))


def _error_responses(openai: bool, has_keys: bool) -> Json:
    either = {"anyOf": [ref(messages_answers.MessageError), ref(responses.Error)]}
    shapes = {"": ref(responses.Error), **({OF_MESSAGES: either} if openai else {})}
    found = {
        f"{prefix}{name}": {"description": why, "content": {"application/json": {"schema": schema}}}
        for prefix, schema in shapes.items()
        for name, why in ERRORS.values()
    }
    if has_keys:
        header = {"WWW-Authenticate": {"schema": {"type": "string"}}}
        why = "No API key, or a wrong one."
        content = {"application/json": {"schema": either if openai else ref(responses.Error)}}
        found["Unauthorized"] = {"description": why, "headers": header, "content": content}
    return found
