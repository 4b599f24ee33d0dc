"""Shows the effect of each documented option of LMDeploy's calls, sessions and chat templates with a real engine.

A session's memory shows in its answer: it must be the answer to the whole conversation as one prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import AsyncEngine, ChatTemplateConfig, pipeline
from pd_cluster.errors import Closed, RequestError
from pd_cluster.messages import GenerationConfig, GenOut, Response, TurbomindEngineConfig
from pd_cluster.settings.engine import SHIPPED_MODEL
from tests.support.checkpoints import make_tokenizer, reference_greedy

MODEL = str(SHIPPED_MODEL)
SMALL = TurbomindEngineConfig(cache_max_entry_count=0.002)
CONFIG = GenerationConfig(max_new_tokens=40)
NUM_TOKENS = 12
GREEDY = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True)
NAME, ASKED = "My name is Bob", "What is my name?"
MARKS = ChatTemplateConfig(user="Q: ", eoh="\n", assistant="A: ")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pipe() -> Iterator[AsyncEngine]:
    with pipeline(MODEL, backend_config=SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def tiny(path: Path) -> Iterator[AsyncEngine]:
    """Its answers are known from transformers, and its template is `<|user|>…<|assistant|>`."""
    with pipeline(str(path), backend_config=SMALL) as engine:
        yield engine


def one(engine: AsyncEngine, prompt: Any, config: GenerationConfig = CONFIG) -> Response:
    response = engine(prompt, gen_config=config)
    assert isinstance(response, Response)
    return response


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def steps_of(engine: AsyncEngine, *arguments: Any, **options: Any) -> list[GenOut]:
    return [out async for out in engine.generate(*arguments, **options)]


def turn(engine: AsyncEngine, text: Any, session_id: int, config: Any = CONFIG, **options: Any) -> GenOut:
    (out,) = asyncio.run(steps_of(engine, text, session_id, config, stream_response=False, **options))
    return out


def answer_of(path: Path, prompt: str) -> list[int]:
    return reference_greedy(path, make_tokenizer().encode(prompt).ids, NUM_TOKENS)[:NUM_TOKENS]


# ---- calls


@pytest.mark.parametrize("name", ["__call__", "batch_infer"])
def test_a_list_of_prompts_has_its_answers_in_order(tiny: AsyncEngine, path: Path, name: str) -> None:
    texts = ["hi", "say this is a test", "hi"]
    found = getattr(tiny, name)(texts, gen_config=GREEDY)
    assert [each.index for each in found] == [0, 1, 2]
    assert [each.token_ids for each in found] == [answer_of(path, f"<|user|>{each}<|assistant|>") for each in texts]
    talks = [[user(each)] for each in texts]
    assert [each.token_ids for each in getattr(tiny, name)(talks, gen_config=GREEDY)] == [e.token_ids for e in found]
    alone = getattr(tiny, name)(prompts="hi", gen_config=GREEDY)
    assert isinstance(alone, Response)
    assert alone.token_ids == found[0].token_ids


def test_do_preprocess_is_whether_the_template_is_applied(tiny: AsyncEngine, path: Path) -> None:
    for options, prompt in (
        ({}, "<|user|>hi<|assistant|>"),
        ({"do_preprocess": True}, "<|user|>hi<|assistant|>"),
        ({"do_preprocess": False}, "hi"),
    ):
        response = tiny("hi", gen_config=GREEDY, **options)
        assert isinstance(response, Response)
        assert response.token_ids == answer_of(path, prompt)


@pytest.mark.parametrize("name", ["__call__", "batch_infer", "generate"])
def test_a_call_brings_its_chat_template(tiny: AsyncEngine, path: Path, name: str) -> None:
    if name == "generate":
        found = turn(tiny, "hi", 1, GREEDY, chat_template_config=MARKS).token_ids
    else:
        found = getattr(tiny, name)("hi", gen_config=GREEDY, chat_template_config=MARKS).token_ids
    assert found == answer_of(path, "Q: hi\nA: ")


@pytest.mark.parametrize("maker", [pipeline, AsyncEngine])
def test_an_engine_brings_its_chat_template(path: Path, maker: Any) -> None:
    with maker(str(path), backend_config=SMALL, chat_template_config=MARKS) as engine:
        assert one(engine, "hi", GREEDY).token_ids == answer_of(path, "Q: hi\nA: ")


def test_a_model_name_without_a_template_leaves_the_folders(path: Path) -> None:
    with pytest.warns(UserWarning, match="model_name='my-model' .no chat template of that name is built in"):
        engine = pipeline(str(path), model_name="my-model", backend_config=SMALL)
    with engine:
        assert one(engine, "hi", GREEDY).token_ids == answer_of(path, "<|user|>hi<|assistant|>")


def test_keywords_beside_gen_config_have_no_effect_and_say_so(tiny: AsyncEngine) -> None:
    with pytest.warns(FutureWarning, match="request_output_len: will go away, and have no effect beside gen_config"):
        response = tiny("hi", gen_config=GREEDY, request_output_len=3)
    assert isinstance(response, Response)
    assert response.generate_token_len == NUM_TOKENS


# ---- generate, and sessions


def test_generate_streams_one_response(pipe: AsyncEngine) -> None:
    whole = one(pipe, "hi")
    steps = asyncio.run(steps_of(pipe, "hi", 1, CONFIG))
    assert len(steps) > 3
    assert "".join(step.response for step in steps) == whole.text
    assert [step.finish_reason for step in steps[-2:]] == [None, "stop"]
    assert asyncio.run(steps_of(pipe, "hi", 1, CONFIG, stream_response=True)) == steps
    (at_once,) = asyncio.run(steps_of(pipe, "hi", 1, CONFIG, stream_response=False))
    assert (at_once.response, at_once.token_ids) == (whole.text, whole.token_ids)


def test_generate_takes_a_text_or_a_conversation(pipe: AsyncEngine) -> None:
    talk = [user(NAME), said("Nice to meet you, Bob."), user(ASKED)]
    assert turn(pipe, [user(NAME)], 1).response == turn(pipe, NAME, 1).response
    assert turn(pipe, talk, 1).token_ids == one(pipe, talk).token_ids


def test_a_session_keeps_its_conversation_and_no_others(pipe: AsyncEngine) -> None:
    turns = {}
    for session_id, text in ((1, NAME), (2, "My name is Tom")):
        turns[session_id] = turn(pipe, text, session_id, sequence_start=True, sequence_end=False).response
    for session_id, text in ((1, NAME), (2, "My name is Tom")):
        found = turn(pipe, ASKED, session_id, sequence_start=False, sequence_end=True)
        assert found.token_ids == one(pipe, [user(text), said(turns[session_id]), user(ASKED)]).token_ids
        assert found.token_ids != one(pipe, ASKED).token_ids
        with pytest.raises(RequestError, match=f"there is no session {session_id}"):
            turn(pipe, ASKED, session_id, sequence_start=False)


def test_sequence_start_forgets_what_was_said(pipe: AsyncEngine) -> None:
    turn(pipe, NAME, 3, sequence_end=False)
    assert turn(pipe, ASKED, 3, sequence_start=True).token_ids == one(pipe, ASKED).token_ids


def test_step_goes_back_in_the_conversation(pipe: AsyncEngine) -> None:
    first = turn(pipe, NAME, 4, sequence_end=False)
    second = turn(pipe, "What is 3 + 4?", 4, sequence_start=False, sequence_end=False)
    found = turn(pipe, ASKED, 4, sequence_start=False, step=second.history_token_len)
    assert found.token_ids == one(pipe, [user(NAME), said(first.response), user(ASKED)]).token_ids


def test_chat_remembers_what_was_said(pipe: AsyncEngine) -> None:
    """LMDeploy's `pipe.chat`: each answer is that to the whole conversation as one prompt."""
    session = pipe.chat(NAME, gen_config=CONFIG)
    assert session.response is not None
    first = one(pipe, NAME)
    assert (session.response.text, session.response.token_ids) == (first.text, first.token_ids)
    assert pipe.chat(ASKED, session, CONFIG) is session
    whole = one(pipe, [user(NAME), said(first.text), user(ASKED)])
    assert session.response.token_ids == whole.token_ids
    assert session.history == [(NAME, first.text), (ASKED, whole.text)]
    assert str(session) == f"USER:\n{NAME}\nASSISTANT:\n{first.text}\nUSER:\n{ASKED}\nASSISTANT:\n{whole.text}\n"
    session.close()
    session.close()
    with pytest.raises(Closed, match="is closed"):
        pipe.chat("hi", session)


