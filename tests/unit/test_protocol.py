"""Requests from clients: every branch of `parse`, and the values of fields."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pd_cluster.api.document.document import document
from pd_cluster.errors import RequestError
from pd_cluster.service.limits import truncated
from pd_cluster.service.schema import parse as parsing
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.messages_protocol import MessagesRequest
from pd_cluster.service.schema.parse import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS, MAX_VALUES, parse
from pd_cluster.service.schema.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest, parse_pooling
from pd_cluster.service.schema.protocol import (
    CHAT_ONLY,
    HARMLESS,
    MAX_BAD_WORD_NUM_CHARS,
    MAX_BAD_WORDS,
    MAX_PROMPTS,
    MAX_SALT_NUM_CHARS,
    MAX_SEQUENCES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NOT_YET,
    SGLANGS,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
)
from pd_cluster.service.schema.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.tokens_protocol import TokensRequest
from pd_cluster.types import Sampling

HELLO = [{"role": "user", "content": "hello"}]
MINIMAL: dict[type[GenerationRequest], dict[str, Any]] = {
    CompletionRequest: {"prompt": "hello"},
    ChatCompletionRequest: {"messages": HELLO},
    GenerateRequest: {"prompt": "hello"},
}
OTHERS: list[tuple[Any, dict[str, Any]]] = [
    (ResponsesRequest, {"input": "a"}),
    (MessagesRequest, {"messages": HELLO, "max_tokens": "7"}),
]
kinds = pytest.mark.parametrize("kind", MINIMAL)


def parsed(kind: type[GenerationRequest] = CompletionRequest, **fields: Any) -> Any:
    return parse(json.dumps({**MINIMAL[kind], **fields}).encode(), kind)


def refused(body: bytes, kind: type[GenerationRequest] = CompletionRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, kind)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return caught.value


@kinds
def test_the_least_that_is_a_request(kind: type[GenerationRequest]) -> None:
    request = parsed(kind)
    assert (request.max_tokens, bool(request.stream), request.stops, request.include_usage) == (
        None,
        False,
        [],
        False,
    )
    assert request.sampling(16, 5, {}) == Sampling(max_tokens=16, seed=5)


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


@pytest.mark.parametrize(
    ("name", "written", "meant"),
    [
        ("max_tokens", "16", 16),
        ("max_tokens", 16.0, 16),
        ("max_tokens", " 16.0 ", 16),
        ("seed", "9007199254740993", 9007199254740993),
        ("temperature", "0.5", 0.5),
        ("temperature", "1e-1", 0.1),
        ("top_k", "-1", -1),
        ("stop_token_ids", ["5", 6.0, 7], [5, 6, 7]),
        ("logit_bias", {"5": "-1.5"}, {"5": -1.5}),
    ],
)
def test_a_number_may_be_written_in_another_form(name: str, written: Any, meant: Any) -> None:
    """As pydantic's lax mode, and so vLLM, takes it. Texts stay texts."""
    request = parse(json.dumps({"prompt": "16", "user": "7", name: written}).encode(), CompletionRequest)
    assert (getattr(request, name), type(getattr(request, name))) == (meant, type(meant))
    assert (request.prompt, request.user) == ("16", "7")


def test_numbers_of_other_apis_may_be_written_so_too() -> None:
    written: dict[str, Any] = {"temperature": "0.5", "top_k": 3.0}
    for kind, body in OTHERS:
        request = parse(json.dumps({**body, **written}).encode(), kind, has_own_names=True)
        assert (request.temperature, request.top_k) == (0.5, 3)
    made = parse(b'{"input": "a", "repetition_penalty": "1.1", "stop_token_ids": [3.0]}', ResponsesRequest, True)
    assert (made.repetition_penalty, made.stop_token_ids) == (1.1, [3])


