"""LMDeploy's sessions over an engine that plays back its answer: turns, steps, and how they end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.messages import GenOut
from tests.support.lmdeploy_engine import ANSWER, NUM_TOKENS, Make, engines, steps_of, turn

make = pytest.fixture(engines)


def test_generate_gives_its_steps_to_the_callers_own_event_loop(make: Make) -> None:
    engine, _ = make()
    threads = []

    async def read() -> list[GenOut]:
        found = []
        async for out in engine.generate("hi", 1):
            threads.append(threading.current_thread())
            found.append(out)
        return found

    found = asyncio.run(read())
    assert "".join(out.response for out in found) == ANSWER
    assert [out.generate_token_len for out in found][-1] == NUM_TOKENS
    assert found[-1].finish_reason == "stop"
    assert set(threads) == {threading.main_thread()}


def test_a_session_of_texts_goes_on_from_its_tokens(make: Make) -> None:
    engine, offline = make()
    turn(engine, "one", 5, sequence_end=False, do_preprocess=False)
    turn(engine, " two", 5, sequence_start=False, sequence_end=False, do_preprocess=False)
    assert offline.prompts[1] == f"one{ANSWER} two"
    with pytest.raises(RequestError, match="session 5 began without a chat template"):
        turn(engine, "three", 5, sequence_start=False)
    for session_id in (None, 1.5, "a", True):
        with pytest.raises(RequestError, match=r"^session_id: .* must be a whole number"):
            turn(engine, "hi", session_id)


def test_a_turn_that_is_refused_leaves_the_session_as_it_was(make: Make) -> None:
    engine, offline = make()
    wrong = [{"role": "", "content": "x"}]
    with pytest.raises(RequestError, match=r"^messages.0.role: ''"):
        turn(engine, wrong, 5, sequence_end=False)
    with pytest.raises(RequestError, match="there is no session 5"):
        turn(engine, "two", 5, sequence_start=False)
    turn(engine, "one", 5, sequence_end=False)
    second = turn(engine, "two", 5, sequence_start=False, sequence_end=False)
    assert second.history_token_len == 36
    refused: list[tuple[Any, dict[str, Any]]] = [
        (wrong, {"sequence_start": False}),
        (wrong, {"sequence_start": True}),
        ("x", {"sequence_start": True, "step": 3}),
        ("x", {"sequence_start": False, "do_preprocess": False}),
        (wrong, {"sequence_start": False, "step": 36}),
    ]
    for messages, options in refused:
        with pytest.raises(RequestError):
            turn(engine, messages, 5, **options)
    turn(engine, "three", 5, sequence_start=False)
    talk = f"<|user|>one<|assistant|>{ANSWER}<|user|>two<|assistant|>{ANSWER}<|user|>three<|assistant|>"
    assert offline.prompts[-1] == talk


@pytest.mark.parametrize("how", ["stop_session", "generate"])
def test_a_session_that_answers_can_be_stopped(make: Make, how: str) -> None:
    engine, offline = make()

    async def run() -> list[GenOut]:
        offline.router.holds = True
        found = []
        async with asyncio.timeout(20):
            async for out in engine.generate("one", 5, sequence_end=False):
                found.append(out)
                if len(found) == 1:
                    if how == "stop_session":
                        engine.stop_session(5)
                    else:
                        assert [each.response async for each in engine.generate("", 5, stop=True)] == [""]
        return found

    found = asyncio.run(run())
    assert [out.response for out in found] == [ANSWER[0], ""]
    assert found[-1].finish_reason == "abort"
    assert offline.router.was_closed
    offline.router.holds = False
    turn(engine, "two", 5, sequence_start=False)
    assert offline.prompts[1] == f"<|user|>one<|assistant|>{ANSWER[0]}<|user|>two<|assistant|>"


def test_a_session_answers_one_turn_at_a_time(make: Make) -> None:
    engine, offline = make()
    offline.router.holds = True

    async def run() -> None:
        async with asyncio.timeout(20):
            steps = engine.generate("one", 5)
            await anext(steps)
            with pytest.raises(RequestError, match="session 5 is answering; wait for its end, or stop_session"):
                await steps_of(engine, "two", 5)
            engine.end_session(5)
            assert [out.finish_reason async for out in steps] == ["abort"]

    asyncio.run(run())
    with pytest.raises(RequestError, match="there is no session 5"):
        turn(engine, "three", 5, sequence_start=False)
