"""Builds the OpenAPI document of the public port, from its routes and the types that they read and write."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from pd_cluster import __version__
from pd_cluster.api.middleware.api_key_auth import OPEN_PATHS
from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.openapi.field_descriptions import DESCRIPTIONS, LIMITS
from pd_cluster.api.openapi.operations import JSON, REF, Json, Kind, Operation, ref
from pd_cluster.service.schema.completion_protocol import HARMLESS
from pd_cluster.service.schema.error_bodies import MAX_BODY_NBYTES, MESSAGES_PATHS, Error, MessageError
from pd_cluster.service.schema.json_body import MAX_CONTAINERS
from pd_cluster.service.schema.lax_numbers import PATTERN, number_fields

KEY = "api_key"
NUMBER_IN_STRING = {"type": "string", "pattern": PATTERN}
ERRORS = {
    "400": ("BadRequest", "The request cannot be served; `param` names the field."),
    "401": ("Unauthorized", "No API key, or a wrong one."),
    "403": ("Forbidden", "Pages of other sites are not allowed to do this."),
    "404": ("NotFound", "The model does not exist."),
    "409": ("Conflict", "The state of the object does not allow this."),
    "410": ("Aborted", "The server's operator ended the request."),
    "413": ("TooLarge", f"The body has more than {MAX_BODY_NBYTES >> 20} MiB."),
    "429": (
        "Overloaded",
        "The request would be served too late, or exceeds its API key's limit; try again after `Retry-After` seconds.",
    ),
    "500": (
        "Failed",
        "An instance was lost and no other could continue the request, or the server has an internal error.",
    ),
    "503": ("Unavailable", "No instance can take the request now; try again after `Retry-After` seconds."),
    "504": ("TimedOut", "The request was not finished in time."),
    "507": ("StorageFull", "The disk for files is full."),
}
OF_MESSAGES = "Messages"  # prefix of the names of errors in Anthropic's format
OF_ALL = (
    f"A body has at most {MAX_BODY_NBYTES >> 20} MiB, and {MAX_CONTAINERS:,} arrays and objects. Chats and completions "
    f"accept these without effect: {', '.join(sorted(HARMLESS))}."
)


def document(title: str, routes: Iterable[object], model: str, has_keys: bool) -> Json:
    """Returns the document. `model`: the name in examples; "": none. `has_keys`: clients need an API key."""
    shown = [each for route in routes if isinstance(route, PlainRoute) for each in _operations(route)]
    written = get_openapi(title=title, version=__version__, description=OF_ALL, routes=shown)
    kinds: dict[Kind, None] = {Error: None}
    if any(path in written["paths"] for path in MESSAGES_PATHS):
        kinds[MessageError] = None
    for route in shown:
        if isinstance(route.openapi_extra, Operation):
            kinds |= dict.fromkeys(route.openapi_extra.kinds)
    components = written["components"] = {"schemas": _schemas(kinds), "responses": {}}
    for path, operations in written["paths"].items():
        for method, operation in operations.items():
            if has_keys and (path in OPEN_PATHS and method == "get"):
                operation["security"] = []
            elif has_keys:
                operation["responses"]["401"] = {}
            tries = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("examples", {})
            for example in tries.values() if model else ():
                example["value"] = {"model": model, **example["value"]}
            components["responses"] |= _refer_to_errors(path, operation["responses"], MessageError in kinds)
    if has_keys:
        components["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
        written["security"] = [{KEY: []}]
    return written


def _operations(route: PlainRoute) -> Iterator[PlainRoute]:
    """Yields the route once for each method except HEAD, named like its endpoint."""
    for at, method in enumerate(sorted({*(route.methods or ())} - {"HEAD"})):
        shown, name = copy.copy(route), route.operation_id or route.name
        shown.methods, shown.operation_id = {method}, name if at == 0 else f"{name}_{method.lower()}"
        yield shown


def _refer_to_errors(path: str, responses: Json, has_messages: bool) -> Json:
    """Replaces a route's errors by references to shared components; returns these."""
    found: Json = {}
    either = {"anyOf": [ref(MessageError), ref(Error)]}
    for status in [each for each in responses if each in ERRORS]:
        if responses[status].get("content", {}).get(JSON, {}).get("schema"):
            continue  # the route defines its own
        name, why = ERRORS[status]
        is_either = path in MESSAGES_PATHS or (has_messages and status == "401")
        content = {JSON: {"schema": either if is_either else ref(Error)}}
        more = {"headers": {"WWW-Authenticate": {"schema": {"type": "string"}}}} if status == "401" else {}
        name = f"{OF_MESSAGES}{name}" if path in MESSAGES_PATHS and status != "401" else name
        found[name] = {"description": why, **more, "content": content}
        responses[status] = {"$ref": f"#/components/responses/{name}"}
    return found


# ---- components


class _Schemas(GenerateJsonSchema):
    """Component schemas without titles that repeat a field's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schemas(kinds: Iterable[Kind]) -> Json:
    """Returns the schemas of requests (pydantic models) and answers (structs)."""
    requests = [kind for kind in kinds if issubclass(kind, BaseModel)]
    mode: Literal["validation"] = "validation"
    _, written = models_json_schema(
        [(request, mode) for request in requests],
        ref_template=REF.replace("name", "model"),
        schema_generator=_Schemas,
    )
    found: Json = written["$defs"]
    for request in requests:
        fields = found[request.__name__]["properties"]
        for name, field in fields.items():
            _describe(name, field)
        for name in number_fields(request):
            _also_in_strings(fields[name])
    structs = [kind for kind in kinds if issubclass(kind, msgspec.Struct)]
    return found | msgspec.json.schema_components(structs, ref_template=REF)[1]


def _also_in_strings(field: Json) -> None:
    """Documents that a number, or a number in a list, may also be a string."""
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
