"""The OpenAPI document of the public port: built once, from the models of requests and answers.

Knows nothing of FastAPI: the inputs and outputs of routes are repeated here, and tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from pd_cluster import __version__
from pd_cluster.api.document import examples
from pd_cluster.api.document.descriptions import DESCRIPTIONS, LIMITS
from pd_cluster.api.openai.token_routes import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from pd_cluster.service.schema import responses
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.embedding_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from pd_cluster.service.schema.parse import MAX_CONTAINERS
from pd_cluster.service.schema.protocol import CompletionRequest, GenerateRequest
from pd_cluster.service.status import MAX_BODY_NBYTES

Json = dict[str, Any]
REF = "#/components/schemas/{model}"
KEY = "api_key"
PROBES = ("/health", "/ping", "/live")
REQUESTS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ScoreRequest,
    RerankRequest,
)
ANSWERS: tuple[type[BaseModel], ...] = (
    responses.ChatCompletion,
    responses.ChatCompletionChunk,
    responses.Completion,
    responses.CompletionChunk,
    responses.Tokenized,
    responses.Detokenized,
    responses.EmbeddingList,
    responses.ScoreList,
    responses.Reranked,
    responses.ModelList,
    responses.Model,
)
COMMON: tuple[type[BaseModel], ...] = (
    responses.Error,
    responses.Health,
    responses.Alive,
    responses.ServerLoad,
    responses.Version,
)
ERRORS = {
    400: ("BadRequest", "The request cannot be served; `param` names the field."),
    404: ("NotFound", "There is no such model here."),
    413: ("TooLarge", f"The body has more than {MAX_BODY_NBYTES >> 20} MiB."),
    429: (
        "Overloaded",
        "It would be served too late, or is over a limit of its API key; try again after `Retry-After` seconds.",
    ),
    500: ("Failed", "An instance was lost with the request and nobody could go on with it, or an error of the server."),
    503: ("Unavailable", "No instance can take it now; try again after `Retry-After` seconds."),
    504: ("TimedOut", "It was not done in time."),
}
LIMITS_OF_ALL = f"A body has at most {MAX_BODY_NBYTES >> 20} MiB, and {MAX_CONTAINERS:,} arrays and objects."


def document(model: str, openai: bool, has_keys: bool, has_tools: bool = False) -> Json:
    """Builds the document. `model`: the name used in examples. `has_keys`: clients need an API key.

    `has_tools`: the model accepts tools.
    """
    own = (*REQUESTS, *ANSWERS) if openai else (GenerateRequest, responses.Generated)
    paths = {**(_openai_paths(model, has_tools) if openai else _plain_paths()), **_common_paths()}
    written: Json = {
        "openapi": "3.1.0",
        "info": {"title": "pd-cluster", "version": __version__, "description": LIMITS_OF_ALL},
        "paths": paths,
        "components": {"schemas": _schemas((*own, *COMMON)), "responses": _error_responses(has_keys)},
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
    chat = _generates(ChatCompletionRequest, responses.ChatCompletion, responses.ChatCompletionChunk)
    completions = _generates(CompletionRequest, responses.Completion, responses.CompletionChunk)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    forms = (TokenizeCompletionRequest, TokenizeChatRequest)
    return {
        "/v1/chat/completions": {
            "post": _operation("chat", "Answer a conversation.", chat, examples.chat_examples(model, has_tools))
        },
        "/v1/completions": {
            "post": _operation("completions", "Go on with a text.", completions, examples.completion_examples(model))
        },
        **_pooling_paths(model),
        "/v1/models": {"get": _operation("models", "The model, by all its names.", _answers(responses.ModelList))},
        "/v1/models/{name}": {
            "get": {
                **_operation("model", "One name of the model.", _answers(responses.Model, 404)),
                "parameters": [name],
            }
        },
        "/tokenize": {
            "post": _operation(
                "tokenize",
                "The token ids of a text, or of a conversation.",
                {"requestBody": _body(*forms), **_answers(responses.Tokenized, 400, 404, 413, 429)},
                examples.tokenize_examples(model),
            )
        },
        "/detokenize": {
            "post": _operation(
                "detokenize",
                "The text of token ids, special tokens included.",
                {"requestBody": _body(DetokenizeRequest), **_answers(responses.Detokenized, 400, 404, 413, 429)},
                examples.detokenize_examples(model),
            )
        },
    }


def _pooling_paths(model: str) -> Json:
    """Routes with several paths have an operation for each."""
    embeddings = ("embeddings", "Texts or token ids as vectors.", EmbeddingRequest, responses.EmbeddingList)
    score = ("score", "How near texts are to each other.", ScoreRequest, responses.ScoreList)
    rerank = ("rerank", "Documents, those that are nearest to a query first.", RerankRequest, responses.Reranked)
    found: Json = {}
    for (name, summary, asked, answer), paths in (
        (embeddings, ("/v1/embeddings",)),
        (score, ("/score", "/v1/score")),
        (rerank, ("/rerank", "/v1/rerank", "/v2/rerank")),
    ):
        for path in paths:
            parts = {"requestBody": _body(asked), **_answers(answer, *ERRORS)}
            tries = examples.pooling_examples(model)[name]
            found[path] = {"post": _operation(path.strip("/").replace("/", "_"), summary, parts, tries)}
    return found


def _plain_paths() -> Json:
    generate = {"requestBody": _body(GenerateRequest), **_answers(responses.Generated, *ERRORS)}
    ok = generate["responses"]["200"]
    ok["description"] = "The texts. With `stream` such an object for each new piece of text, with a NUL after each."
    return {"/generate": {"post": _operation("generate", "Go on with a text.", generate, examples.generate_examples())}}


def _common_paths() -> Json:
    health = _answers(responses.Health)
    health["responses"]["503"] = {"description": "Requests cannot be served.", "content": _json(responses.Health)}
    text = {"responses": {"200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}}}
    alive = "Whether requests can be served."
    return {
        "/health": {"get": _operation("health", alive, health)},
        "/ping": {"get": _operation("ping", alive, health), "post": _operation("ping_post", alive, health)},
        "/live": {"get": _operation("live", "Whether this process answers.", _answers(responses.Alive))},
        "/metrics": {"get": _operation("metrics", "For Prometheus.", text)},
        "/load": {"get": _operation("load", "Requests in flight.", _answers(responses.ServerLoad))},
        "/version": {"get": _operation("version", "The server's version.", _answers(responses.Version))},
    }


def _operation(name: str, summary: str, parts: Json, tries: examples.Examples | None = None) -> Json:
    operation = {"operationId": name, "summary": summary, **parts, "responses": dict(parts["responses"])}
    if tries is not None:
        operation["requestBody"]["content"]["application/json"]["examples"] = tries
    return operation


def _generates(request: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel]) -> Json:
    parts = {"requestBody": _body(request), **_answers(whole, *ERRORS)}
    ok = parts["responses"]["200"]
    ok["description"] = (
        "The answer. With `stream` it is events, each `data: ` and such a chunk, and `data: [DONE]` after the last; "
        "what goes wrong after the first is an event with an error."
    )
    # The schema of one event, as readers of such documents expect it.
    data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": _ref(chunk)}]}
    ok["content"]["text/event-stream"] = {
        "schema": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", **data}}}
    }
    return parts


def _body(*kinds: type[BaseModel]) -> Json:
    schema = _ref(kinds[0]) if len(kinds) == 1 else {"anyOf": [_ref(kind) for kind in kinds]}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _answers(kind: type[BaseModel], *errors: int) -> Json:
    found: Json = {"200": {"description": "OK", "content": _json(kind)}}
    found |= {str(status): {"$ref": f"#/components/responses/{ERRORS[status][0]}"} for status in errors}
    return {"responses": found}


def _json(kind: type[BaseModel]) -> Json:
    return {"application/json": {"schema": _ref(kind)}}


def _ref(kind: type[BaseModel]) -> Json:
    return {"$ref": REF.format(model=kind.__name__)}


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
    return found


def _describe(name: str, field: Json) -> None:
    if name in DESCRIPTIONS:
        field["description"] = DESCRIPTIONS[name]
    for each in field.get("anyOf", [field]):
        each.update(LIMITS.get(name, {}).get(each.get("type"), {}))


def _error_responses(has_keys: bool) -> Json:
    found = {name: {"description": why, "content": _json(responses.Error)} for name, why in ERRORS.values()}
    if has_keys:
        header = {"WWW-Authenticate": {"schema": {"type": "string"}}}
        why = "No API key, or a wrong one."
        found["Unauthorized"] = {"description": why, "headers": header, "content": _json(responses.Error)}
    return found