WRONG: list[tuple[str, Any]] = [
    ("session_id", "x" * 1025),
    ("model", 3),
    ("max_tokens", "sixteen"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("temperature", "0x"),
    ("temperature", -0.1),
    ("temperature", False),
    ("temperature", int("9" * 400)),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", [1]),
    ("top_k", -2),
    ("top_k", 0.5),
    ("top_k", 10**30),
    ("seed", "x"),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("stop", 1),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop_token_ids", 1),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**30]),
    ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1)),
    ("ignore_eos", "yes"),
    ("ignore_eos", 1),
    ("skip_special_tokens", 0),
    ("stream", "true"),
    ("stream_options", 1),
    ("stream_options", {"include_usage": "yes"}),
    ("user", 3),
    ("return_token_ids", 2),
    ("n", 0),
    ("n", MAX_SEQUENCES + 1),
    ("n", True),
    ("n", 1.5),
    ("n", "2.5"),
    ("best_of", 0),
    ("best_of", MAX_SEQUENCES + 1),
    ("best_of", False),
    *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.01, 2.01, "one", True)),
    *(("repetition_penalty", value) for value in (0, -1, 2.01, "one")),
    *(("min_p", value) for value in (-0.01, 1.01, "none")),
    *(("use_beam_search", value) for value in ("yes", 1)),
    *(("length_penalty", value) for value in ("one", 10.5, -10.5, True)),
    *(("early_stopping", value) for value in ("always", 1, 0.5)),
    *(("min_tokens", value) for value in (-1, 1.5, "one", 10**30)),
    *(("logit_bias", value) for value in ([], 3, {"5": "x"}, {"5": 100.5}, {"5": -101}, {"5": None}, {"5": True})),
    *(("logit_bias", {key: 1}) for key in ("", "x", "-1", "1.0", "05", " 5", "5 ", "\u0665", "9" * 11)),
    *(("bad_words", value) for value in ("a", [1], [""], ["a", ""], ["a"] * (MAX_BAD_WORDS + 1))),
    ("bad_words", ["a" * (MAX_BAD_WORD_NUM_CHARS + 1)]),
    *(("allowed_token_ids", value) for value in ([], 5, ["a"], [-1], [2**31], [1.5], [True])),
    *(("prompt_logprobs", value) for value in (-2, True, "one", 1.5)),
    ("include_stop_str_in_output", "yes"),
    ("return_tokens_as_token_ids", 1),
    *(("cache_salt", value) for value in ("", 5, "x" * (MAX_SALT_NUM_CHARS + 1))),
    *(("truncate_prompt_tokens", value) for value in (0, -2, 1.5, "five", True)),
    *(("guided_json", value) for value in (5, True, ["a"])),
    *(("guided_choice", value) for value in ("a", [1])),
    *(("response_format", value) for value in ("json", [], {"type": "xml"})),
]


@kinds
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name(kind: type[GenerationRequest], name: str, value: Any) -> None:
    error = refused(json.dumps({**MINIMAL[kind], name: value}).encode(), kind)
    assert error.param == name
    assert name in str(error)


@pytest.mark.parametrize("prompt", [None, 1, 1.5, {}, True, [1.5], ["a", 1], [[1, "a"]], [True], [[[1]]], [None]])
def test_a_wrong_prompt(prompt: Any) -> None:
    assert refused(json.dumps({"prompt": prompt}).encode()).param == "prompt"


@pytest.mark.parametrize("prompt", ["a", "", [1, 2], ["a"], ["a", "b"], [[1], [2]], []])
def test_prompts_of_every_form(prompt: Any) -> None:
    assert parsed(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hello",
        [],
        [1],
        [{}],
        [{"content": "no role"}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [5]}],
        {"role": "user", "content": "x"},
    ],
)
def test_wrong_messages(messages: Any) -> None:
    assert refused(json.dumps({"messages": messages}).encode(), ChatCompletionRequest).param == "messages"


@kinds
def test_a_required_field_is_named(kind: type[GenerationRequest]) -> None:
    assert refused(b"{}", kind).param == next(iter(MINIMAL[kind]))


@kinds
@pytest.mark.parametrize("name", NOT_YET)
def test_not_yet_is_refused_by_name_and_neutral_values_pass(kind: type[GenerationRequest], name: str) -> None:
    for neutral in (None, *NOT_YET[name]):
        parsed(kind, **{name: neutral})
    error = refused(json.dumps({**MINIMAL[kind], name: ["something", {"else": 1}]}).encode(), kind)
    assert error.param == name
    assert str(error).startswith(f"{name}: ")
    assert "not supported yet" in str(error)


