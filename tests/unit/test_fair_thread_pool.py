"""Clients take turns on the threads, and one client's long texts do not delay another client's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.concurrency.fair_thread_pool import LARGE, NUM_THREADS, FairThreadPool
from pd_cluster.service.prompts import prompt_encoder
from pd_cluster.service.prompts.prompt_encoder import PROBED_CHARS_PER_TOKEN, PromptEncoder
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.text.control_tokens import ControlTokens
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.public_port import make_app, send

NUM_TEXTS = 24
HOG, OTHER = ("203.0.113.1", 1), ("203.0.113.2", 1)
DEADLINE_S = 60.0


class Gate:
    """Work that records its name and then waits until the gate is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def wait() -> str:
            self.begun.append(name)
            assert self.open.wait(DEADLINE_S)
            return name

        return wait


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def test_clients_take_turns() -> None:
    async def use() -> tuple[list[str], list[str]]:
        pool, gate = FairThreadPool(1), Gate()
        names = [*(f"a{at}" for at in range(5)), "b0", "b1", "c0"]
        tasks = [asyncio.ensure_future(pool.run(name[0], gate.work(name))) for name in names]
        await asyncio.sleep(0)
        gate.open.set()
        return list(await asyncio.gather(*tasks)), gate.begun

    results, begun = run(use())
    assert results == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "c0"]
    # The first piece may have begun before the others arrived.
    assert begun in (["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"], ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"])


def test_work_whose_caller_left_is_not_done_and_what_work_raises_is_its_callers() -> None:
    async def use() -> tuple[list[str], list[Any]]:
        pool, gate = FairThreadPool(1), Gate()
        tasks = [asyncio.ensure_future(pool.run("a", gate.work(name))) for name in ("first", "left", "last")]
        tasks.append(asyncio.ensure_future(pool.run("a", lambda: str(1 // 0))))
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        gate.open.set()
        return gate.begun, list(await asyncio.gather(*tasks, return_exceptions=True))

    begun, results = run(use())
    assert begun == ["first", "last"]
    assert isinstance(results[-1], ZeroDivisionError)


def test_memory_is_given_back_when_nothing_waits() -> None:
    given: Queue[int] = Queue()

    async def use(sizes: list[int]) -> None:
        gate = Gate()
        tasks = [asyncio.ensure_future(pool.run("a", gate.work("x"), size)) for size in sizes]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)

    pool = FairThreadPool(1, lambda: given.put(1), give_back_after_s=0.0)
    run(use([10, 10]))
    run(use([LARGE // 2] * 6))
    assert given.get(timeout=DEADLINE_S) == 1
    run(use([10, 10]))
    pool.submit(lambda: None).result()  # waits for the last piece
    assert given.empty(), "memory must be released neither after little work nor while work waits"


def test_a_closed_pool_cancels_what_waits() -> None:
    async def use() -> list[Any]:
        pool, gate = FairThreadPool(1), Gate()
        tasks = [asyncio.ensure_future(pool.run("a", gate.work(name))) for name in ("runs", "waits")]
        while not gate.begun:
            await asyncio.sleep(0)
        pool.close()
        gate.open.set()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    ran, waited = run(use())
    assert ran == "runs"
    assert isinstance(waited, asyncio.CancelledError)


# ---- the attack


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Makes tokenizing of a long text record its client (its first character) and wait."""
    gate, encode = Gate(), Tokenizer.encode

    def gated(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > prompt_encoder.SHORT_NUM_CHARS:
            gate.work(text[0])()
        return encode(self, text[:100], add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", gated)
    return gate


@pytest.mark.parametrize("keys", [(), ("sk-hog", "sk-other")])
def test_a_clients_many_long_texts_do_not_hold_up_another(tmp_path: Path, gate: Gate, keys: tuple[str, ...]) -> None:
    """One client sends 24 texts to /tokenize, another one a prompt; clients are told apart by key or address."""
    app, _ = make_app(tmp_path, HttpConfig(api_keys=keys))
    peers = (HOG, HOG) if keys else (HOG, OTHER)
    headers = [[("Authorization", f"Bearer {key}")] for key in keys] or [[], []]

    def ask(who: int, text: str) -> asyncio.Task[Any]:
        body = {"prompt": text * (prompt_encoder.SHORT_NUM_CHARS + 1)}
        return asyncio.ensure_future(send(app, "POST", "/tokenize", headers[who], body, peers[who]))

    async def use() -> list[Any]:
        tasks = [ask(0, "h") for _ in range(NUM_TEXTS)]
        for _ in range(100):
            await asyncio.sleep(0)  # lets all requests begin to wait
        tasks.append(ask(1, "o"))
        for _ in range(100):
            await asyncio.sleep(0)
        gate.open.set()
        return list(await asyncio.gather(*tasks))

    assert {answer.status for answer in run(use())} == {200}
    assert gate.begun.count("h") == NUM_TEXTS
    assert gate.begun.index("o") <= NUM_THREADS + 1


@pytest.mark.parametrize(
    ("chars_per_token", "may_be_cut", "num_encoded"), [(1, False, 1), (20, False, 2), (1, True, 1)]
)
def test_a_text_whose_beginning_is_too_long_is_not_tokenized_further(
    chars_per_token: int, may_be_cut: bool, num_encoded: int
) -> None:
    """A text may be refused by its beginning only; tokens of many characters make its length alone inconclusive."""
    limit, seen = 1000, []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(len(text))
        return [0] * (len(text) // chars_per_token)

    tokenizer = SimpleNamespace(has_text=True, max_chars_per_token=128, encode=encode)
    encoder = PromptEncoder(cast(Tokenizer, tokenizer), lambda: limit, ControlTokens([]))
    text, beginning = "x" * 128 * limit, PROBED_CHARS_PER_TOKEN * limit
    is_refused = chars_per_token == 1 and not may_be_cut
    refusal = pytest.raises(RequestError, match="too long: 16000 tokens in the first")
    with refusal if is_refused else contextlib.nullcontext() as caught:
        run(encoder.encode([text], True, may_be_cut, "prompt"))
    assert caught is None or caught.value.code == "context_length_exceeded"
    assert seen == ([beginning] if is_refused else [beginning, len(text)][-num_encoded:])
