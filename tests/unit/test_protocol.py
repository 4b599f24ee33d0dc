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
    given = (request.max_tokens, bool(request.stream), request.stops, request.include_usage)
    assert given == (None, False, [], False)
    assert request.sampling(16, 5, {}) == Sampling(max_tokens=16, seed=5)


def test_a_number_may_be_written_in_another_form() -> None:
    """As pydantic's lax mode, and so vLLM, takes it. Texts stay texts."""
    forms: list[tuple[str, Any, Any]] = [
        *(("max_tokens", "16", 16), ("max_tokens", 16.0, 16), ("max_tokens", " 16.0 ", 16)),
        *(("seed", "9007199254740993", 9007199254740993), ("top_k", "-1", -1)),
        *(("temperature", "0.5", 0.5), ("temperature", "1e-1", 0.1)),
        *(("stop_token_ids", ["5", 6.0, 7], [5, 6, 7]), ("logit_bias", {"5": "-1.5"}, {"5": -1.5})),
        *(("presence_penalty", 0, 0.0), ("repetition_penalty", 1, 1.0)),  # JSON writes whole numbers without a point
    ]
    for name, written, meant in forms:
        request = parse(json.dumps({"prompt": "16", "user": "7", name: written}).encode(), CompletionRequest)
        assert (getattr(request, name), type(getattr(request, name))) == (meant, type(meant))
        assert (request.prompt, request.user) == ("16", "7")


WRONG: dict[str, tuple[Any, ...]] = {
    "session_id": ("x" * 1025,),
    "model": (3,),
    "max_tokens": ("sixteen", 1.5, True),
    "temperature": ("0x", -0.1, False, int("9" * 400)),
    "top_p": (0, 1.1, [1]),
    "top_k": (-2, 0.5, 10**30),
    "seed": ("x", 2**64, -(2**63) - 1),
    "stop": (1, [1], {"a": 1}),
    "stop_token_ids": (1, ["a"], [-1], [10**30], [1] * (MAX_STOP_TOKEN_IDS + 1)),
    "ignore_eos": ("yes", 1),
    "skip_special_tokens": (0,),
    "stream": ("true",),
    "stream_options": (1, {"include_usage": "yes"}),
    "user": (3,),
    "return_token_ids": (2,),
    "n": (0, MAX_SEQUENCES + 1, True, 1.5, "2.5"),
    "best_of": (0, MAX_SEQUENCES + 1, False),
    "presence_penalty": (-2.01, 2.01, "one", True),
    "frequency_penalty": (-2.01, 2.01),
    "repetition_penalty": (0, -1, 2.01, "one"),
    "min_p": (-0.01, 1.01, "none"),
    "use_beam_search": ("yes", 1, 0),  # True is not 1, and 0 is not False
    "priority": (False,),
    "detokenize": (1,),
    "length_penalty": ("one", 10.5, -10.5, True),
    "early_stopping": ("always", 1, 0.5),
    "min_tokens": (-1, 1.5, "one", 10**30),
    "logit_bias": (
        *([], 3, {"5": "x"}, {"5": 100.5}, {"5": -101}, {"5": None}, {"5": True}),
        *({key: 1} for key in ("", "x", "-1", "1.0", "05", " 5", "5 ", "\u0665", "9" * 11)),
    ),
    "bad_words": ("a", [1], ["a", ""], ["a"] * (MAX_BAD_WORDS + 1), ["a" * (MAX_BAD_WORD_NUM_CHARS + 1)]),
    "allowed_token_ids": ([], 5, ["a"], [-1], [2**31], [1.5], [True]),
    "prompt_logprobs": (-2, True, "one", 1.5),
    "include_stop_str_in_output": ("yes",),
    "return_tokens_as_token_ids": (1,),
    "cache_salt": ("", 5, "x" * (MAX_SALT_NUM_CHARS + 1)),
    "truncate_prompt_tokens": (0, -2, 1.5, "five", True),
    "guided_json": (5, True, ["a"]),
    "guided_choice": ("a", [1]),
    "response_format": ("json", [], {"type": "xml"}),
}


@kinds
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_name(kind: type[GenerationRequest], name: str) -> None:
    for value in WRONG[name]:
        error = refused(json.dumps({**MINIMAL[kind], name: value}).encode(), kind)
        assert error.param == name, value
        assert name in str(error)


def test_prompts_of_every_form_and_of_none() -> None:
    for prompt in ("a", "", [1, 2], ["a"], ["a", "b"], [[1], [2]], []):
        assert parsed(prompt=prompt).prompt == prompt
    for prompt in (None, 1, 1.5, {}, True, [1.5], ["a", 1], [[1, "a"]], [True], [[[1]]], [None]):
        assert refused(json.dumps({"prompt": prompt}).encode()).param == "prompt"


def test_wrong_messages() -> None:
    for messages in (
        *(None, "hello", [], [1], [{}], [{"content": "no role"}], [{"role": "", "content": "x"}]),
        *([{"role": "user", "content": 3}], [{"role": "user", "content": [5]}], {"role": "user", "content": "x"}),
    ):
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


def test_numbers_are_finite() -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        for name in ("temperature", "presence_penalty", "min_p", "repetition_penalty"):
            refused(f'{{"prompt": "a", "{name}": {value}}}'.encode())
        refused(f'{{"prompt": "a", "logit_bias": {{"5": {value}}}}}'.encode())


def test_a_refusal_has_field_and_value() -> None:
    assert str(refused(b'{"prompt": "a", "min_p": 1.5}')) == "min_p: 1.5: Input should be less than or equal to 1"
    assert len(str(refused(json.dumps({"prompt": "a", "logit_bias": {"x" * 9999: 1}}).encode()))) < 150
    assert len(str(refused(json.dumps({"prompt": "a", "logit_bias": {"x" * 9999: "y" * 9999}}).encode()))) < 150


def test_all_wrong_keys_are_named() -> None:
    body = json.dumps({"prompt": "a", "logit_bias": {"x": 1, "5": 1, "400": 2, "-3": 2, "399": 1, "9999999999": 1}})
    with pytest.raises(RequestError) as caught:
        parse(body.encode(), CompletionRequest, vocab_size=400)
    assert caught.value.param == "logit_bias"
    assert str(caught.value).startswith("logit_bias: 'x', '-3' are no token ids; ")
    assert str(caught.value).endswith("; 400, 9999999999 are not in the vocabulary; ids are 0 to 399")