@pytest.mark.parametrize(("name", "value"), [("use_beam_search", 0), ("priority", False), ("detokenize", 1)])
def test_neutral_is_of_the_right_type(name: str, value: Any) -> None:
    """True is not 1, and 0 is not False."""
    assert refused(json.dumps({"prompt": "a", name: value}).encode()).param == name


@pytest.mark.parametrize(("name", "value"), [("presence_penalty", 0), ("length_penalty", 1), ("repetition_penalty", 1)])
def test_json_writes_whole_numbers_without_a_point(name: str, value: Any) -> None:
    parsed(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "presence_penalty", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(name: str, value: str) -> None:
    refused(f'{{"prompt": "a", "{name}": {value}}}'.encode())
    refused(f'{{"prompt": "a", "logit_bias": {{"5": {value}}}}}'.encode())


def test_a_refusal_has_field_and_value() -> None:
    assert str(refused(b'{"prompt": "a", "min_p": 1.5}')) == "min_p: 1.5: Input should be less than or equal to 1"
    assert len(str(refused(json.dumps({"prompt": "a", "logit_bias": {"x" * 9999: 1}}).encode()))) < 150
    assert len(str(refused(json.dumps({"prompt": "a", "logit_bias": {"x" * 9999: "y" * 9999}}).encode()))) < 150


# ---- what does not go together


@kinds
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"use_beam_search": True, "n": 1}, "n"),
        ({"use_beam_search": True, "n": 1, "best_of": 1}, "best_of"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "n": 2, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "n": 2, "top_k": 1}, "top_k"),
        ({"use_beam_search": True, "n": 2, "min_p": 0.5}, "min_p"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": "never"}, "early_stopping"),
    ],
)
def test_fields_that_contradict_each_other(kind: type[GenerationRequest], fields: dict[str, Any], param: str) -> None:
    error = refused(json.dumps({**MINIMAL[kind], **fields}).encode(), kind)
    assert error.param == param
    assert str(error).startswith(f"{param}: {fields[param]} ")


@kinds
def test_fields_that_go_together(kind: type[GenerationRequest]) -> None:
    parsed(kind, n=2, best_of=2, stream=True)
    parsed(kind, n=2, best_of=3)
    parsed(kind, prompt_logprobs=3)
    parsed(kind, top_logprobs=0)


