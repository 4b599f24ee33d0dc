"""Requests from clients: the values of each field, which are right or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.parse import parse
from pd_cluster.service.schema.protocol import (
    MAX_BAD_WORD_NUM_CHARS,
    MAX_BAD_WORDS,
    MAX_SALT_NUM_CHARS,
    MAX_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    NOT_YET,
    CompletionRequest,
    GenerationRequest,
)
from pd_cluster.types import Sampling
from tests.support.parsing import MINIMAL, kinds, parsed, refused


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
