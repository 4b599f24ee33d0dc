"""Builds JSON schema validators from an OpenAPI document, for requests and for real answers."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema


def validator_of(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def answer_validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Returns a validator that also refuses fields missing from the document."""
    closed = copy.deepcopy(document)
    for each in closed["components"]["schemas"].values():
        if "properties" in each:
            each["additionalProperties"] = False
    return validator_of(closed, schema)
