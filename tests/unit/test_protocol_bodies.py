"""Requests from clients: bodies that are no JSON, too deep, or more than anybody needs."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.errors import RequestError
from pd_cluster.service.schema import parse as parsing
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.parse import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS, MAX_VALUES, parse
from pd_cluster.service.schema.protocol import (
    MAX_PROMPTS,
    CompletionRequest,
    GenerationRequest,
)
from tests.support.parsing import kinds, parsed, refused


@kinds
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"prompt": "a"} trailing',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800", "messages": [], "x": 1}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{\x00}\x00",
    ],
)
def test_not_json(kind: type[GenerationRequest], body: bytes) -> None:
    assert str(refused(body, kind)).startswith("the body is not JSON: ")


@pytest.mark.parametrize("body", [b"[]", b'"a"', b"1", b"null", b"true"])
def test_json_but_no_object(body: bytes) -> None:
    assert str(refused(body)) == "the body must be a JSON object"


@pytest.mark.parametrize("depth", [100, 990, 1500, 20_000])
@pytest.mark.parametrize("name", ["prompt", "tools", "stop", "messages"])
def test_deep_nesting_is_one_error(depth: int, name: str) -> None:
    refused(f'{{"{name}": {"[" * depth}{"]" * depth}}}'.encode())


@pytest.mark.parametrize("element", [b"[]", b"{}", b'{"a":1}'])
def test_a_crowd_of_containers_is_refused_undecoded(element: bytes) -> None:
    """Decoding 32 MiB of these holds the interpreter for 5 seconds, and a worker's death is noticed after 1."""
    started_s = time.process_time()
    for count in (60_000, 2_000_000):
        error = refused(b'{"prompt": "a", "x": [' + b",".join([element] * count) + b"]}")
        assert "are allowed" in str(error)
    assert f"at most {MAX_CONTAINERS} are allowed" in str(
        refused(b'{"prompt": "a", "x": [' + b",".join([element] * (MAX_CONTAINERS + 1)) + b"]}")
    )
    assert time.process_time() - started_s < 1.0


@pytest.mark.parametrize(("element", "most", "what"), [(b'"a"', MAX_STRINGS, "strings"), (b"1", MAX_VALUES, "values")])
def test_more_than_anybody_needs_is_refused_undecoded(element: bytes, most: int, what: str) -> None:
    """Strings of brackets and commas count as one each."""
    error = refused(b'{"prompt": "a", "x": [' + b",".join([element] * (most + 5)) + b"]}")
    assert f"{what}; at most {most} are allowed" in str(error)
    text = b'"' + b'[,{\\"' * most + b'"'
    parse(b'{"prompt": ' + text + b"}", CompletionRequest)
    parse(b'{"prompt": "a", "x": [' + b",".join([element] * (most - 10)) + b"]}", CompletionRequest)


def test_one_wrong_item_among_many_is_found_at_once() -> None:
    """Collecting an error for every item took 25 seconds for 4 MB."""
    body = b"1," * (MAX_VALUES - 10)
    started_s = time.process_time()
    assert refused(b'{"prompt": [' + body + b'"a"]}').param == "prompt"
    assert refused(b'{"messages": [' + body + b"1]}", ChatCompletionRequest).param == "messages"
    assert refused(b'{"prompt": "a", "stop": [' + body + b"1]}").param == "stop"
    assert refused(b'{"prompt": "a", "stop_token_ids": [' + body + b"1]}").param == "stop_token_ids"
    assert time.process_time() - started_s < 2.0


def test_brackets_inside_strings_do_not_count() -> None:
    text = '[{"\\' * MAX_CONTAINERS
    assert parsed(prompt=text).prompt == text


json_values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text('a"\\[{}]', max_size=6)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def num_containers(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(num_containers, value.values()))
    return 1 + sum(map(num_containers, value)) if isinstance(value, list) else 0


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_containers_are_counted_as_brute_force_does(value: object) -> None:
    assert parsing._structure(json.dumps(value).encode()).count(b"[") == num_containers(value)


@pytest.mark.parametrize("wide", [1, 3])
def test_the_deepest_body_that_is_read(wide: int) -> None:
    def body(depth: int) -> bytes:
        inner = b"[" * depth + b"]" * depth
        return b'{"prompt": "a", "x": [' + b",".join([inner] * wide) + b"]}"

    parse(body(MAX_DEPTH - 2), CompletionRequest)
    assert "64 deep" in str(refused(body(MAX_DEPTH - 1)))
    parse(body(1).replace(b'"a"', b'"' + b"[" * 1000 + b'"'), CompletionRequest)


def test_as_many_prompts_as_may_be() -> None:
    for prompt in ("a", [1, 2]):
        assert parsed(CompletionRequest, prompt=prompt).prompts() == [prompt]
        assert len(parsed(CompletionRequest, prompt=[prompt] * MAX_PROMPTS, n=4).prompts()) == MAX_PROMPTS
        with pytest.raises(RequestError, match="1025 prompts are more than the 1024"):
            parsed(CompletionRequest, prompt=[prompt] * (MAX_PROMPTS + 1)).prompts()
        with pytest.raises(RequestError, match="more than 4096 sequences"):
            parsed(CompletionRequest, prompt=[prompt] * MAX_PROMPTS, n=5).prompts()


def test_a_huge_refused_value_is_not_repeated() -> None:
    assert len(str(refused(json.dumps({"prompt": "a", "documents": ["x" * 100_000]}).encode()))) < 200
    assert len(str(refused(json.dumps({"prompt": "a", "guided_json": "x" * 100_000}).encode()))) < 200
