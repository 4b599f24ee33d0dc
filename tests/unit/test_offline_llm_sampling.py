"""SamplingParams: how its fields reach the engine, and the same checks as in the API."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pd_cluster import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from pd_cluster.errors import RequestError
from pd_cluster.types import Guide
from tests.support.offline import LIMIT, MakeLLM, fake_llms, same

SCHEMA = {"type": "object"}


make = pytest.fixture(fake_llms)


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_field_reaches_the_engine(make: MakeLLM, is_chat: bool) -> None:
    llm, offline = make("abc")
    ask: Callable[..., Any] = llm.chat if is_chat else llm.generate
    others: list[tuple[dict[str, Any], dict[str, Any]]] = [
        same(presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, top_p=0.9, top_k=7, min_p=0.1),
        same(temperature=0.3, max_tokens=30, min_tokens=3, seed=5, stop_token_ids=(9, 8)),
        same(ignore_eos=True),
        ({"logit_bias": {5: -100}}, {"logit_bias": ((5, -100.0),)}),
        ({"allowed_token_ids": [5, 4]}, {"allowed_token_ids": (4, 5)}),
        (
            {"n": 2, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"},
            {"n": 2, "beam_width": 2, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0.0},
        ),
    ]
    for given, wanted in others:
        ask([{"role": "user", "content": "x"}] if is_chat else "x", SamplingParams(**given), use_tqdm=False)
        sampling = offline.router.requests[-1]
        assert {name: getattr(sampling, name) for name in wanted} == wanted
    ask([{"role": "user", "content": "x"}] if is_chat else "x", SamplingParams(bad_words=["ab"]), use_tqdm=False)
    assert [len(word) for word in offline.router.requests[-1].bad_words] == [2]
    for prediction in ("ab", {"type": "content", "content": "ab"}):
        params = SamplingParams(prediction=prediction, speculative=False)
        ask([{"role": "user", "content": "x"}] if is_chat else "x", params, use_tqdm=False)
        assert (len(offline.router.orders[-1].prediction), offline.router.orders[-1].may_draft) == (2, False)


def test_stop_strings_and_truncation(make: MakeLLM) -> None:
    llm, _ = make("abcdef")
    (output,) = llm.generate("0123456789", SamplingParams(stop="cd", truncate_prompt_tokens=4), use_tqdm=False)
    (first,) = output.outputs
    assert (first.text, first.finish_reason, first.stop_reason) == ("ab", "stop", "cd")
    assert len(output.prompt_token_ids) == 4
    llm, _ = make("abcdef")
    (output,) = llm.generate("0", SamplingParams(stop=["cd"], include_stop_str_in_output=True), use_tqdm=False)
    assert output.outputs.text == "abcd"


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_wrong_value_is_refused_before_any_work(make: MakeLLM, is_chat: bool) -> None:
    llm, offline = make("abc")
    ask: Callable[..., Any] = llm.chat if is_chat else llm.generate
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"logits_processors": [print]}, "logits_processors"),
        ({"thinking_token_budget": 100}, "thinking_token_budget"),
        ({"stop": object()}, "stop"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"guided_decoding": GuidedDecodingParams(regex="a", choice=["b"])}, "guided_choice"),
    ]
    for given, param in wrong:
        several = [SamplingParams(), SamplingParams(**given)]
        with pytest.raises(RequestError, match=f"^{param}[:.]") as caught:
            ask([[{"role": "user", "content": "x"}]] * 2 if is_chat else ["x", "y"], several)
        assert caught.value.param == param
    assert offline.router.requests == []


# ---- max_tokens: the output's, or prompt and output together


@pytest.mark.parametrize(
    ("params", "generated", "chatted"),
    [
        (SamplingParams(), 16, LIMIT - 10),
        (SamplingParams(max_tokens=None), LIMIT - 10, LIMIT - 10),
        (SamplingParams(max_tokens=6400), LIMIT - 10, LIMIT - 10),
        (SamplingParams(max_tokens=30, max_tokens_includes_prompt=True), 20, 20),
        (SamplingParams(max_tokens=6400, max_tokens_includes_prompt=True), LIMIT - 10, LIMIT - 10),
    ],
)
def test_max_tokens_counts_the_output_or_both(
    make: MakeLLM, params: SamplingParams, generated: int, chatted: int
) -> None:
    llm, offline = make("abc", chat_template="{{ messages[0].content }}")
    llm.generate("0123456789", params, use_tqdm=False)
    llm.chat([{"role": "user", "content": "0123456789"}], params, use_tqdm=False)
    assert [sampling.max_tokens for sampling in offline.router.requests] == [generated, chatted]


def test_max_tokens_of_both_that_the_prompt_has_used_up(make: MakeLLM) -> None:
    llm, _ = make("abc")
    params = SamplingParams(max_tokens=5, max_tokens_includes_prompt=True)
    short, long = llm.generate(["0123", "01234"], params, use_tqdm=False)
    assert (short.error_msg, short.outputs.text) == (None, "abc")
    assert (long.error_code, (long.error_msg or "")[:13]) == (400, "max_tokens: 5")


# ---- guides


GUIDES = [
    (SamplingParams(guided_decoding=GuidedDecodingParams(regex="a+")), Guide("regex", "a+")),
    (SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", "b"])), Guide("choice", '["a","b"]')),
    (SamplingParams(guided_decoding=GuidedDecodingParams(json_object=True)), Guide("json_object")),
    (SamplingParams(guided_decoding={"guided_regex": "a+"}), Guide("regex", "a+")),
    (SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA)), Guide("json", '{"type":"object"}')),
    (SamplingParams(structured_outputs={"regex": "a+"}), Guide("regex", "a+")),
    (SamplingParams(response_format={"type": "json_object"}), Guide("json_object")),
]


def test_a_guide_by_any_of_its_names(make: MakeLLM) -> None:
    llm, offline = make("a")  # shared, because each starts a process that checks guides
    for params, guide in GUIDES:
        llm.generate("x", params, use_tqdm=False)
        llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
        assert [sampling.guide for sampling in offline.router.requests[-2:]] == [guide, guide]


@dataclasses.dataclass
class GuidedDecodingRequest:
    """vLLM 0.6's class."""

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None


def test_guided_options_go_with_every_prompt(make: MakeLLM) -> None:
    llm, offline = make("a")
    for options in (
        {"guided_choice": ["a", "b"]},
        {"choice": ["a", "b"], "guided_decoding_backend": "outlines"},
        GuidedDecodingRequest(guided_choice=["a", "b"]),
        GuidedDecodingParams(choice=["a", "b"]),
    ):
        llm.generate(["x", "y"], guided_options_request=options, use_tqdm=False)
        assert [sampling.guide for sampling in offline.router.requests[-2:]] == [Guide("choice", '["a","b"]')] * 2


def test_two_guides_are_one_too_many(make: MakeLLM) -> None:
    llm, offline = make("a")
    for guided in ({"regex": "a"}, {"choice": ["a"]}):
        with pytest.raises(RequestError, match="give one of the two"):
            llm.generate("x", SamplingParams(guided_decoding=guided), guided_options_request={"regex": "b"})
    assert offline.router.requests == []
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
