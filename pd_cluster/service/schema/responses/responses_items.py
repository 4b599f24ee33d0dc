"""Reads the input items of a request to /v1/responses, and lists a stored response's items.

Every refusal is a RequestError that names the item.
"""

from __future__ import annotations

import secrets
from typing import Any

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.responses.responses_item_types import (
    PARTS,
    InputImagePart,
    RefusalPart,
    TextPart,
    kind_of,
)
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest

Json = dict[str, Any]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def items_of(request: ResponsesRequest) -> list[Json]:
    """Returns the input as items; a text becomes a user's message. A request without input has no items if it continues
    a response; otherwise it has an empty message.
    """
    given = request.input
    if given is None:
        given = [] if request.previous_response_id is not None else ""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given


def listed(items: list[Json]) -> list[Json]:
    """Returns items in the form that lists of items show: each item has an id, and contents are lists of parts."""
    return [_listed(item) for item in items]


def without_logprobs(items: list[Json]) -> list[Json]:
    """Returns a stored response's items without logprobs, for responses that continue it."""
    return [
        {**item, "content": [{**part, "logprobs": []} if part.get("logprobs") else part for part in item["content"]]}
        if item.get("type") == "message"
        else item
        for item in items
    ]


def _listed(item: Json) -> Json:
    kind, own = kind_of(item), item.get("id")
    named = {"type": kind, "id": own if isinstance(own, str) else f"{PREFIXES[kind]}_{secrets.token_hex(24)}"}
    if kind != "message":
        more: Json = {"summary": []} if kind == "reasoning" else {}
        return {"status": "completed", **more, **item, **named}
    is_ours = item["role"] == "assistant"
    more = {"annotations": [], "logprobs": []} if is_ours else {}
    parts = [
        {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
        if part["type"] == "image_url"
        else {"type": "output_text" if is_ours else "input_text", "text": part["text"], **more}
        for part in parts_of(item["content"], "input", takes_images=item["role"] == "user")
    ]
    return {"status": "completed", **item, **named, "content": parts}


def parts_of(content: Any, place: str, takes_images: bool = False) -> list[Json]:
    """Returns the text parts, and images if they are allowed, in the form of a chat."""
    if isinstance(content, str):
        return text_parts(content)
    if not isinstance(content, list):
        raise RequestError(f"{place}: must be a string or a list of parts", param="input")
    return [part for at, each in enumerate(content) for part in _part(each, f"{place}[{at}]", takes_images)]


def _part(part: Any, place: str, takes_images: bool) -> list[Json]:
    match PARTS.read(part, place):
        case TextPart(text=text) | RefusalPart(refusal=text):
            return text_parts(text)
        case InputImagePart(image_url=url) if takes_images:  # the place is kept for errors when the image is read
            return [{"type": "image_url", "image_url": {"url": url}, "place": place}]
        case other:
            way_out = "images go into messages of the user and outputs of calls"
            raise PARTS.refusal(getattr(other, "type", None), place, way_out)


def text_parts(text: str) -> list[Json]:
    return [{"type": "text", "text": text}]