@pytest.mark.parametrize(
    ("fields", "number"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chats_logprobs_are_a_switch_and_a_number(fields: dict[str, Any], number: int | None) -> None:
    assert parsed(ChatCompletionRequest, **fields).sampling(1, 1, {}).logprobs == number
    refused(json.dumps({"messages": HELLO, "logprobs": 3}).encode(), ChatCompletionRequest)


@pytest.mark.parametrize("kind", [CompletionRequest, GenerateRequest])
def test_other_logprobs_are_a_number(kind: type[GenerationRequest]) -> None:
    for number in (None, 0, 4, -1):
        assert parsed(kind, logprobs=number).sampling(1, 1, {}).logprobs == number
    for wrong in (True, False, -2, "one", 1.5):
        assert refused(json.dumps({**MINIMAL[kind], "logprobs": wrong}).encode(), kind).param == "logprobs"


def test_echo_shows_the_prompts_logprobs_too() -> None:
    assert parsed(logprobs=3).sampling(1, 1, {}).prompt_logprobs is None
    assert parsed(logprobs=3, echo=True).sampling(1, 1, {}).prompt_logprobs == 3
    assert parsed(logprobs=3, echo=True, prompt_logprobs=1).sampling(1, 1, {}).prompt_logprobs == 1
    assert parsed(echo=True).sampling(1, 1, {}).prompt_logprobs is None


def test_beams_are_n_answers_of_a_width() -> None:
    """The model's defaults for sampling do not count; a repetition penalty does."""
    defaults: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    given = parsed(use_beam_search=True, n=2, best_of=4, length_penalty=0, early_stopping="never", temperature=1e-9)
    beams = Sampling(
        n=2,
        beam_width=4,
        max_tokens=7,
        temperature=0.0,
        seed=5,
        repetition_penalty=1.1,
        length_penalty=0.0,
        early_stopping="never",
    )
    assert given.sampling(7, 5, defaults) == beams
    assert parsed(use_beam_search=True, n=3).sampling(7, 5, {}).num_sequences == 3
    assert parsed(use_beam_search=True, best_of=3, stream=True).beam_width == 3
    assert parsed(use_beam_search=False, n=3, length_penalty=1, early_stopping=False).beam_width == 0


def test_ranking_needs_logprobs() -> None:
    assert parsed(n=2, best_of=3).sampling(1, 1, {}).logprobs == 0
    assert parsed(n=2, best_of=3, logprobs=2).sampling(1, 1, {}).logprobs == 2
    assert parsed(n=3, best_of=3).sampling(1, 1, {}).logprobs is None
    assert (parsed(n=2, best_of=3).sampling(1, 1, {}).n, parsed(n=2).sampling(1, 1, {}).n) == (3, 2)


VLLM_SAMPLING = [
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logits_processors",
    "truncate_prompt_tokens",
    "bad_words",
    "guided_decoding",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "extra_args",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "thinking_token_budget",
]


@pytest.mark.parametrize("name", VLLM_SAMPLING)
def test_every_sampling_parameter_of_vllm_is_honoured_or_refused(name: str) -> None:
    """The parameters are 0.6.0's and today's. Each honoured one has a test of its effect in tests/api."""
    assert (name in ChatCompletionRequest.model_fields) != (name in NOT_YET)


@kinds
def test_logprobs_is_a_field_of_every_kind(kind: type[GenerationRequest]) -> None:
    assert "logprobs" in kind.model_fields


@pytest.mark.parametrize("kind", [CompletionRequest, GenerateRequest])
@pytest.mark.parametrize("name", CHAT_ONLY)
def test_what_is_for_chats_is_refused_elsewhere(kind: type[GenerationRequest], name: str) -> None:
    for neutral in (None, *CHAT_ONLY[name]):
        parsed(kind, **{name: neutral})
    error = refused(json.dumps({**MINIMAL[kind], name: ["something", {"else": 1}]}).encode(), kind)
    assert error.param == name
    assert "/v1/chat/completions" in str(error)


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


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=parsing.__name__):
        for _ in range(3):
            parsed(brand_new_field=1, metadata={"a": "b"}, service_tier="auto", store=True)
    told = [record.getMessage() for record in caplog.records]
    assert ["brand_new_field" in line for line in told] == [True]


@pytest.mark.parametrize("name", SGLANGS)
def test_sglangs_names_are_refused_with_those_there_are(name: str) -> None:
    """They were taken, and had no effect."""
    neutral, way_out = SGLANGS[name]
    bodies: list[tuple[type[BaseModel], dict[str, Any]]]
    bodies = [(CompletionRequest, {"prompt": "a"}), (ChatCompletionRequest, {"messages": HELLO})]
    for kind, body in bodies:
        for value in (None, *neutral):
            parse(json.dumps({**body, name: value}).encode(), kind)
        with pytest.raises(RequestError, match=rf"^{name}: .* is not a name here; {re.escape(way_out)}$") as caught:
            parse(json.dumps({**body, name: True if neutral == (False,) else "x"}).encode(), kind)
        assert caught.value.param == name


def test_what_changes_nothing_is_documented() -> None:
    """By the server itself, and on the page for clients."""
    told = document("tiny", openai=True, has_keys=False)["info"]["description"]
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
    assert [name for name in HARMLESS if name not in told or f"`{name}`" not in page] == []


def told_unknown(caplog: pytest.LogCaptureFixture, body: dict[str, Any], kind: Any, has_own_names: bool) -> set[str]:
    """The fields that the log says to have no effect."""
    parsing._logged_fields.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=parsing.__name__):
        parse(json.dumps(body).encode(), kind, has_own_names)
    return {record.getMessage().split("'")[1] for record in caplog.records}


def test_another_apis_names_are_logged_where_they_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    unknown: dict[str, Any] = {"suffix": "a", "reasoning_effort": "low", "guided_json": {}}
    for kind, body in OTHERS:
        assert told_unknown(caplog, {**body, **unknown, "store": True}, kind, True) == {*unknown}
    assert told_unknown(caplog, {"prompt": "a", "suffix": "", "tools": []}, CompletionRequest, False) == set()


def test_sessions_of_tokens_have_an_effect_and_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    body = {"token_ids": [5], "session_id": "a", "prompt_cache_key": "b"}
    assert told_unknown(caplog, body, TokensRequest, False) == set()
    made = parse(json.dumps(body).encode(), TokensRequest).completion()
    assert (made.session_id, made.prompt_cache_key) == ("a", "b")


