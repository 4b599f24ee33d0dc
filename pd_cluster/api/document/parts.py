"""The parts that every path of the OpenAPI document is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pd_cluster.api.document import examples
from pd_cluster.service.status import MAX_BODY_NBYTES

Json = dict[str, Any]
REF = "#/components/schemas/{model}"
ERRORS = {
    400: ("BadRequest", "The request cannot be served; `param` names the field."),
    404: ("NotFound", "There is no such model here."),
    410: ("Aborted", "The server's operator has ended it."),
    413: ("TooLarge", f"The body has more than {MAX_BODY_NBYTES >> 20} MiB."),
    429: (
        "Overloaded",
        "It would be served too late, or is over a limit of its API key; try again after `Retry-After` seconds.",
    ),
    500: ("Failed", "An instance was lost with the request and nobody could go on with it, or an error of the server."),
    503: ("Unavailable", "No instance can take it now; try again after `Retry-After` seconds."),
    504: ("TimedOut", "It was not done in time."),
}
OF_MESSAGES = "Messages"  # begins the names of errors in Anthropic's shape; OpenAI's is that of the front door


def operation_of(name: str, summary: str, parts: Json, tries: examples.Examples | None = None) -> Json:
    operation = {"operationId": name, "summary": summary, **parts, "responses": dict(parts["responses"])}
    if tries is not None:
        operation["requestBody"]["content"]["application/json"]["examples"] = tries
    return operation


def generates(request: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel]) -> Json:
    parts = {"requestBody": body_of(request), **answers(whole, *ERRORS)}
    ok = parts["responses"]["200"]
    ok["description"] = (
        "The answer. With `stream` it is events, each `data: ` and such a chunk, and `data: [DONE]` after the last; "
        "what goes wrong after the first is an event with an error."
    )
    # The schema of one event, as readers of such documents expect it.
    data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": ref(chunk)}]}
    ok["content"]["text/event-stream"] = {
        "schema": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", **data}}}
    }
    return parts


def with_stream(parts: Json, kind: type[BaseModel]) -> None:
    """Adds a stream of named events, of which the last one says that nothing follows."""
    ok = parts["responses"]["200"]
    ok["description"] = "The answer. With `stream` it is events, each with its `type` as its name, too."
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(kind)}
    fields = {"event": {"type": "string"}, "data": data}
    ok["content"]["text/event-stream"] = {
        "schema": {"type": "object", "required": ["event", "data"], "properties": fields}
    }


def body_of(*kinds: type[BaseModel]) -> Json:
    schema = ref(kinds[0]) if len(kinds) == 1 else {"anyOf": [ref(kind) for kind in kinds]}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def answers(kind: type[BaseModel], *errors: int, prefix: str = "") -> Json:
    found: Json = {"200": {"description": "OK", "content": json_of(kind)}}
    found |= {str(status): {"$ref": f"#/components/responses/{prefix}{ERRORS[status][0]}"} for status in errors}
    return {"responses": found}


def json_of(kind: type[BaseModel]) -> Json:
    return {"application/json": {"schema": ref(kind)}}


def ref(kind: type[BaseModel]) -> Json:
    return {"$ref": REF.format(model=kind.__name__)}
