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

from pd_cluster.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from pd_cluster.api.service import SHORT_NUM_CHARS, Generation, Piece, TextService
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.router import Router
from pd_cluster.errors import RequestError
from pd_cluster.text import Tokenizer
from pd_cluster.types import SamplingParams, TokenOutput
from tests.support.checkpoints import TEMPLATE, VOCAB_SIZE, make_tokenizer

RUST = make_tokenizer()
LIMIT = 10_000


class Playback:
    """A router that answers every request with these tokens."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.membership = SimpleNamespace(instances=[])
        self.num_read = 0
        self.was_closed = False

    async def serve(self, prompt: list[int], sampling: SamplingParams, routed: object) -> AsyncIterator[TokenOutput]:
        try:
            for at, token_id in enumerate(self.token_ids):
                self.num_read = at + 1
                last = at + 1 == len(self.token_ids)
                yield TokenOutput("r", 0, 0, at, token_id, "length" if last else None)
        finally:
            self.was_closed = True


Services = Callable[..., tuple[TextService, Playback]]


@pytest.fixture
def make(tmp_path: Path) -> Services:
    """`make(text)` is a service whose model says that text, and the router behind it."""
    RUST.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def build(text: str = "", limit: int = LIMIT, generation_config: dict[str, Any] | None = None) -> Any:
        router = Playback(RUST.encode(text).ids)
        checkpoint = Checkpoint(tmp_path, {"vocab_size": VOCAB_SIZE}, generation_config or {}, "")
        return TextService(cast(Router, router), checkpoint, "/models/x", ["x"], limit), router

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
    assert completion(service, [1] * num_prompt, max_tokens=room).sampling.max_tokens == room
    with pytest.raises(RequestError, match="exceed the model's context of 10000 tokens") as caught:
        completion(service, [1] * num_prompt, max_tokens=room + 1)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_a_chat_may_fill_the_context(make: Services) -> None:
    service, _ = make()
    generation = chat(service, "hello")
    assert generation.sampling.max_tokens == LIMIT - len(generation.prompt_token_ids)


def test_the_workers_may_have_a_smaller_limit(make: Services) -> None:
    service, router = make()
    info = SimpleNamespace(max_model_len=50)
    router.membership.instances = [SimpleNamespace(is_ready=True, info=info)]
    assert service.max_model_len == 50
    with pytest.raises(RequestError, match="the model's context is 50 tokens"):
        completion(service, [1] * 50)


def test_the_models_own_defaults(make: Services) -> None:
    service, _ = make(generation_config={"temperature": 0.5, "top_k": 7, "top_p": None, "do_sample": True})
    sampling = completion(service, "a").sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 1.0)
    assert completion(service, "a").sampling.seed != sampling.seed


# ---- nobody waits for a long text


@pytest.mark.parametrize("ask", [completion, chat])
def test_a_hopeless_text_is_refused_before_it_is_tokenized(
    make: Services, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Generation]
) -> None:
    def fail(*_: object) -> list[int]:
        raise AssertionError("it was tokenized")

    service, _ = make(limit=100)
    monkeypatch.setattr(Tokenizer, "encode", fail)
    with pytest.raises(RequestError, match="801 characters; the model's context is 100 tokens of at most 8") as caught:
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
    assert generation.finish_reason == "length"
    assert generation.usage == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}


def test_half_a_character_at_the_end(make: Services) -> None:
    service, router = make("é")
    router.token_ids = router.token_ids[:1]
    assert [piece.text for piece in pieces_of(service, completion(service, "a"))] == ["\ufffd"]


@pytest.mark.parametrize("stop", ["cde", ["xyz", "e", "cde"]])
def test_a_stop_string_closes_the_request(make: Services, stop: Any) -> None:
    service, router = make("abcdefgh")
    generation = completion(service, "a", stop=stop)
    assert "".join(piece.text for piece in pieces_of(service, generation)) == "ab"
    assert generation.finish_reason == "stop"
    assert generation.usage["completion_tokens"] == router.num_read == 5
    assert router.was_closed


def test_a_stop_string_in_the_very_last_token(make: Services) -> None:
    service, _ = make("abcd")
    generation = completion(service, "a", stop="d")
    assert asyncio.run(service.complete(generation)).text == "abc"
    assert generation.finish_reason == "stop"


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
        service._seeds = random.Random(seed)
        request = GenerationRequest()
        return [service._generation(request, [1], 16, "prompt").sampling.seed for _ in range(3)]

    assert seeds(5) == seeds(5) != seeds(6)
    assert len(set(seeds(5))) == 3
