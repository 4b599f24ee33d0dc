"""Client requests: bodies that are not JSON, too deep, or have too many elements."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_cluster.errors import RequestError
from pd_cluster.service.schema import completion_protocol, json_body
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest, GenerationRequest
from pd_cluster.service.schema.json_body import structure
from pd_cluster.service.schema.messages.messages_protocol import MessagesRequest
from pd_cluster.service.schema.request_parsing import MAX_FIELDS, parse
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.tokens.tokens_protocol import BatchChatRequest
from tests.support.parsing import kinds, parsed, refused


@kinds
def test_not_json(kind: type[GenerationRequest]) -> None:
    for body in (
        *(b"", b"{", b"hello", b'{"prompt": "a"} trailing', b'{"prompt": "\xff"}', b"\xff\xfe{\x00}\x00"),
        *(b'{"prompt": "\\ud800"}', b'{"prompt": "\\ud800", "messages": [], "x": 1}'),
        *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}'),
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ):
        assert str(refused(body, kind)).startswith("the body is not JSON: ")
    for body in (b"[]", b'"a"', b"1", b"null", b"true"):
        assert str(refused(body, kind)) == "the body must be a JSON object"


def test_deep_nesting_is_one_error() -> None:
    for depth in (100, 990, 20_000):
        for name in ("prompt", "tools", "stop", "messages"):
            refused(f'{{"{name}": {"[" * depth}{"]" * depth}}}'.encode())


@pytest.mark.parametrize("element", [b"[]", b"{}", b'{"a":1}'])
def test_a_crowd_of_containers_is_refused_undecoded(element: bytes) -> None:
    """Decoding 32 MiB of these would hold the interpreter for 5 seconds, longer than a heartbeat timeout of 1."""
    started_s = time.process_time()
    for count in (60_000, 2_000_000):
        error = refused(b'{"prompt": "a", "x": [' + b",".join([element] * count) + b"]}")
        assert "are allowed" in str(error)
    most = json_body.MAX_NAMES if b":" in element else json_body.MAX_CONTAINERS
    error = refused(b'{"prompt": "a", "x": [' + b",".join([element] * (json_body.MAX_CONTAINERS + 1)) + b"]}")
    assert f"at most {most} are allowed" in str(error)
    assert time.process_time() - started_s < 1.0


@pytest.mark.parametrize(
    ("element", "most", "what"), [(b'"a"', json_body.MAX_STRINGS, "strings"), (b"1", json_body.MAX_VALUES, "values")]
)
def test_more_than_anybody_needs_is_refused_undecoded(element: bytes, most: int, what: str) -> None:
    """Excessive elements are refused without decoding; brackets and commas within strings do not count."""
    error = refused(b'{"prompt": "a", "x": [' + b",".join([element] * (most + 5)) + b"]}")
    assert f"{what}; at most {most} are allowed" in str(error)
    text = b'"' + b'[,{\\"' * most + b'"'
    parse(b'{"prompt": ' + text + b"}", CompletionRequest)
    parse(b'{"prompt": "a", "x": [' + b",".join([element] * (most - 10)) + b"]}", CompletionRequest)


def test_one_wrong_item_among_many_is_found_at_once() -> None:
    """Validation stops at the first error, because collecting one per item took 25 seconds for 4 MB."""
    body = b"1," * (json_body.MAX_VALUES - 10)
    started_s = time.process_time()
    assert refused(b'{"prompt": [' + body + b'"a"]}').param == "prompt"
    assert refused(b'{"messages": [' + body + b"1]}", ChatCompletionRequest).param == "messages"
    assert refused(b'{"prompt": "a", "stop": [' + body + b"1]}").param == "stop"
    assert refused(b'{"prompt": "a", "stop_token_ids": [' + body + b"1]}").param == "stop_token_ids"
    assert time.process_time() - started_s < 2.0


json_values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text('a"\\[{}]', max_size=6)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def num_containers(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(num_containers, value.values()))
    return 1 + sum(map(num_containers, value)) if isinstance(value, list) else 0


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_containers_are_counted_as_brute_force_does(value: object) -> None:
    assert structure(json.dumps(value).encode()).brackets.count(b"[") == num_containers(value)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(['"', "\\\\", '\\"', "[", "a", "{}", ":"]), max_size=12), st.integers(0, 9))
def test_a_chunk_s_end_changes_nothing(pieces: list[str], shift: int) -> None:
    """A chunk may end anywhere: in a string, or between a backslash and the escaped character."""
    text = "".join(pieces)
    inner = json.dumps("x" * (json_body.CHUNK_NBYTES - 20 + shift) + text)
    assert structure(f'[{inner}, {json.dumps(text)}, {{"a": [{inner}]}}]'.encode()).brackets == b"[[[]]]"
    assert structure(b'["' + b"\\" * 2 * (json_body.CHUNK_NBYTES + shift) + b'", [0]]').brackets == b"[[]]"


long_arrays = st.lists(
    st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=20
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(json_values | long_arrays, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_numbers_decoded_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    monkeypatch.setattr(json_body, "CHUNK_NBYTES", 16)
    assert json_body.decoded(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "body", ["[1, 2, %s 3x, 4]", "[1, 2, %s , 4]", '{"a": 1, %s "b": 2}', "1, %s 2", '["a", %s, 1"']
)
def test_an_error_within_many_numbers_names_its_place(body: str) -> None:
    whole = (body % ("7, " * json_body.CHUNK_NBYTES)).encode()
    with pytest.raises(msgspec.DecodeError) as reason:
        msgspec.json.decode(whole)
    assert str(refused(whole)) == f"the body is not JSON: {reason.value}"


def names(number: int) -> bytes:
    return b",".join(b'"%d": 0' % at for at in range(number))


def test_what_takes_long_to_decode_is_bounded_by_its_count() -> None:
    escapes = rb"\u00e4" * (json_body.MAX_ESCAPES + 1)
    for body, said in (
        (
            b'{"prompt": "a", "x": {' + names(json_body.MAX_NAMES) + b"}}",
            f"names in objects; at most {json_body.MAX_NAMES} are allowed",
        ),
        (b'{"prompt": "a", ' + names(MAX_FIELDS) + b"}", f"fields; at most {MAX_FIELDS} are allowed"),
        (b'{"prompt": "' + escapes + b'"}', f"backslashes; at most {json_body.MAX_ESCAPES} are allowed"),
    ):
        assert said in str(refused(body))
    request = parsed(CompletionRequest, prompt="a", further={str(at): 0 for at in range(json_body.MAX_NAMES - 2)})
    assert len(request.model_extra["further"]) == json_body.MAX_NAMES - 2


def test_messages_are_counted_before_they_are_read() -> None:
    hello = {"role": "user", "content": "a"}
    most, more = [hello] * completion_protocol.MAX_MESSAGES, [*[hello] * completion_protocol.MAX_MESSAGES, {}]
    assert len(parsed(ChatCompletionRequest, messages=most).messages) == completion_protocol.MAX_MESSAGES
    parts = [{**hello, "content": ["a"] * (completion_protocol.MAX_PARTS + 1)}]
    assert f"at most {completion_protocol.MAX_PARTS} " in str(
        refused(json.dumps({"messages": parts}).encode(), ChatCompletionRequest)
    )
    said = f"at most {completion_protocol.MAX_MESSAGES} "
    assert said in str(refused(json.dumps({"messages": more}).encode(), ChatCompletionRequest))
    assert said in str(refused(json.dumps({"messages": [most, [hello]]}).encode(), BatchChatRequest))
    for kind, body in ((MessagesRequest, {"max_tokens": 1, "messages": more}), (ResponsesRequest, {"input": more})):
        with pytest.raises(RequestError, match=said):
            parse(json.dumps(body).encode(), kind, has_own_names=True)


@pytest.mark.parametrize("wide", [1, 3])
def test_the_deepest_body_that_is_read(wide: int) -> None:
    def body(depth: int) -> bytes:
        inner = b"[" * depth + b"]" * depth
        return b'{"prompt": "a", "x": [' + b",".join([inner] * wide) + b"]}"

    parse(body(json_body.MAX_DEPTH - 2), CompletionRequest)
    assert "64 deep" in str(refused(body(json_body.MAX_DEPTH - 1)))
    parse(body(1).replace(b'"a"', b'"' + b"[" * 1000 + b'"'), CompletionRequest)


def test_as_many_prompts_as_may_be() -> None:
    for prompt in ("a", [1, 2]):
        assert parsed(CompletionRequest, prompt=prompt).prompts() == [prompt]
        assert (
            len(parsed(CompletionRequest, prompt=[prompt] * completion_protocol.MAX_PROMPTS, n=4).prompts())
            == completion_protocol.MAX_PROMPTS
        )
        with pytest.raises(RequestError, match="1025 prompts are more than the 1024"):
            parsed(CompletionRequest, prompt=[prompt] * (completion_protocol.MAX_PROMPTS + 1)).prompts()
        with pytest.raises(RequestError, match="more than 4096 sequences"):
            parsed(CompletionRequest, prompt=[prompt] * completion_protocol.MAX_PROMPTS, n=5).prompts()


def test_a_huge_refused_value_is_not_repeated() -> None:
    assert len(str(refused(json.dumps({"prompt": "a", "documents": ["x" * 100_000]}).encode()))) < 200
    assert len(str(refused(json.dumps({"prompt": "a", "guided_json": "x" * 100_000}).encode()))) < 200
