"""Declares a route's body, answers and errors next to the route. FastAPI adds the path, methods and names.

openapi_document.py describes the types when /openapi.json is first requested.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel

from pd_cluster.api.openapi.request_examples import Examples

Json = dict[str, Any]
Kind = type[BaseModel] | type[msgspec.Struct]
Kinds = Kind | tuple[Kind, ...] | list[Kind]  # a tuple: one of its types; a list: an array of them
REF = "#/components/schemas/{name}"
JSON = "application/json"
FAILURES = (400, 404, 410, 413, 429, 500, 503, 504)  # statuses of routes that use instances
READ_FAILURES = (400, 404, 413, 429)  # statuses of routes that use no instance
CHUNKED = (
    "The answer. With `stream`, a stream of events: each is `data: ` and such a chunk, and the last is `data: [DONE]`. "
    "An error after the first event is an event, too."
)
IN_EVENTS = "The answer. With `stream`, a stream of events, named by their `type`."


class Operation(dict[str, Any]):
    """A route's `openapi_extra`. `kinds`: all types that it refers to."""

    def __init__(
        self, summary: str, answer: Kinds, takes: Kinds = (), examples: Examples | None = None, errors: Any = ()
    ) -> None:
        """`errors`: statuses; default: those of generating routes, if the route takes a body."""
        super().__init__(summary=summary)
        self.kinds: list[Kind] = []
        self["responses"] = {str(status): {} for status in errors or (FAILURES if takes else ())}
        self["responses"]["200"] = {"description": "OK", "content": {JSON: {"schema": self._schema(answer)}}}
        if takes:
            tries = {name: {"summary": about, "value": value} for name, (about, value) in (examples or {}).items()}
            body = {"schema": self._schema(takes), "examples": tries}
            self["requestBody"] = {"required": True, "content": {JSON: body}}

    def chunks(self, kinds: Kinds) -> Operation:
        """Adds a stream that ends with [DONE]; its schema is that of one event."""
        chunk = {"contentMediaType": JSON, "contentSchema": self._schema(kinds)}
        return self._streams(CHUNKED, data={"type": "string", "anyOf": [{"const": "[DONE]"}, chunk]})

    def events(self, kinds: Kinds) -> Operation:
        """Adds a stream of named events, whose last event marks the end."""
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": self._schema(kinds)}
        return self._streams(IN_EVENTS, event={"type": "string"}, data=data)

    def at(self, *parameters: Json) -> Operation:
        """Adds parameters of the path or the query."""
        self["parameters"] = [*parameters]
        return self

    def says(self, description: str, status: str = "200") -> Operation:
        """Sets the description of the 200 answer, or adds another status with the same body."""
        self["responses"][status] = {**self["responses"]["200"], "description": description}
        return self

    def _streams(self, description: str, **fields: Json) -> Operation:
        schema = {"type": "object", "required": [*fields], "properties": fields}
        self["responses"]["200"]["content"]["text/event-stream"] = {"schema": schema}
        return self.says(description)

    def _schema(self, kinds: Kinds) -> Json:
        several = kinds if isinstance(kinds, tuple | list) else (kinds,)
        self.kinds += several
        refs = [ref(kind) for kind in several]
        if isinstance(kinds, list):
            return {"type": "array", "items": refs[0]}
        return {"anyOf": refs} if len(refs) > 1 else refs[0]


def path_parameter(name: str, **more: Any) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, **more}


def query_parameter(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


def ref(kind: Kind) -> Json:
    return {"$ref": REF.format(name=kind.__name__)}