KEPT = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds", "logprob_token_ids", "repetition_detection")


@pytest.mark.parametrize("name", KEPT)
def test_parameters_that_would_change_the_answer_are_not_ignored(name: str) -> None:
    assert refused(json.dumps({"prompt": "a", name: {"host": "10.0.0.1"}}).encode()).param == name


# Fields of vLLM 0.32's requests that OpenAI's have not; what samples is in VLLM_SAMPLING.
VLLMS_OF_ALL = {
    *("cache_salt", "ec_transfer_params", "include_metrics", "kv_transfer_params", "logprob_token_ids", "mm_payload"),
    *("priority", "repetition_detection", "request_id", "return_mm_kwargs", "return_token_ids"),
    *("return_token_offsets", "return_tokens_as_token_ids", "routed_experts_prompt_start", "session_id"),
    *("stream_interval", "truncation_side", "vllm_xargs", "watermarking"),
}
VLLMS_OF_CHATS = {
    *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "echo", "include_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text"),
}
VLLMS_OF_RESPONSES = {
    *("cache_salt", "chat_template_kwargs", "ec_transfer_params", "enable_response_messages", "frequency_penalty"),
    *("ignore_eos", "include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "logit_bias"),
    *("media_io_kwargs", "min_p", "mm_payload", "mm_processor_kwargs", "presence_penalty", "previous_input_messages"),
    *("priority", "repetition_penalty", "request_id", "return_mm_kwargs", "seed", "session_id"),
    *("skip_special_tokens", "stop", "stop_token_ids", "structured_outputs", "top_k", "vllm_xargs", "watermarking"),
}
VLLMS_OF_TOKENS = {
    *("cache_salt", "content_parts", "ec_transfer_params", "include_metrics", "kv_transfer_params", "output_mode"),
    *("priority", "reasoning_ended", "reasoning_parser_kwargs", "request_id", "return_token_ids", "token_offsets"),
}
VLLMS_OF_RANKING = {
    *("max_tokens_per_doc", "max_tokens_per_query", "mm_processor_kwargs", "padding", "priority", "request_id"),
    *("truncate_prompt_tokens", "truncation_side", "use_activation"),
}
VLLMS_OF_EMBEDDING = {
    *("add_special_tokens", "cache_salt", "chat_template", "chat_template_kwargs", "embed_dtype", "endianness"),
    *("messages", "mm_processor_kwargs", "normalize", "padding", "priority", "request_id"),
    *("truncate_prompt_tokens", "truncation_side", "use_activation"),
}


def test_every_field_of_vllms_routes_is_known() -> None:
    """Honoured, refused by name, or known to say nothing about the answer."""
    for fields, model, other in (
        (VLLMS_OF_ALL | {"add_special_tokens", "echo"}, CompletionRequest, {*NOT_YET, *HARMLESS}),
        (VLLMS_OF_ALL | VLLMS_OF_CHATS, ChatCompletionRequest, {*NOT_YET, *HARMLESS}),
        (VLLMS_OF_RESPONSES, ResponsesRequest, HARMLESS),
        (VLLMS_OF_TOKENS, TokensRequest, set()),
        (VLLMS_OF_EMBEDDING, EmbeddingRequest, EmbeddingRequest.REFUSED.keys()),
        (VLLMS_OF_RANKING, RerankRequest, RerankRequest.REFUSED.keys()),
    ):
        assert not fields - {*model.model_fields} - {*other}, model


def test_rendered_requests_of_vllm_are_read() -> None:
    """Its renderer adds hints for its own engine; what would change the answer is refused."""
    body = {"token_ids": [5], "token_offsets": [[0, 1]], "reasoning_parser_kwargs": {"a": 1}, "reasoning_ended": False}
    request = parse(json.dumps({**body, "output_mode": "tokens", "content_parts": None}).encode(), TokensRequest)
    assert request.completion().prompt == [5]
    for wanted in (True, False):
        parse(json.dumps({**body, "return_token_ids": wanted}).encode(), TokensRequest)
    for fields in ({"output_mode": "text"}, {"content_parts": [{"type": "text"}]}):
        with pytest.raises(RequestError, match=next(iter(fields))):
            parse(json.dumps({**body, **fields}).encode(), TokensRequest)
    guided = {**body, "sampling_params": {"structured_outputs": {"choice": ["a"]}}}
    with pytest.raises(RequestError, match="reasoning_ended: false"):
        parse(json.dumps(guided).encode(), TokensRequest).completion()


@pytest.mark.parametrize(
    ("name", "neutral", "wrong"),
    [("max_tokens_per_query", 0, 9), ("max_tokens_per_doc", 0, 9), ("padding", "do_not_pad", "x")],
)
def test_rankings_are_not_cut_or_padded_otherwise(name: str, neutral: Any, wrong: Any) -> None:
    for kind, pair in ((RerankRequest, {"query": "a"}), (ScoreRequest, {"queries": "a"})):
        parse_pooling(json.dumps({**pair, "documents": ["b"], name: neutral}).encode(), kind)
        with pytest.raises(RequestError, match=f"{name}: .* is not supported"):
            parse_pooling(json.dumps({**pair, "documents": ["b"], name: wrong}).encode(), kind)


def test_the_first_tokens_are_kept_where_the_right_side_is_cut() -> None:
    ids = list(range(50))
    for side, kept in (("right", ids[:7]), ("left", ids[-7:]), (None, ids[-7:])):
        request = parsed(truncate_prompt_tokens=7, truncation_side=side)
        assert truncated(request, ids, 100, 16) == kept


def test_all_wrong_keys_are_named() -> None:
    error = str(refused(json.dumps({"prompt": "a", "logit_bias": {"x": 1, "5": 1, "-3": 2}}).encode()))
    assert error.startswith("logit_bias: 'x', '-3' are no token ids")
    body = json.dumps({"prompt": "a", "logit_bias": {"x": 1, "5": 1, "400": 2, "-3": 2, "399": 1, "9999999999": 1}})
    with pytest.raises(RequestError) as caught:
        parse(body.encode(), CompletionRequest, vocab_size=400)
    assert (caught.value.param, str(caught.value)) == (
        "logit_bias",
        "logit_bias: 'x', '-3' are no token ids; keys are ids, as in {\"5\": -100}; 400, 9999999999 are not in the "
        "vocabulary; ids are 0 to 399",
    )


# ---- what becomes of the fields


def test_sampling_takes_the_request_then_the_model_then_nothing() -> None:
    model: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    numbers: dict[str, Any] = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.2}
    others: dict[str, Any] = {"presence_penalty": -0.5, "frequency_penalty": 2.0, "seed": -4, "ignore_eos": True}
    more: dict[str, Any] = {"n": 3, "min_tokens": 2, "logprobs": 4, "prompt_logprobs": 0}
    given = parsed(
        **numbers,
        **others,
        **more,
        stop_token_ids=[5, 6],
        allowed_token_ids=[9, 3, 9],
        logit_bias={"7": -3, "0": 1.5},
    )
    assert given.sampling(7, 9, model) == Sampling(
        max_tokens=7,
        **numbers,
        **others,
        **more,
        stop_token_ids=(5, 6),
        allowed_token_ids=(3, 9),
        logit_bias=((0, 1.5), (7, -3.0)),
    )
    assert parsed().sampling(7, 9, model) == Sampling(max_tokens=7, seed=9, **model)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-320])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    """In float32, 1e-320 is 0: dividing logits by it makes no distribution."""
    assert parsed(temperature=temperature).sampling(1, 1, {}).greedy


