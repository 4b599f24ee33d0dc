"""Builds JSON schema validators from an OpenAPI document, for requests and for a server's answers."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import jsonschema

from pd_cluster.settings.http_settings import HttpConfig
from tests.support.public_port import make_app


@functools.cache
def document_of(openai: bool = True, has_keys: bool = False) -> dict[str, Any]:
    """Returns the OpenAPI document of a server of the model `tiny`; `has_keys`: clients need an API key."""
    with tempfile.TemporaryDirectory() as folder:
        app, _ = make_app(Path(folder), HttpConfig(api_keys=("key",) if has_keys else ()), openai)
        return app.openapi()


def validator_of(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def answer_validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Returns a validator that also rejects fields that the document does not declare."""
    closed = copy.deepcopy(document)
    for each in closed["components"]["schemas"].values():
        if "properties" in each:
            each["additionalProperties"] = False
    return validator_of(closed, schema)
