"""Text in, text out, over a router that plays back tokens: limits, usage, ends, and who waits for tokenizing."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import processors

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.sampling_defaults import sampling_defaults
from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import RequestError
from pd_cluster.service.caller import Caller
from pd_cluster.service.generation import Generation
from pd_cluster.service.prompts.prompt_encoder import SHORT_NUM_CHARS, TRUNCATED_NUM_CHARS
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.protocol import CompletionRequest
from pd_cluster.service.sequence import Piece
from pd_cluster.service.service import ServiceConfig, TextService
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Logprobs, PromptOutput, TokenOutput
from tests.support.checkpoints import EOS_ID, TEMPLATE, VOCAB_SIZE, make_tokenizer
from tests.support.playback import Playback

RUST = make_tokenizer()
LIMIT = 10_000


Services = Callable[..., tuple[TextService, Playback]]


@pytest.fixture
def make(tmp_path: Path) -> Services:
    """`make(text)` is a service whose model says that text, and the router behind it."""
    RUST.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def build(
        text: str = "",
        limit: int = LIMIT,
        generation_config: dict[str, Any] | None = None,
        requires_model: bool = False,
    ) -> Any:
        router = Playback(RUST.encode(text).ids)
        config = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}
        checkpoint = Checkpoint(tmp_path, config, generation_config or {}, "", tmp_path)
        service = TextService(
            cast(Router, router),
            checkpoint,
            ServiceConfig(
                "/models/x",
                ["x"],
                limit,
                max_num_seqs=99,
                sampling_defaults=sampling_defaults(checkpoint, "auto", {}),
                requires_model=requires_model,
            ),
        )
        return service, router

    return build


def completion(service: TextService, prompt: Any, **fields: Any) -> Generation:
    return asyncio.run(service.completion(CompletionRequest(prompt=prompt, **fields), prompt))


def chat(service: TextService, content: str, **fields: Any) -> Generation:
    messages: Any = [{"role": "user", "content": content}]
    return asyncio.run(service.chat(ChatCompletionRequest(messages=messages, **fields)))


def pieces_of(service: TextService, generation: Generation) -> list[Piece]:
    async def read() -> list[Piece]:
        return [piece async for piece in service.stream(generation)]

    return asyncio.run(read())


# ---- limits


@pytest.mark.parametrize("num_prompt", [1, LIMIT - 17, LIMIT - 16, LIMIT - 1])
def test_room_for_the_answer(make: Services, num_prompt: int) -> None:
    service, _ = make()
    room = LIMIT - num_prompt
    assert completion(service, [1] * num_prompt).sampling.max_tokens == min(16, room)
    for wanted in (room, room + 1, LIMIT):  # as many as there is room for, as in vLLM
        assert completion(service, [1] * num_prompt, max_tokens=wanted).sampling.max_tokens == room
    with pytest.raises(RequestError, match="maximum context length is 10000 tokens") as caught:
        completion(service, [1] * num_prompt, max_tokens=LIMIT + 1)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(RequestError, match="maximum context length is 10000 tokens") as caught:
        completion(service, [1] * LIMIT, max_tokens=1)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_a_chat_may_fill_the_context(make: Services) -> None:
    service, _ = make()
    generation = chat(service, "hello")
    assert generation.sampling.max_tokens == LIMIT - len(generation.prompt_token_ids)


def test_the_workers_may_have_a_smaller_limit(make: Services) -> None:
    service, router = make()
    info = SimpleNamespace(max_model_len=50)
    encoder = SimpleNamespace(is_ready=True, info=SimpleNamespace(max_model_len=0), role="encode")
    router.membership.instances = [SimpleNamespace(is_ready=True, info=info, role="decode"), encoder]
    assert service.max_model_len == 50
    with pytest.raises(RequestError, match=r"too long: .*maximum context length is 50 tokens"):
        completion(service, [1] * 50)


def test_the_models_own_defaults(make: Services) -> None:
    service, _ = make(generation_config={"temperature": 0.5, "top_k": 7, "top_p": None, "do_sample": True})
    sampling = completion(service, "a").sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 1.0)
    assert completion(service, "a").sampling.seed != sampling.seed


def test_max_new_tokens_caps_every_answer_and_is_the_default(make: Services) -> None:
    service, _ = make(generation_config={"max_new_tokens": 9})
    assert chat(service, "hello").sampling.max_tokens == 9
    assert completion(service, "a").sampling.max_tokens == 9
    assert completion(service, "a", max_tokens=3).sampling.max_tokens == 3
    assert completion(service, "a", max_tokens=500).sampling.max_tokens == 9
    assert completion(service, "a", max_tokens=None).sampling.max_tokens == 9


def test_a_model_may_be_required(make: Services) -> None:
    service, _ = make(requires_model=True)
    assert service.names.check("x") == "x"
    with pytest.raises(RequestError, match=r"^model: missing; .*--require-model.*: x$") as caught:
        service.names.check(None)
    assert (caught.value.param, caught.value.status) == ("model", 400)
    assert make()[0].names.check(None) == "x"


# ---- nobody waits for a long text


@pytest.mark.parametrize("ask", [completion, chat])
def test_a_hopeless_text_is_refused_before_it_is_tokenized(
    make: Services, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Generation]
) -> None:
    def fail(*_: object) -> list[int]:
        raise AssertionError("it was tokenized")

    service, _ = make(limit=100)
    monkeypatch.setattr(Tokenizer, "encode", fail)
    with pytest.raises(RequestError, match=r"801 characters; .*length is 100 tokens, of at most 8") as caught:
        ask(service, "x" * 801)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(("num_chars", "elsewhere"), [(10, False), (SHORT_NUM_CHARS + 1, True)])
def test_long_texts_are_tokenized_beside_the_event_loop(
    make: Services, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Generation], num_chars: int, elsewhere: bool
) -> None:
    threads: list[int] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    service, _ = make()
    assert len(ask(service, "x" * num_chars).prompt_token_ids) >= num_chars
    assert [thread != threading.get_ident() for thread in threads] == [elsewhere]


def test_tokenizing_leaves_the_interpreter_to_others(make: Services) -> None:
    """`Tokenizer.encode` of the library does not: a megabyte would stop heartbeats for half a second."""
    service, _ = make()
    text = "hello you " * 100_000
    thread = threading.Thread(target=service.tokenizer.encode, args=(text,))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20


# ---- the answer


def test_a_piece_for_each_character(make: Services) -> None:
    service, router = make("aé日")
    generation = completion(service, "hi", max_tokens=6)
    pieces = pieces_of(service, generation)
    assert [piece.text for piece in pieces] == ["a", "é", "日"]
    assert [token for piece in pieces for token in piece.token_ids] == router.token_ids
    assert [len(piece.token_ids) for piece in pieces] == [1, 2, 3]
    assert [piece.finish_reason for piece in pieces] == [None, None, "length"]
    assert generation.served_by == ["p", "d"]
    assert generation.usage == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}


def test_half_a_character_at_the_end(make: Services) -> None:
    service, router = make("é")
    router.token_ids = router.token_ids[:1]
    assert [piece.text for piece in pieces_of(service, completion(service, "a"))] == ["\ufffd"]


@pytest.mark.parametrize("stop", ["cde", ["xyz", "e", "cde"]])
def test_a_stop_string_closes_the_request(make: Services, stop: Any) -> None:
    service, router = make("abcdefgh")
    generation = completion(service, "a", stop=stop)
    pieces = pieces_of(service, generation)
    assert "".join(piece.text for piece in pieces) == "ab"
    assert [piece.finish_reason for piece in pieces] == [None, None, "stop"]
    assert generation.usage["completion_tokens"] == router.num_read == 5
    assert router.was_closed


def test_a_stop_string_in_the_very_last_token(make: Services) -> None:
    service, _ = make("abcd")
    generation = completion(service, "a", stop="d")
    (piece,) = asyncio.run(service.complete([generation]))
    assert (piece.text, piece.finish_reason) == ("abc", "stop")


def test_leaving_early_closes_the_request(make: Services) -> None:
    service, router = make("abcdefgh")

    async def read_one() -> None:
        stream = cast(Any, service.stream(await service.completion(CompletionRequest(prompt="a"), "a")))
        await anext(stream)
        await stream.aclose()

    asyncio.run(read_one())
    assert (router.num_read, router.was_closed) == (1, True)


def test_seeds_of_requests_without_one_come_from_the_servers(make: Services) -> None:
    def seeds(seed: int) -> list[int]:
        service, _ = make()
        service._intake._seeds = random.Random(seed)
        return [completion(service, [1]).sampling.seed for _ in range(3)]

    assert seeds(5) == seeds(5) != seeds(6)
    assert len(set(seeds(5))) == 3


# ---- several sequences


def whole(service: TextService, generation: Generation) -> list[Piece]:
    return asyncio.run(service.complete([generation]))


def test_each_sequence_has_its_own_text_and_end(make: Services) -> None:
    service, router = make("aé日")
    generation = completion(service, "hi", n=3, max_tokens=6, seed=5)
    pieces = whole(service, generation)
    assert [(p.index, p.text, p.token_ids, p.finish_reason) for p in pieces] == [
        (index, "aé日", router.token_ids, "length") for index in range(3)
    ]
    assert router.requests[0].n == 3
    assert (router.requests[0].seed, router.requests[0].logprobs) == (5, None)
    assert generation.usage == {"prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20}


@pytest.mark.parametrize("num_together", [1, 2, 3, 64])
@pytest.mark.parametrize("text", ["aé日", "x" * 200, "日" * 70])
def test_tokens_that_come_together_make_the_same_answer(make: Services, num_together: int, text: str) -> None:
    service, router = make(text)
    router.num_together = num_together
    generation = completion(service, "hi", n=2, max_tokens=900)
    found = [(p.text, p.token_ids, p.finish_reason) for p in whole(service, generation)]
    assert found == [(text, router.token_ids, "length")] * 2
    assert generation.usage["completion_tokens"] == 2 * len(router.token_ids)
    assert router.gathered == [True]


def test_who_looks_for_stop_strings_reads_every_token(make: Services) -> None:
    """So that the engine is stopped at once."""
    service, router = make("abcdefgh")
    router.num_together = 64
    (piece,) = whole(service, completion(service, "a", stop="cd"))
    assert (piece.text, router.num_read, router.gathered) == ("ab", 4, [False])


def test_a_stop_string_ends_its_own_sequence_only(make: Services) -> None:
    """The second one is recognized by an odd token that the fake inserts."""
    service, router = make("abcdefgh")
    generation = completion(service, "a", n=2, stop="cd")
    odd = service.tokenizer.encode("x")[0]
    serve = router.serve

    async def serve_two(*args: Any, **origin: Any) -> AsyncIterator[TokenOutput]:
        async for token in serve(*args):
            if token.index == 1 and token.position == 2:
                token = TokenOutput("r", 0, 1, 2, odd)
            yield token

    router.serve = serve_two
    first, second = whole(service, generation)
    assert (first.text, first.finish_reason, len(first.token_ids)) == ("ab", "stop", 4)
    assert (second.text, second.finish_reason, len(second.token_ids)) == ("abxdefgh", "length", 8)
    assert router.stopped == {0}
    assert generation.usage["completion_tokens"] == 12


def test_the_best_of_several_by_mean_logprob(make: Services) -> None:
    service, router = make("abc")
    router.logprobs = {0: -3.0, 1: -1.0, 2: -2.0, 3: -4.0}
    generation = completion(service, "a", n=2, best_of=4)
    pieces = whole(service, generation)
    assert (router.requests[0].n, router.requests[0].logprobs) == (4, 0)
    assert [piece.index for piece in pieces] == [0, 1]
    assert [[entry.logprobs.logprob for entry in piece.logprobs if entry.logprobs] for piece in pieces] == [
        [-1.0] * 3,
        [-2.0] * 3,
    ]
    assert generation.usage["completion_tokens"] == 6, "of those that are answered"


def test_short_answers_are_not_better_because_they_are_short(make: Services) -> None:
    service, router = make("abcd")
    router.logprobs = {0: -2.0, 1: -1.5}
    generation = completion(service, "a", n=1, best_of=2)
    serve = router.serve

    async def serve_short(*args: Any, **origin: Any) -> AsyncIterator[TokenOutput]:
        async for token in serve(*args):
            if token.index == 0 and token.position == 1:
                token = TokenOutput("r", 0, 0, 1, token.token_id, "stop", token.logprobs)
                router.stopped.add(0)
            yield token

    router.serve = serve_short
    (piece,) = whole(service, generation)
    assert len(piece.token_ids) == 4


# ---- ends


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, ""), (1, ""), (2, "aba"), (4, "aba"), (5, "abaab"), (7, "abaabab"), (9, "abaabab")]
)
def test_stop_strings_count_after_min_tokens(make: Services, min_tokens: int, shown: str) -> None:
    """As for an end-of-sequence token, token number min_tokens + 1 is the first that may end the answer."""
    service, _ = make("abaabab")
    (piece,) = whole(service, completion(service, "a", stop="ab", min_tokens=min_tokens))
    assert (piece.text, piece.finish_reason) == (shown, "length" if min_tokens >= 7 else "stop")


def test_the_stop_string_is_kept_when_asked_for(make: Services) -> None:
    service, _ = make("abcdefgh")
    (piece,) = whole(service, completion(service, "a", stop="cd", include_stop_str_in_output=True))
    assert (piece.text, piece.finish_reason) == ("abcd", "stop")


@pytest.mark.parametrize(("include", "text"), [(None, "ab"), (True, "abc")])
def test_a_stop_token_is_kept_when_asked_for(make: Services, include: bool | None, text: str) -> None:
    service, router = make("abc")
    router.last_reason = "stop"
    (piece,) = whole(service, completion(service, "a", include_stop_str_in_output=include))
    assert (piece.text, piece.finish_reason) == (text, "stop")


# ---- the prompt


def test_cached_tokens_are_told_once_they_are_known(make: Services) -> None:
    service, router = make("ab")
    router.told = PromptOutput("r", 0, 16)
    generation = completion(service, "a", cache_salt="mine")
    assert "prompt_tokens_details" not in generation.usage
    whole(service, generation)
    assert generation.usage["prompt_tokens_details"] == {"cached_tokens": 16}
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


def test_nothing_is_generated_for_echo_alone(make: Services) -> None:
    service, router = make("ab")
    generation = completion(service, "hi", echo=True, max_tokens=0, n=2)
    assert [(p.text, p.token_ids, p.finish_reason) for p in whole(service, generation)] == [("", [], "length")] * 2
    assert router.requests == []


def test_echo_alone_with_logprobs_computes_the_prompt(make: Services) -> None:
    service, router = make("ab")
    router.told = PromptOutput("r", 0, 0, [None, Logprobs(-1.0, 1, [])])
    generation = completion(service, "hi", echo=True, max_tokens=0, logprobs=1, min_tokens=0)
    router.logprobs = {0: -1.0}
    assert [(p.text, p.token_ids, p.finish_reason) for p in whole(service, generation)] == [("", [], "length")]
    assert (router.requests[0].max_tokens, router.requests[0].prompt_logprobs) == (1, 1)
    assert router.was_closed
    assert generation.prompt_logprobs == router.told.logprobs
    assert generation.usage["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("keep", "max_tokens", "num_kept"), [(3, None, 3), (50, None, 50), (99, 1, 99), (-1, 7, 93), (-1, None, 84)]
)
def test_the_end_of_a_prompt_is_kept(make: Services, keep: int, max_tokens: int | None, num_kept: int) -> None:
    service, _ = make(limit=100)
    prompt = [at % 200 for at in range(500)]
    generation = completion(service, prompt, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert generation.prompt_token_ids == prompt[-num_kept:]
    text = "hello you " * 50
    generation = completion(service, text, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert service.tokenizer.decode(generation.prompt_token_ids) == text[-num_kept:]


def test_a_chat_is_cut_to_leave_room(make: Services) -> None:
    service, _ = make(limit=100)
    assert len(chat(service, "x" * 900, truncate_prompt_tokens=-1).prompt_token_ids) == 99
    assert len(chat(service, "x" * 900, truncate_prompt_tokens=-1, max_tokens=30).prompt_token_ids) == 70


@pytest.mark.parametrize(("keep", "max_tokens"), [(100, None), (-1, 100), (-1, 5000)])
def test_a_prompt_that_cannot_be_cut_to_fit(make: Services, keep: int, max_tokens: int | None) -> None:
    service, _ = make(limit=100)
    with pytest.raises(RequestError, match=f"^truncate_prompt_tokens: {keep} ") as caught:
        completion(service, "hello", truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert caught.value.param == "truncate_prompt_tokens"


def test_even_a_text_to_be_cut_has_a_limit(make: Services) -> None:
    service, _ = make(limit=100)
    with pytest.raises(RequestError, match=f"send at most {TRUNCATED_NUM_CHARS}"):
        completion(service, "x" * (TRUNCATED_NUM_CHARS + 1), truncate_prompt_tokens=5)


# ---- what the model and the server allow


@pytest.mark.parametrize(
    ("fields", "param", "value"),
    [
        ({"logit_bias": {"5": 1, str(VOCAB_SIZE): 1}}, "logit_bias", VOCAB_SIZE),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", VOCAB_SIZE),
        ({"logprobs": 21}, "logprobs", 21),
        ({"prompt_logprobs": 21}, "prompt_logprobs", 21),
        ({"min_tokens": 17}, "min_tokens", 17),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", 5),
        ({"n": 2, "temperature": 0}, "n", 2),
        ({"n": 2, "best_of": 3, "temperature": 0}, "n", 2),
        ({"best_of": 2, "temperature": 1e-9}, "best_of", 2),
        ({"n": 100, "use_beam_search": True}, "n", 100),
        ({"n": 2, "best_of": 100, "use_beam_search": True}, "best_of", 100),
        ({"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids", "bad_words"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids", "bad_words"),
    ],
)
def test_what_this_model_and_server_do_not_allow(
    make: Services, fields: dict[str, Any], param: str, value: object
) -> None:
    service, _ = make()
    with pytest.raises(RequestError, match=rf"^{param}: {value} ") as caught:
        completion(service, "a", **fields)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_an_answer_of_beams_has_an_end(make: Services) -> None:
    service, _ = make(limit=20_000)
    with pytest.raises(RequestError, match=r"^n: 60 hypotheses of up to 18000 tokens") as caught:
        completion(service, "a", n=60, use_beam_search=True, max_tokens=18_000)
    assert caught.value.param == "n"


def test_chats_refusal_names_top_logprobs(make: Services) -> None:
    service, _ = make()
    with pytest.raises(RequestError, match=r"^top_logprobs: 21 is more than this server's 20 \(--max-logprobs\)"):
        chat(service, "a", logprobs=True, top_logprobs=21)


def test_forbidding_all_that_is_allowed(make: Services) -> None:
    service, _ = make()
    (allowed,) = service.tokenizer.encode("z")
    with pytest.raises(RequestError, match="forbid every one of them"):
        completion(service, "a", allowed_token_ids=[allowed], bad_words=["z"])
    assert completion(service, "a", allowed_token_ids=[allowed, 1], bad_words=["z"]).sampling.bad_words


def test_a_greedy_default_of_the_model_counts(make: Services) -> None:
    service, _ = make(generation_config={"temperature": 0})
    with pytest.raises(RequestError, match=r"^n: 2 with temperature 0"):
        completion(service, "a", n=2)
    assert completion(service, "a", n=2, temperature=1).sampling.n == 2


def test_no_more_logprobs_than_tokens(make: Services, tmp_path: Path) -> None:
    service, _ = make()
    service._intake.limits = service._intake.limits._replace(max_logprobs=5000)
    sampling = completion(service, "a", logprobs=4000, prompt_logprobs=4000).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (VOCAB_SIZE, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("most", "asked", "told"), [(-1, -1, VOCAB_SIZE), (-1, 4000, VOCAB_SIZE), (4000, -1, VOCAB_SIZE)]
)
def test_logprobs_of_the_whole_vocabulary(make: Services, most: int, asked: int, told: int) -> None:
    service, _ = make()
    service._intake.limits = service._intake.limits._replace(max_logprobs=most)
    sampling = completion(service, "a", logprobs=asked, prompt_logprobs=asked).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (told, told)
    service._intake.limits = service._intake.limits._replace(max_logprobs=20)
    with pytest.raises(RequestError, match=rf"^logprobs: -1, all {VOCAB_SIZE} of the vocabulary, is more than .* 20 "):
        completion(service, "a", logprobs=-1)


def test_answers_that_would_fill_the_memory_are_refused(make: Services) -> None:
    service, _ = make()
    service._intake.limits = service._intake.limits._replace(max_logprobs=5000, vocab_size=10**6)
    assert completion(service, "a", n=128, temperature=1, max_tokens=10, logprobs=20).sampling.n == 128
    for fields in ({"n": 128, "max_tokens": 10, "logprobs": 2000}, {"n": 128, "prompt_logprobs": 5000}):
        with pytest.raises(RequestError, match=r"^logprobs: the answer could have \d+ of them, at most 1000000"):
            completion(service, "a" * 50, temperature=1, **fields)


def test_bad_words_become_tokens(make: Services) -> None:
    service, _ = make()
    encode = service.tokenizer.encode
    many = ["b" * 200] * 100
    for words in (["ab", "c"], [*many, "c"]):
        found = completion(service, "a", bad_words=words).sampling.bad_words
        assert found == tuple(dict.fromkeys(tuple(encode(word)) for word in words))


def test_priorities_need_a_server_that_has_them(make: Services) -> None:
    service, _ = make()
    assert completion(service, [1], priority=0).order.priority == 0
    with pytest.raises(RequestError, match="priority: 3; this server takes requests as they come") as caught:
        completion(service, [1], priority=3)
    assert caught.value.param == "priority"
    service._intake._has_priorities = True
    assert completion(service, [1], priority=3).order.priority == 3


def test_a_prompt_cache_key_is_a_session(make: Services) -> None:
    service, _ = make()
    assert completion(service, [1], prompt_cache_key="mine").order.session == "mine"
    assert completion(service, [1]).order.session == ""


def test_a_chats_special_tokens_are_added_when_asked_for(make: Services, tmp_path: Path) -> None:
    """A template writes them itself; where it does not, a request may ask for them."""
    rust = make_tokenizer()
    rust.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    rust.save(str(tmp_path / "tokenizer.json"))
    service, _ = make()
    plain = chat(service, "hi").prompt_token_ids
    assert chat(service, "hi", add_special_tokens=True).prompt_token_ids == [257, *plain]
