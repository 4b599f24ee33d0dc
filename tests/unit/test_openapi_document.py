"""The OpenAPI document is valid and matches the server's routes, models and limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pd_cluster.api.openapi.field_descriptions import DESCRIPTIONS, LIMITS
from tests.support.documented import document_of, validator_of
from tests.support.public_port import make_app

BOTH = pytest.mark.parametrize("openai", [True, False])
EITHER = pytest.mark.parametrize("has_keys", [True, False])


def operations(written: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in written["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def values(node: Any, key: str) -> Iterator[Any]:
    """Yields the values of this key at any depth."""
    if isinstance(node, dict):
        if key in node:
            yield node[key]
        for child in node.values():
            yield from values(child, key)
    elif isinstance(node, list):
        for child in node:
            yield from values(child, key)


@BOTH
@EITHER
def test_every_reference_leads_somewhere(openai: bool, has_keys: bool) -> None:
    written = document_of(openai, has_keys)
    for schema in written["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(values(written, "$ref"))
    assert len(references) > 10
    for reference in references:
        at: Any = written
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]
    assert not list(values(written, "$defs"))


@BOTH
def test_every_route_says_what_it_takes_and_answers(openai: bool) -> None:
    for path, method, operation in operations(document_of(openai)):
        where = f"{method} {path}"
        for status, answer in operation["responses"].items():
            contents = answer.get("content", {}).values()
            assert "$ref" in answer or (contents and all(each["schema"] for each in contents)), f"{where}: {status}"
        reads = method == "post" and "400" in operation["responses"] and "200" in operation["responses"]
        assert ("requestBody" in operation) == reads, where
        assert len(operation["operationId"].split()) == 1, where


def test_it_is_written_once(tmp_path: Path) -> None:
    app, _ = make_app(tmp_path)
    assert app.openapi() is app.openapi()


@BOTH
def test_examples_are_what_their_schemas_say(openai: bool) -> None:
    written = document_of(openai)
    num_examples = 0
    for path, _, operation in operations(written):
        if "requestBody" in operation:
            body = operation["requestBody"]["content"]["application/json"]
            least = 3 if path.endswith("/chat/completions") else path != "/classify"  # /classify needs a classifier
            assert len(body["examples"]) >= least, path
            for example in body["examples"].values():
                validator_of(written, body["schema"]).validate(example["value"])
                num_examples += 1
    assert num_examples >= 3


def test_a_request_that_breaks_a_limit_breaks_its_schema() -> None:
    written = document_of()
    validator = validator_of(written, {"$ref": "#/components/schemas/CompletionRequest"})
    good = {"prompt": "a", "stop": ["x"], "logit_bias": {"5": 1}, "top_p": 1, "made_up": True}
    validator.validate(good)
    bad = {"prompt": 5, "top_p": 0, "n": 129, "stop": "", "logit_bias": {"5": 101}, "bad_words": [""], "stream": "yes"}
    bad |= {"allowed_token_ids": [], "guided_regex": "", "temperature": -1}
    for name, value in [*bad.items(), ("top_p", 1.1), ("stop", ["x"] * 65)]:
        assert not validator.is_valid({**good, name: value}), name


@BOTH
def test_keys_are_asked_for_where_the_server_asks_for_them(openai: bool) -> None:
    written = document_of(openai, has_keys=True)
    assert written["components"]["securitySchemes"] == {"api_key": {"type": "http", "scheme": "bearer"}}
    assert written["security"] == [{"api_key": []}]
    for path, method, operation in operations(written):
        is_open = (path, method) in (("/health", "get"), ("/ping", "get"), ("/live", "get"))
        assert (operation.get("security") == []) == is_open, (method, path)
        assert ("401" in operation["responses"]) == (not is_open), (method, path)
    without = document_of(openai)
    assert "security" not in without
    assert "securitySchemes" not in without["components"]


def test_numbers_may_be_in_strings_in_every_request() -> None:
    schemas = document_of()["components"]["schemas"]
    for kind, name in (("MessagesRequest", "max_tokens"), ("ResponsesRequest", "top_p"), ("RerankRequest", "top_n")):
        types = [each.get("type") for each in schemas[kind]["properties"][name]["anyOf"]]
        assert {"string"} < {*types}, name
        assert len(types) == len({*types}), name
    assert schemas["MessagesRequest"]["properties"]["max_tokens"]["description"]


def test_what_is_described_exists() -> None:
    schemas = [*document_of()["components"]["schemas"].values()]
    schemas += [*document_of(openai=False)["components"]["schemas"].values()]
    fields = {name: field for schema in schemas for name, field in schema.get("properties", {}).items()}
    assert {*DESCRIPTIONS, *LIMITS} <= set(fields)
    for name, kinds in LIMITS.items():
        for kind, keywords in kinds.items():
            found = next(each for each in fields[name]["anyOf"] if each.get("type") == kind)
            assert found == {**found, **keywords}, name
