"""Client requests: valid values of each field, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.preprocessing.request_limits import truncated
from pd_cluster.service.schema import completion_protocol
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest, GenerateRequest, GenerationRequest
from pd_cluster.service.schema.predicted_outputs import MAX_PREDICTION_PARTS
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.types import Sampling
from tests.support.parsing import HELLO, MINIMAL, kinds, parsed, refused


@kinds
def test_the_least_that_is_a_request(kind: type[GenerationRequest]) -> None:
    request = parsed(kind)
    given = (request.max_tokens, bool(request.stream), request.stops, request.include_usage)
    assert given == (None, False, [], False)
    assert request.sampling(16, 5, {}) == Sampling(max_tokens=16, seed=5)


def test_a_number_may_be_written_in_another_form() -> None:
    """Numbers in other forms are accepted as in pydantic's lax mode, and so in vLLM; strings stay strings."""
    forms: list[tuple[str, Any, Any]] = [
        *(("max_tokens", "16", 16), ("max_tokens", 16.0, 16), ("max_tokens", " 16.0 ", 16)),
        *(("seed", "9007199254740993", 9007199254740993), ("top_k", "-1", -1)),
        *(("temperature", "0.5", 0.5), ("temperature", "1e-1", 0.1)),
        *(("stop_token_ids", ["5", 6.0, 7], [5, 6, 7]), ("logit_bias", {"5": "-1.5"}, {"5": -1.5})),
        *(("presence_penalty", 0, 0.0), ("repetition_penalty", 1, 1.0)),  # JSON may write whole numbers without a point
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
    "stop_token_ids": (1, ["a"], [-1], [10**30], [1] * (completion_protocol.MAX_STOP_TOKEN_IDS + 1)),
    "ignore_eos": ("yes", 1),
    "skip_special_tokens": (0,),
    "stream": ("true",),
    "stream_options": (1, {"include_usage": "yes"}),
    "user": (3,),
    "return_token_ids": (2,),
    "n": (0, completion_protocol.MAX_SEQUENCES + 1, True, 1.5, "2.5"),
    "best_of": (0, completion_protocol.MAX_SEQUENCES + 1, False),
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
    "bad_words": (
        *(
            "a",
            [1],
            ["a", ""],
            ["a"] * (completion_protocol.MAX_BAD_WORDS + 1),
            ["a" * (completion_protocol.MAX_BAD_WORD_NUM_CHARS + 1)],
        ),
    ),
    "allowed_token_ids": ([], 5, ["a"], [-1], [2**31], [1.5], [True]),
    "prompt_logprobs": (-2, True, "one", 1.5),
    "include_stop_str_in_output": ("yes",),
    "return_tokens_as_token_ids": (1,),
    "cache_salt": ("", 5, "x" * (completion_protocol.MAX_SALT_NUM_CHARS + 1)),
    "truncate_prompt_tokens": (0, -2, 1.5, "five", True),
    "guided_json": (5, True, ["a"]),
    "guided_choice": ("a", [1]),
    "response_format": ("json", [], {"type": "xml"}),
    "prediction": (
        *("a", [], {"content": "a"}, {"type": "text", "content": "a"}, {"type": "content"}),
        *({"type": "content", "content": content} for content in (5, None, ["a"], [{"type": "image_url"}])),
        {"type": "content", "content": [{"type": "text", "text": "a"}] * (MAX_PREDICTION_PARTS + 1)},
    ),
    "speculative": (1, "false", []),
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
    wrong: list[Any] = [None, 1, 1.5, {}, True, [1.5], ["a", 1], [[1, "a"]], [True], [[[1]]], [None]]
    for each in wrong:
        assert refused(json.dumps({"prompt": each}).encode()).param == "prompt"


def test_wrong_messages() -> None:
    wrong: list[Any] = [
        *(None, "hello", [], [1], [{}], [{"content": "no role"}], [{"role": "", "content": "x"}]),
        *([{"role": "user", "content": 3}], [{"role": "user", "content": [5]}], {"role": "user", "content": "x"}),
    ]
    for messages in wrong:
        assert refused(json.dumps({"messages": messages}).encode(), ChatCompletionRequest).param == "messages"


@kinds
def test_a_required_field_is_named(kind: type[GenerationRequest]) -> None:
    assert refused(b"{}", kind).param == next(iter(MINIMAL[kind]))


@kinds
@pytest.mark.parametrize("name", completion_protocol.NOT_YET)
def test_not_yet_is_refused_by_name_and_neutral_values_pass(kind: type[GenerationRequest], name: str) -> None:
    for neutral in (None, *completion_protocol.NOT_YET[name]):
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


def test_a_refusal_has_field_and_value_and_all_wrong_keys() -> None:
    assert str(refused(b'{"prompt": "a", "min_p": 1.5}')) == "min_p: 1.5: Input should be less than or equal to 1"
    assert len(str(refused(json.dumps({"prompt": "a", "logit_bias": {"x" * 9999: 1}}).encode()))) < 150
    assert len(str(refused(json.dumps({"prompt": "a", "logit_bias": {"x" * 9999: "y" * 9999}}).encode()))) < 150
    body = json.dumps({"prompt": "a", "logit_bias": {"x": 1, "5": 1, "400": 2, "-3": 2, "399": 1, "9999999999": 1}})
    with pytest.raises(RequestError) as caught:
        parse(body.encode(), CompletionRequest, vocab_size=400)
    assert caught.value.param == "logit_bias"
    assert str(caught.value).startswith("logit_bias: 'x', '-3' are not token ids; ")
    assert str(caught.value).endswith("; 400, 9999999999 are not in the vocabulary; ids are 0 to 399")


# ---- combinations of fields, and their meaning


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


def test_logprobs_of_every_kind_of_request() -> None:
    for fields, number in (
        *(({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ):
        assert parsed(ChatCompletionRequest, **fields).sampling(1, 1, {}).logprobs == number
    refused(json.dumps({"messages": HELLO, "logprobs": 3}).encode(), ChatCompletionRequest)
    for kind in (CompletionRequest, GenerateRequest):
        for number in (None, 0, 4, -1):
            assert parsed(kind, logprobs=number).sampling(1, 1, {}).logprobs == number
        for wrong in (True, False, -2, "one", 1.5):
            assert refused(json.dumps({**MINIMAL[kind], "logprobs": wrong}).encode(), kind).param == "logprobs"
    assert parsed(logprobs=3).sampling(1, 1, {}).prompt_logprobs is None
    assert parsed(logprobs=3, echo=True).sampling(1, 1, {}).prompt_logprobs == 3
    assert parsed(logprobs=3, echo=True, prompt_logprobs=1).sampling(1, 1, {}).prompt_logprobs == 1
    assert parsed(echo=True).sampling(1, 1, {}).prompt_logprobs is None
    assert parsed(n=2, best_of=3).sampling(1, 1, {}).logprobs == 0
    assert parsed(n=2, best_of=3, logprobs=2).sampling(1, 1, {}).logprobs == 2
    assert parsed(n=3, best_of=3).sampling(1, 1, {}).logprobs is None
    assert (parsed(n=2, best_of=3).sampling(1, 1, {}).n, parsed(n=2).sampling(1, 1, {}).n) == (3, 2)


def test_beams_are_n_answers_of_a_width() -> None:
    """Beam search ignores the model's sampling defaults except a repetition penalty."""
    defaults: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    given = parsed(use_beam_search=True, n=2, best_of=4, length_penalty=0, early_stopping="never", temperature=1e-9)
    settings: dict[str, Any] = {"n": 2, "beam_width": 4, "length_penalty": 0.0, "early_stopping": "never"}
    beams = Sampling(max_tokens=7, temperature=0.0, seed=5, repetition_penalty=1.1, **settings)
    assert given.sampling(7, 5, defaults) == beams
    assert parsed(use_beam_search=True, n=3).sampling(7, 5, {}).num_sequences == 3
    assert parsed(use_beam_search=True, best_of=3, stream=True).beam_width == 3
    assert parsed(use_beam_search=False, n=3, length_penalty=1, early_stopping=False).beam_width == 0


def test_the_first_tokens_are_kept_where_the_right_side_is_cut() -> None:
    ids = list(range(50))
    for side, kept in (("right", ids[:7]), ("left", ids[-7:]), (None, ids[-7:])):
        request = parsed(truncate_prompt_tokens=7, truncation_side=side)
        assert truncated(request, ids, 100, 16) == kept


def test_sampling_takes_the_request_then_the_model_then_nothing() -> None:
    model: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    numbers: dict[str, Any] = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.2}
    others: dict[str, Any] = {"presence_penalty": -0.5, "frequency_penalty": 2.0, "seed": -4, "ignore_eos": True}
    more: dict[str, Any] = {"n": 3, "min_tokens": 2, "logprobs": 4, "prompt_logprobs": 0}
    plain = {**numbers, **others, **more}
    given = parsed(**plain, stop_token_ids=[5, 6], allowed_token_ids=[9, 3, 9], logit_bias={"7": -3, "0": 1.5})
    listed: dict[str, Any] = {"stop_token_ids": (5, 6), "allowed_token_ids": (3, 9)}
    expected = Sampling(max_tokens=7, **plain, **listed, logit_bias=((0, 1.5), (7, -3.0)))
    assert given.sampling(7, 9, model) == expected
    assert parsed().sampling(7, 9, model) == Sampling(max_tokens=7, seed=9, **model)


def test_values_that_stand_for_others() -> None:
    """Equivalent values are mapped to one; 1e-320 is 0 in float32, so as a temperature it means greedy."""
    assert all(parsed(temperature=each).sampling(1, 1, {}).greedy for each in (0, 0.0, 1e-6, 1e-320))
    assert parsed(ChatCompletionRequest, max_tokens=5, max_completion_tokens=6).wanted_tokens == 6
    assert parsed(ChatCompletionRequest, max_tokens=5).wanted_tokens == 5
    given = (-1, None, 0, 7, -2)
    assert [parsed(CompletionRequest, seed=seed).sampling(1, 5, {}).seed for seed in given] == [5, 5, 0, 7, -2]


def test_stop_strings_are_one_or_some() -> None:
    assert parsed(stop="a").stops == ["a"]
    longest = ["x" * 1024] * completion_protocol.MAX_STOP_STRINGS
    assert parsed(stop=longest).stops == longest
    assert "1025 characters" in str(refused(json.dumps({"prompt": "a", "stop": ["b", "x" * 1025]}).encode()))
    for stop in ("", ["a", ""], ["a"] * (completion_protocol.MAX_STOP_STRINGS + 1)):
        with pytest.raises(RequestError) as caught:
            _ = parsed(stop=stop).stops
        assert caught.value.param == "stop"


def test_messages_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    (message,) = parsed(ChatCompletionRequest, messages=[{"role": "user", "content": parts, "name": "x"}]).messages
    assert message.to_template(0) == {"role": "user", "content": "a\nb", "name": "x"}
    # content is None if there are calls, as templates expect; otherwise an empty string
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for given in ({"content": None}, {}):
        for more, content in ({}, ""), ({"tool_calls": []}, ""), ({"tool_calls": calls}, None):
            (message,) = parsed(ChatCompletionRequest, messages=[{"role": "assistant", **given, **more}]).messages
            assert message.to_template(0) == {"role": "assistant", "content": content, **more}
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    (message,) = parsed(ChatCompletionRequest, messages=[{**HELLO[0], "junk": deep}]).messages
    assert message.to_template(0)["junk"] == deep


@kinds
def test_null_is_as_if_not_given(kind: type[GenerationRequest]) -> None:
    """null means not given, except that `max_tokens` may then fill the context."""
    plain = parsed(kind)
    for name in kind.model_fields.keys() - MINIMAL[kind].keys():
        null = parsed(kind, **{name: None})
        assert getattr(null, name) in (None, getattr(plain, name)), name
        assert null.sampling(16, 5, {}) == plain.sampling(16, 5, {}), name
        assert (null.wants_whole_context, plain.wants_whole_context) == (name == "max_tokens", False)


def test_options_of_a_stream() -> None:
    def wanted(**options: Any) -> tuple[bool, bool]:
        request = parsed(CompletionRequest, stream=True, stream_options=options)
        return request.include_usage, request.include_usage_so_far

    assert wanted() == wanted(continuous_usage_stats=True) == (False, False)
    assert wanted(include_usage=True) == (True, False)
    assert wanted(include_usage=None) == wanted(include_usage=False, continuous_usage_stats=True) == (False, False)
    assert wanted(include_usage=True, continuous_usage_stats=True) == (True, True)
    for kind in (b'"prompt": "a"', b'"prompt": "a", "stream": false'):
        assert refused(b'{"stream_options": {"include_usage": false}, ' + kind + b"}").param == "stream_options"
    chat = {"messages": [{"role": "user", "content": "a"}], "stream": True, "stream_options": {}}
    assert parse(json.dumps(chat).encode(), ChatCompletionRequest).include_usage, "expected the same as in vLLM"
    assert refused(b'{"prompt": "a", "stream_options": {}}', GenerateRequest).param == "stream_options"


def test_other_parts_are_refused_with_their_place() -> None:
    image = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    part: dict[str, Any]
    for part in (image, {"type": "file"}, {"text": "a"}, {}):
        messages = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
        with pytest.raises(RequestError, match=r"messages\[1\]\.content\[1\]: only parts of type 'text'"):
            parsed(ChatCompletionRequest, messages=messages).messages[1].to_template(1)
    for part, said in (
        ({"type": "text"}, r"\.text: must be a string"),
        ({"type": "refusal", "text": "a"}, r"\.refusal: must be a string"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, ': must have {"image_url": {"url": …}}'),
        ({"type": "video_url", "video_url": 5}, ': must have {"video_url": {"url": …}}'),
    ):
        message = parsed(ChatCompletionRequest, messages=[{"role": "user", "content": [part]}]).messages[0]
        with pytest.raises(RequestError, match=rf"^messages\[0\]\.content\[0\]{said}$"):
            message.to_template(0, True)
