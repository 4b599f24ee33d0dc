"""The text service over a router that plays back tokens: limits, usage, ends, and waiting for tokenizing."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.generation.prompt_generation import Generation, Usage
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.prompts.prompt_encoder import SHORT_NUM_CHARS
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.cluster import children_of
from tests.support.text_services import LIMIT, Services, chat, completion, services_in, whole


@pytest.fixture
def make(tmp_path: Path) -> Services:
    return services_in(tmp_path)


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
    for wanted in (room, room + 1, LIMIT):  # as many as fit, as in vLLM
        assert completion(service, [1] * num_prompt, max_tokens=wanted).sampling.max_tokens == room
    for num_tokens, max_tokens, param in ((num_prompt, LIMIT + 1, "max_tokens"), (LIMIT, 1, "prompt")):
        with pytest.raises(RequestError, match="maximum context length is 10000 tokens") as caught:
            completion(service, [1] * num_tokens, max_tokens=max_tokens)
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    generation = chat(service, "hello")  # it may fill the context
    assert generation.sampling.max_tokens == LIMIT - len(generation.prompt_token_ids)


def test_the_workers_may_have_a_smaller_limit(make: Services) -> None:
    service, router = make()
    info = SimpleNamespace(max_model_len=50)
    encoder = SimpleNamespace(is_ready=True, info=SimpleNamespace(max_model_len=0), role="encode")
    router.membership.instances = [SimpleNamespace(is_ready=True, info=info, role="decode"), encoder]
    assert service.max_model_len == 50
    with pytest.raises(RequestError, match=r"too long: .*maximum context length is 50 tokens"):
        completion(service, [1] * 50)


def test_max_new_tokens_caps_every_answer_and_is_the_default(make: Services) -> None:
    service, _ = make(generation_config={"max_new_tokens": 9})
    assert chat(service, "hello").sampling.max_tokens == 9
    assert completion(service, "a").sampling.max_tokens == 9
    for asked, given in ((3, 3), (500, 9), (None, 9)):
        assert completion(service, "a", max_tokens=asked).sampling.max_tokens == given


def test_a_model_may_be_required(make: Services) -> None:
    service, _ = make(requires_model=True)
    assert service.names.check("x") == "x"
    with pytest.raises(RequestError, match=r"^model: missing; .*--require-model.*: x$") as caught:
        service.names.check(None)
    assert (caught.value.param, caught.value.status) == ("model", 400)
    assert make()[0].names.check(None) == "x"


# ---- long texts delay no other request


@pytest.mark.parametrize("ask", [completion, chat])
def test_a_hopeless_text_is_refused_before_it_is_tokenized(
    make: Services, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Generation]
) -> None:
    def fail(*_: object) -> list[int]:
        raise AssertionError("the text must not be tokenized")

    service, _ = make(limit=100)
    monkeypatch.setattr(Tokenizer, "encode", fail)
    with pytest.raises(RequestError, match=r"801 characters, at least 101 tokens; .*length is 100 tokens") as caught:
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
    """The library's `Tokenizer.encode` holds the GIL, so a megabyte would stop heartbeats for half a second."""
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
    """Each character is one piece; an incomplete one at the end becomes U+FFFD."""
    service, router = make("aé日é")
    router.token_ids.pop()
    generation = completion(service, "hi", max_tokens=7)
    pieces = pieces_of(service, generation)
    assert [piece.text for piece in pieces] == ["a", "é", "日", "\ufffd"]
    assert [token for piece in pieces for token in piece.token_ids] == router.token_ids
    assert [len(piece.token_ids) for piece in pieces] == [1, 2, 3, 1]
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
    assert generation.served_by == ["p", "d"]
    assert generation.usage == Usage(2, 7, 9)


@pytest.mark.parametrize("stop", ["cde", ["xyz", "e", "cde"]])
@pytest.mark.parametrize("text", ["abcdefgh", "abcde"], ids=["early", "last"])
def test_a_stop_string_closes_the_request(make: Services, stop: Any, text: str) -> None:
    service, router = make(text)
    generation = completion(service, "a", stop=stop)
    pieces = pieces_of(service, generation)
    assert "".join(piece.text for piece in pieces) == "ab"
    assert [piece.finish_reason for piece in pieces] == [None, None, "stop"]
    assert generation.usage.completion_tokens == router.num_read == 5
    assert router.was_closed


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
        service.intake.seeds = random.Random(seed)
        return [completion(service, [1]).sampling.seed for _ in range(3)]

    assert seeds(5) == seeds(5) != seeds(6)
    assert len(set(seeds(5))) == 3