def test_stop_strings_are_one_or_some() -> None:
    assert parsed(stop="a").stops == ["a"]
    assert parsed(stop=["a"] * MAX_STOP_STRINGS).stops == ["a"] * MAX_STOP_STRINGS


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * (MAX_STOP_STRINGS + 1)])
def test_stop_strings_that_make_no_sense(stop: Any) -> None:
    with pytest.raises(RequestError) as caught:
        _ = parsed(stop=stop).stops
    assert caught.value.param == "stop"


def test_max_completion_tokens_comes_first() -> None:
    assert parsed(ChatCompletionRequest, max_tokens=5, max_completion_tokens=6).wanted_tokens == 6
    assert parsed(ChatCompletionRequest, max_tokens=5).wanted_tokens == 5


def test_include_usage() -> None:
    assert parsed(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parsed(stream=True, stream_options={"include_usage": False}).include_usage


def test_text_parts_are_joined_and_other_keys_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    (message,) = parsed(ChatCompletionRequest, messages=[{"role": "user", "content": parts, "name": "x"}]).messages
    assert message.to_template(0) == {"role": "user", "content": "a\nb", "name": "x"}


@pytest.mark.parametrize("given", [{"content": None}, {}])
def test_a_message_without_content(given: dict[str, Any]) -> None:
    """It is None if there are calls, which templates check; otherwise it is an empty text."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for more, content in ({}, ""), ({"tool_calls": []}, ""), ({"tool_calls": calls}, None):
        (message,) = parsed(ChatCompletionRequest, messages=[{"role": "assistant", **given, **more}]).messages
        assert message.to_template(0) == {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in MINIMAL for name in kind.model_fields if name not in MINIMAL[kind]]
)
def test_null_is_as_if_not_given(kind: type[GenerationRequest], name: str) -> None:
    """One field is an exception."""
    plain, null = parsed(kind), parsed(kind, **{name: None})
    assert getattr(null, name) in (None, getattr(plain, name))
    assert null.sampling(16, 5, {}) == plain.sampling(16, 5, {})
    assert (null.wants_all_room, plain.wants_all_room) == (name == "max_tokens", False)


def test_options_of_a_stream_are_for_streams() -> None:
    for kind in (b'"prompt": "a"', b'"prompt": "a", "stream": false'):
        assert refused(b'{"stream_options": {"include_usage": false}, ' + kind + b"}").param == "stream_options"


@pytest.mark.parametrize("length", [1024, 1025])
def test_the_longest_stop_string(length: int) -> None:
    body = json.dumps({"prompt": "a", "stop": ["b", "x" * length]}).encode()
    if length <= 1024:
        assert parse(body, CompletionRequest).stops[1] == "x" * length
    else:
        assert "1025 characters" in str(refused(body))


def test_a_seed_of_minus_one_is_none() -> None:
    assert [parsed(CompletionRequest, seed=seed).sampling(1, 5, {}).seed for seed in (-1, None, 0, 7, -2)] == [
        *(5, 5, 0),
        *(7, -2),
    ]


def test_options_of_a_stream() -> None:
    def wanted(**options: Any) -> tuple[bool, bool]:
        request = parsed(CompletionRequest, stream=True, stream_options=options)
        return request.include_usage, request.include_usage_so_far

    assert wanted() == wanted(continuous_usage_stats=True) == (False, False)
    assert wanted(include_usage=True) == (True, False)
    assert wanted(include_usage=None) == wanted(include_usage=False, continuous_usage_stats=True) == (False, False)
    assert wanted(include_usage=True, continuous_usage_stats=True) == (True, True)
    chat = {"messages": [{"role": "user", "content": "a"}], "stream": True, "stream_options": {}}
    assert parse(json.dumps(chat).encode(), ChatCompletionRequest).include_usage, "as in vLLM"
    assert refused(b'{"prompt": "a", "stream_options": {}}', GenerateRequest).param == "stream_options"


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"type": "file"}, {"text": "a"}, {}],
)
def test_other_parts_are_refused_with_their_place(part: dict[str, Any]) -> None:
    messages = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[1\]: only parts of type 'text'"):
        parsed(ChatCompletionRequest, messages=messages).messages[1].to_template(1)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "text"}, r"\.text: must be a string"),
        ({"type": "refusal", "text": "a"}, r"\.refusal: must be a string"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, ': must have {"image_url": {"url": …}}'),
        ({"type": "video_url", "video_url": 5}, ': must have {"video_url": {"url": …}}'),
    ],
)
def test_parts_of_a_known_type_are_told_what_they_lack(part: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=rf"^messages\[0\]\.content\[0\]{said}$"):
        parsed(ChatCompletionRequest, messages=[{"role": "user", "content": [part]}]).messages[0].to_template(0, True)


def test_deep_keys_of_a_message_reach_the_template_as_they_are() -> None:
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    (message,) = parsed(ChatCompletionRequest, messages=[{**HELLO[0], "junk": deep}]).messages
    assert message.to_template(0)["junk"] == deep