def test_a_chat_is_streamed_and_left(pipe: AsyncEngine) -> None:
    long = GenerationConfig(max_new_tokens=1500, ignore_eos=True)
    with pipe.session(CONFIG) as session:
        pipe.chat(NAME, session, stream_response=True)
        with pytest.raises(RequestError, match="has not been read to the end"):
            pipe.chat(ASKED, session)
        parts = list(session)
        assert len(parts) > 1
        assert "".join(part.text for part in parts) == one(pipe, NAME).text
        assert not list(session.generator)
        stream = session(ASKED, long)
        assert isinstance(stream, Iterator)
        first = next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert session.history[1] == (ASKED, first.text)
        assert pipe.chat("hi", session, CONFIG).history[2][1]
    with pytest.raises(RequestError, match="adapter_name"):
        pipe.chat("hi", adapter_name="none")
    assert one(pipe, "hi").finish_reason == "stop"


def test_end_session_forgets_a_session(pipe: AsyncEngine) -> None:
    turn(pipe, NAME, 5, sequence_end=False)
    pipe.end_session(5)
    with pytest.raises(RequestError, match="there is no session 5"):
        turn(pipe, ASKED, 5, sequence_start=False)


def test_an_answer_is_stopped(pipe: AsyncEngine) -> None:
    """tests/unit/test_offline_pipeline.py has the other ways to stop it."""

    async def run() -> list[GenOut]:
        found = []
        async for out in pipe.generate("hi", 6, GenerationConfig(max_new_tokens=1500, ignore_eos=True)):
            found.append(out)
            if len(found) == 3:
                pipe.stop_session(6)
        return found

    found = asyncio.run(run())
    assert found[-1].finish_reason == "abort"
    assert found[-1].generate_token_len < 1500
    assert one(pipe, "hi").finish_reason == "stop"


def test_get_generator_answers_for_its_session(pipe: AsyncEngine) -> None:
    async def run() -> tuple[str, list[int]]:
        generator = await pipe.get_generator(False, 8)
        options: dict[str, Any] = {"gen_config": CONFIG, "stream_response": False}
        (first,) = [out async for out in generator.generate(NAME, sequence_end=False, **options)]
        (second,) = [out async for out in generator.generate(ASKED, sequence_start=False, **options)]
        return first.response, second.token_ids

    first, second = asyncio.run(run())
    assert second == one(pipe, [user(NAME), said(first), user(ASKED)]).token_ids


def test_many_sessions_are_answered_at_once(pipe: AsyncEngine) -> None:
    texts = [f"What is {at} plus 2?" for at in range(12)]

    async def run() -> list[list[GenOut]]:
        turns = [steps_of(pipe, text, at, CONFIG, stream_response=False) for at, text in enumerate(texts)]
        return await asyncio.gather(*turns)

    assert [found.token_ids for (found,) in asyncio.run(run())] == [one(pipe, text).token_ids for text in texts]