@pytest.mark.parametrize("num_together", [1, 3, 64])
@pytest.mark.parametrize("text", ["aé日", "日" * 70])
def test_tokens_that_come_together_make_the_same_answer(make: Services, num_together: int, text: str) -> None:
    service, router = make(text)
    router.num_together = num_together
    generation = completion(service, "hi", n=3, max_tokens=900, seed=5)
    found = [(p.index, p.text, p.token_ids, p.finish_reason) for p in whole(service, generation)]
    assert found == [(index, text, router.token_ids, "length") for index in range(3)]
    assert (router.requests[0].n, router.requests[0].seed, router.requests[0].logprobs) == (3, 5, None)
    num_tokens = 3 * len(router.token_ids)
    assert generation.usage == Usage(2, num_tokens, 2 + num_tokens)
    assert router.gathered == [True]


def test_who_looks_for_stop_strings_reads_every_token(make: Services) -> None:
    """With stop strings every token is read, so that the engine is stopped at once."""
    service, router = make("abcdefgh")
    router.num_together = 64
    (piece,) = whole(service, completion(service, "a", stop="cd"))
    assert (piece.text, router.num_read, router.gathered) == ("ab", 4, [False])


def test_a_stop_string_ends_its_own_sequence_only(make: Services) -> None:
    service, router = make("abcdefgh")
    router.changes = {(1, 2): {"token_id": service.tokenizer.encode("x")[0]}}
    generation = completion(service, "a", n=2, stop="cd")
    first, second = whole(service, generation)
    assert (first.text, first.finish_reason, len(first.token_ids)) == ("ab", "stop", 4)
    assert (second.text, second.finish_reason, len(second.token_ids)) == ("abxdefgh", "length", 8)
    assert router.stopped == {0}
    assert generation.usage.completion_tokens == 12


def test_the_best_of_several_by_mean_logprob(make: Services) -> None:
    service, router = make("abc")
    router.logprobs = {0: -3.0, 1: -1.0, 2: -2.0, 3: -4.0}
    generation = completion(service, "a", n=2, best_of=4)
    pieces = whole(service, generation)
    assert (router.requests[0].n, router.requests[0].logprobs) == (4, 0)
    assert [piece.index for piece in pieces] == [0, 1]
    logprobs = [[entry.logprobs.logprob for entry in piece.logprobs if entry.logprobs] for piece in pieces]
    assert logprobs == [[-1.0] * 3, [-2.0] * 3]
    assert generation.usage.completion_tokens == 6, "expected only those of answered requests"


def test_short_answers_are_not_better_because_they_are_short(make: Services) -> None:
    service, router = make("abcd")
    router.logprobs = {0: -2.0, 1: -1.5}
    router.changes = {(0, 1): {"finish_reason": "stop"}}
    (piece,) = whole(service, completion(service, "a", n=1, best_of=2))
    assert len(piece.token_ids) == 4


# ---- ends


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, ""), (1, ""), (2, "aba"), (4, "aba"), (5, "abaab"), (7, "abaabab"), (9, "abaabab")]
)
def test_stop_strings_count_after_min_tokens(make: Services, min_tokens: int, shown: str) -> None:
    """As for end tokens, token min_tokens + 1 is the first that may end the answer."""
    service, _ = make("abaabab")
    (piece,) = whole(service, completion(service, "a", stop="ab", min_tokens=min_tokens))
    assert (piece.text, piece.finish_reason) == (shown, "length" if min_tokens >= 7 else "stop")


def test_a_service_that_closes_leaves_no_process(make: Services) -> None:
    """Covers the child processes that render requests' templates and check guides."""
    service, _ = make("x", chat=ChatConfig(trusts_request_templates=True))
    before = children_of(os.getpid())

    async def use() -> None:
        fields = {"chat_template": "{{ messages[0].content }}", "structured_outputs": {"regex": "x+"}}
        messages = [{"role": "user", "content": "hello"}]
        await service.chat(ChatCompletionRequest.model_validate({"messages": messages, **fields}))
        assert len(children_of(os.getpid())) > len(before)
        await service.close()

    asyncio.run(use())
    assert children_of(os.getpid()) == before
