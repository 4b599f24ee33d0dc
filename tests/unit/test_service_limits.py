"""Limits of requests: prompts, logprobs and lengths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from pd_cluster.errors import RequestError
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.generation.prompt_generation import CompletionTokensDetails, PromptTokensDetails, usage_of
from pd_cluster.service.preprocessing import request_preprocessor
from pd_cluster.service.prompts.prompt_encoder import TRUNCATED_NUM_CHARS
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.types import DraftReport, Logprobs, PromptOutput
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, make_tokenizer
from tests.support.text_services import Services, chat, completion, services_in, whole


@pytest.fixture
def make(tmp_path: Path) -> Services:
    return services_in(tmp_path)


# ---- the prompt


def test_cached_tokens_are_told_once_they_are_known(make: Services) -> None:
    service, router = make("ab")
    router.told = PromptOutput("r", 0, 16)
    generation = completion(service, "a", cache_salt="mine")
    assert generation.usage.prompt_tokens_details is None
    whole(service, generation)
    assert generation.usage.prompt_tokens_details == PromptTokensDetails(16)
    assert router.salts == ["mine"]


def test_a_tenants_salt_is_on_every_way(make: Services) -> None:
    service, router = make("ab")
    caller, messages = Caller("key", "tenant"), [{"role": "user", "content": "hi"}]
    one, two = CompletionRequest(prompt="a"), CompletionRequest(prompt=["a", "b"], cache_salt="mine")
    begun = [
        asyncio.run(service.completion(one, "a", caller=caller)),
        asyncio.run(service.chat(ChatCompletionRequest.model_validate({"messages": messages}), caller=caller)),
        *asyncio.run(service.completions(two, caller=caller)),
    ]
    for generation in begun:
        whole(service, generation)
    assert router.salts == [caller.salt(None)] * 2 + [caller.salt("mine")] * 2
    assert len({"", "mine", *router.salts}) == 4


def test_nothing_is_generated_for_echo_alone_but_for_the_prompts_logprobs(make: Services) -> None:
    service, router = make("ab")
    generation = completion(service, "hi", echo=True, max_tokens=0, n=2)
    assert [(p.text, p.token_ids, p.finish_reason) for p in whole(service, generation)] == [("", [], "length")] * 2
    assert router.requests == []
    router.told = PromptOutput("r", 0, 0, [None, Logprobs(-1.0, 1, [])])
    generation = completion(service, "hi", echo=True, max_tokens=0, logprobs=1, min_tokens=0)
    router.logprobs = {0: -1.0}
    assert [(p.text, p.token_ids, p.finish_reason) for p in whole(service, generation)] == [("", [], "length")]
    assert (router.requests[0].max_tokens, router.requests[0].prompt_logprobs) == (1, 1)
    assert router.was_closed
    assert generation.prompt_logprobs == router.told.logprobs
    assert generation.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("keep", "max_tokens", "num_kept"), [(3, None, 3), (50, None, 50), (99, 1, 99), (-1, 7, 93), (-1, None, 84)]
)
def test_the_end_of_a_prompt_is_kept(make: Services, keep: int, max_tokens: int | None, num_kept: int) -> None:
    service, _ = make(limit=100)
    prompt, text = [at % 200 for at in range(500)], "hello you " * 50
    generation = completion(service, prompt, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert generation.prompt_token_ids == prompt[-num_kept:]
    generation = completion(service, text, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert service.tokenizer.decode(generation.prompt_token_ids) == text[-num_kept:]
    assert len(chat(service, "x" * 900, truncate_prompt_tokens=-1).prompt_token_ids) == 99
    assert len(chat(service, "x" * 900, truncate_prompt_tokens=-1, max_tokens=30).prompt_token_ids) == 70


@pytest.mark.parametrize(("keep", "max_tokens"), [(100, None), (-1, 100)])
def test_a_prompt_that_cannot_be_cut_to_fit(make: Services, keep: int, max_tokens: int | None) -> None:
    service, _ = make(limit=100)
    with pytest.raises(RequestError, match=f"^truncate_prompt_tokens: {keep} ") as caught:
        completion(service, "hello", truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(RequestError, match=f"send at most {TRUNCATED_NUM_CHARS}"):
        completion(service, "x" * (TRUNCATED_NUM_CHARS + 1), truncate_prompt_tokens=5)


# ---- limits of the model and the server


@pytest.mark.parametrize(
    ("fields", "param", "value"),
    [
        ({"logit_bias": {"5": 1, str(VOCAB_SIZE): 1}}, "logit_bias", VOCAB_SIZE),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", VOCAB_SIZE),
        ({"logprobs": 21}, "logprobs", 21),
        ({"prompt_logprobs": 21}, "prompt_logprobs", 21),
        ({"min_tokens": 17}, "min_tokens", 17),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", 5),
        ({"n": 2, "best_of": 3, "temperature": 0}, "n", 2),
        ({"best_of": 2, "temperature": 1e-9}, "best_of", 2),
        ({"n": 100, "use_beam_search": True}, "n", 100),
        ({"n": 2, "best_of": 100, "use_beam_search": True}, "best_of", 100),
        ({"n": 60, "use_beam_search": True, "max_tokens": 18_000}, "n", "60 hypotheses of up to 18000 tokens"),
        ({"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids", "bad_words"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids", "bad_words"),
    ],
)
def test_what_this_model_and_server_do_not_allow(
    make: Services, fields: dict[str, Any], param: str, value: object
) -> None:
    service, _ = make(limit=20_000)
    with pytest.raises(RequestError, match=rf"^{param}: {value} ") as caught:
        completion(service, "a", **fields)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match=r"^top_logprobs: 21 is more than this server's 20 \(--max-logprobs\)"):
        chat(service, "a", logprobs=True, top_logprobs=21)


def test_bad_words_become_tokens_and_may_not_forbid_all_that_is_allowed(make: Services) -> None:
    service, _ = make()
    encode = service.tokenizer.encode
    for words in (["ab", "c"], [*["b" * 200] * 100, "c"]):
        found = completion(service, "a", bad_words=words).sampling.bad_words
        assert found == tuple(dict.fromkeys(tuple(encode(word)) for word in words))
    (allowed,) = encode("z")
    with pytest.raises(RequestError, match="forbid all of them"):
        completion(service, "a", allowed_token_ids=[allowed], bad_words=["z"])
    assert completion(service, "a", allowed_token_ids=[allowed, 1], bad_words=["z"]).sampling.bad_words


def test_a_prediction_becomes_tokens_as_far_as_the_context_has_room(
    make: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = make(limit=100)
    ids = service.tokenizer.encode("ab c", False)
    for content in ("ab c", [{"type": "text", "text": "ab"}, {"type": "text", "text": " c"}]):
        for ask in (completion, chat):
            order = ask(service, "a", prediction={"type": "content", "content": content}, speculative=False).order
            assert (order.prediction, order.may_draft) == (tuple(ids), False)
    order = completion(service, "a", prediction={"type": "content", "content": "ab c" * 10_000}).order
    assert (order.prediction, order.may_draft) == (tuple(service.tokenizer.encode("ab c" * 100, False)[:100]), True)
    monkeypatch.setattr(request_preprocessor, "MAX_PREDICTED_TOKENS", 2 * len(ids) - 1)
    request = CompletionRequest.model_validate(
        {"prompt": [[1], [2]], "prediction": {"type": "content", "content": "ab c"}}
    )
    generations = asyncio.run(service.completions(request))
    assert [generation.order.prediction for generation in generations] == [tuple(ids[:-1])] * 2
    nothing = CompletionTokensDetails(accepted_prediction_tokens=0, rejected_prediction_tokens=0)
    assert usage_of(generations).completion_tokens_details == nothing
    service.intake.limits = service.intake.limits._replace(vocab_size=max(ids))
    order = completion(service, [1], prediction={"type": "content", "content": "ab c"}).order
    assert order.prediction == tuple(ids[: ids.index(max(ids))]), "expected tokens up to one that the model lacks"


@pytest.mark.parametrize("num_together", [1, 3])
def test_what_became_of_a_prediction_is_told(make: Services, num_together: int) -> None:
    service, router = make("abcdefg")
    router.num_together = num_together
    reports = {(0, 0): DraftReport(2, 1), (0, 3): DraftReport(3, 0), (1, 6): DraftReport(0, 4)}
    router.changes = {at: {"drafts": report} for at, report in reports.items()}
    asked = {"n": 2, "max_tokens": 7, "seed": 5}
    generation = completion(service, "a", prediction={"type": "content", "content": "b"}, **asked)
    whole(service, generation)
    told = CompletionTokensDetails(accepted_prediction_tokens=5, rejected_prediction_tokens=5)
    assert generation.usage.completion_tokens_details == told
    plain = completion(service, "a", **asked)
    whole(service, plain)
    assert plain.usage.completion_tokens_details is None


def test_a_greedy_default_of_the_model_counts(make: Services) -> None:
    service, _ = make(generation_config={"temperature": 0})
    with pytest.raises(RequestError, match=r"^n: 2 with temperature 0"):
        completion(service, "a", n=2)
    assert completion(service, "a", n=2, temperature=1).sampling.n == 2


@pytest.mark.parametrize(("most", "asked"), [(-1, -1), (-1, 4000), (4000, -1), (5000, 4000)])
def test_no_more_logprobs_than_the_vocabulary_has_tokens(make: Services, most: int, asked: int) -> None:
    service, _ = make()
    service.intake.limits = service.intake.limits._replace(max_logprobs=most)
    sampling = completion(service, "a", logprobs=asked, prompt_logprobs=asked).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (VOCAB_SIZE, VOCAB_SIZE)
    service.intake.limits = service.intake.limits._replace(max_logprobs=20)
    with pytest.raises(RequestError, match=rf"^logprobs: -1, all {VOCAB_SIZE} of the vocabulary, is more than .* 20 "):
        completion(service, "a", logprobs=-1)


def test_answers_that_would_fill_the_memory_are_refused(make: Services) -> None:
    service, _ = make()
    service.intake.limits = service.intake.limits._replace(max_logprobs=5000, vocab_size=10**6)
    assert completion(service, "a", n=128, temperature=1, max_tokens=10, logprobs=20).sampling.n == 128
    for fields in ({"n": 128, "max_tokens": 10, "logprobs": 2000}, {"n": 128, "prompt_logprobs": 5000}):
        with pytest.raises(RequestError, match=r"^logprobs: the answer could have \d+, more than the 1000000"):
            completion(service, "a" * 50, temperature=1, **fields)


def test_priorities_need_a_server_that_has_them_and_a_prompt_cache_key_is_a_session(make: Services) -> None:
    service, _ = make()
    assert completion(service, [1], priority=0).order.priority == 0
    with pytest.raises(RequestError, match="priority: 3; this server ignores priorities") as caught:
        completion(service, [1], priority=3)
    assert caught.value.param == "priority"
    service.intake.has_priorities = True
    assert completion(service, [1], priority=3).order.priority == 3
    for fields, name in (
        ({}, ""),
        ({"prompt_cache_key": "mine"}, "mine"),
        ({"session_id": "long" * 256}, "long" * 256),
    ):
        assert completion(service, [1], **fields).order.session == name


def test_a_chats_special_tokens_are_added_when_asked_for(make: Services, tmp_path: Path) -> None:
    """Templates usually write special tokens; if one does not, a request may ask to add them."""
    rust = make_tokenizer()
    rust.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    rust.save(str(tmp_path / "tokenizer.json"))
    service, _ = make()
    plain = chat(service, "hi").prompt_token_ids
    assert chat(service, "hi", add_special_tokens=True).prompt_token_ids == [257, *plain]
