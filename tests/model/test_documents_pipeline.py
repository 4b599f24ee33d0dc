"""The effect of each documented option of LMDeploy's calls, sessions and chat templates, with a real engine.

A session's answer must equal the answer to the whole conversation as one prompt.
tests/unit/test_offline_pipeline_configs.py shows which engine setting each field of its configurations becomes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import AsyncEngine, ChatTemplateConfig, pipeline, pytorch, turbomind
from pd_cluster.errors import Closed, ConfigError, RequestError
from pd_cluster.messages import GenerationConfig, GenOut, PytorchEngineConfig, Response, TurbomindEngineConfig
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support.checkpoints import make_tokenizer, reference_greedy
from tests.support.watched import watching

MODEL = str(SHIPPED_MODEL)
SMALL = TurbomindEngineConfig(cache_max_entry_count=0.002)
CONFIG = GenerationConfig(max_new_tokens=40)
NUM_TOKENS = 12
GREEDY = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True)
NAME, ASKED = "My name is Bob", "What is my name?"
CHAT = "<|user|>hi<|assistant|>"
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
    """Yields a pipeline with answers known from transformers, and the template `<|user|>…<|assistant|>`."""
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
    for options, prompt in (({}, CHAT), ({"do_preprocess": True}, CHAT), ({"do_preprocess": False}, "hi")):
        response = tiny("hi", gen_config=GREEDY, **options)
        assert isinstance(response, Response)
        assert response.token_ids == answer_of(path, prompt)
    with pytest.warns(FutureWarning, match="request_output_len: deprecated, and have no effect with gen_config"):
        response = tiny("hi", gen_config=GREEDY, request_output_len=3)
    assert isinstance(response, Response)
    assert response.generate_token_len == NUM_TOKENS


def test_a_call_brings_its_chat_template(tiny: AsyncEngine, path: Path) -> None:
    found = [getattr(tiny, name)("hi", GREEDY, chat_template_config=MARKS) for name in ("__call__", "batch_infer")]
    found.append(turn(tiny, "hi", 1, GREEDY, chat_template_config=MARKS))
    assert [each.token_ids for each in found] == [answer_of(path, "Q: hi\nA: ")] * 3


def test_an_engine_brings_its_chat_template(path: Path) -> None:
    with AsyncEngine(str(path), backend_config=SMALL, chat_template_config=MARKS) as engine:
        assert one(engine, "hi", GREEDY).token_ids == answer_of(path, "Q: hi\nA: ")


def test_a_model_name_without_a_template_leaves_the_folders(path: Path) -> None:
    with pytest.warns(UserWarning, match="model_name='my-model' .no chat template of that name is built in"):
        engine = pipeline(str(path), model_name="my-model", backend_config=SMALL)
    with engine:
        assert one(engine, "hi", GREEDY).token_ids == answer_of(path, CHAT)


# ---- generate, and sessions


def test_generate_streams_one_response(pipe: AsyncEngine) -> None:
    """Streams one response to a text or to a conversation."""
    whole = one(pipe, "hi")
    steps = asyncio.run(steps_of(pipe, "hi", 1, CONFIG))
    assert len(steps) > 3
    assert "".join(step.response for step in steps) == whole.text
    assert [step.finish_reason for step in steps[-2:]] == [None, "stop"]
    assert asyncio.run(steps_of(pipe, "hi", 1, CONFIG, stream_response=True)) == steps
    at_once = turn(pipe, "hi", 1)
    assert (at_once.response, at_once.token_ids) == (whole.text, whole.token_ids)
    assert turn(pipe, [user("hi")], 1).response == whole.text
    talk = [user(NAME), said("Nice to meet you, Bob."), user(ASKED)]
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


def test_sequence_start_and_end_session_forget_what_was_said(pipe: AsyncEngine) -> None:
    turn(pipe, NAME, 3, sequence_end=False)
    assert turn(pipe, ASKED, 3, sequence_start=True, sequence_end=False).token_ids == one(pipe, ASKED).token_ids
    pipe.end_session(3)
    with pytest.raises(RequestError, match="there is no session 3"):
        turn(pipe, ASKED, 3, sequence_start=False)


def test_step_goes_back_in_the_conversation(pipe: AsyncEngine) -> None:
    first = turn(pipe, NAME, 4, sequence_end=False)
    second = turn(pipe, "What is 3 + 4?", 4, sequence_start=False, sequence_end=False)
    found = turn(pipe, ASKED, 4, sequence_start=False, step=second.history_token_len)
    assert found.token_ids == one(pipe, [user(NAME), said(first.response), user(ASKED)]).token_ids


def test_chat_remembers_what_was_said(pipe: AsyncEngine) -> None:
    """With LMDeploy's `pipe.chat`, each answer equals that to the whole conversation as one prompt."""
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


def test_an_answer_is_stopped(pipe: AsyncEngine) -> None:
    """An answer can be stopped; tests/unit/test_offline_pipeline.py has the other ways."""

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


# ---- configurations of engines, and the other arguments of `pipeline`


TURBOMIND = (turbomind.EngineConfig, TurbomindEngineConfig)


TEXTS = [f"{at} prompts of a few tokens each" for at in range(6)]


@pytest.fixture(scope="module")
def reference(path: Path) -> list[list[int]]:
    """Returns the answers to TEXTS."""
    return [reference_greedy(path, make_tokenizer().encode(text).ids, NUM_TOKENS)[:NUM_TOKENS] for text in TEXTS]


def small(kind: Any, **fields: Any) -> Any:
    """Returns a configuration with a small pool."""
    return kind(**fields, **({"num_gpu_blocks": 64} if kind not in TURBOMIND else {"cache_max_entry_count": 0.001}))


def ask(pipe: AsyncEngine, texts: list[str], config: GenerationConfig = GREEDY) -> list[Response]:
    found = pipe(texts, gen_config=config, do_preprocess=False)
    assert isinstance(found, list)
    return found


def test_instance_num_is_how_many_are_answered_at_once(path: Path, reference: list[list[int]]) -> None:
    with (
        watching() as made,
        AsyncEngine(str(path), backend_config=small(TurbomindEngineConfig), instance_num=3) as pipe,
    ):
        assert [each.token_ids for each in ask(pipe, TEXTS)] == reference
        assert max(made[0].num_seqs) == 3


def test_num_cpu_blocks_is_the_room_to_copy_to(path: Path, reference: list[list[int]]) -> None:
    """A request that does not fit there is recomputed; 0 means as many blocks as the machine allows."""
    gen_config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    for given, moves in ((3, False), (64, True), (0, True)):
        config = PytorchEngineConfig(
            eviction_type="copy", session_len=128, num_gpu_blocks=32, block_size=4, num_cpu_blocks=given
        )
        with watching() as made, pipeline(str(path), backend_config=config) as pipe:
            watched = made[0]
            found = watched.scheduler.swap.num_blocks
            assert found == given if given else found > 1000
            answers = [each.token_ids[:NUM_TOKENS] for each in ask(pipe, TEXTS, gen_config)]
            assert answers == reference
            assert watched.scheduler.num_preemptions > 0
            assert (sum(watched.num_moves) > 0) == moves


VICUNA = "USER: hi ASSISTANT: "


WAYS_TO_NAME_IT: dict[str, Callable[[str], AsyncEngine]] = {
    "pipeline": lambda path: pipeline(path, "vicuna", backend_config=small(TurbomindEngineConfig)),
    "AsyncEngine": lambda path: AsyncEngine(path, model_name="vicuna", backend_config=small(TurbomindEngineConfig)),
    "early pytorch": lambda path: pipeline(path, backend_config=small(pytorch.EngineConfig, model_name="vicuna")),
    "early turbomind": lambda path: pipeline(path, backend_config=small(turbomind.EngineConfig, model_name="vicuna")),
    "turbomind": lambda path: pipeline(path, backend_config=small(TurbomindEngineConfig, model_name="vicuna")),
}


@pytest.mark.parametrize("way", WAYS_TO_NAME_IT)
def test_model_name_asks_for_a_chat_template(path: Path, way: str) -> None:
    token_ids = make_tokenizer().encode(VICUNA).ids
    with WAYS_TO_NAME_IT[way](str(path)) as pipe:
        response = pipe("hi", gen_config=GREEDY)
        assert isinstance(response, Response)
        assert response.input_token_len == len(token_ids)
        assert response.token_ids == reference_greedy(path, token_ids, NUM_TOKENS)[:NUM_TOKENS]


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_either_backend_answers_alike(path: Path, reference: list[list[int]], backend: str) -> None:
    with watching() as made, pipeline(str(path), backend=backend) as pipe:
        assert made[0].runner.pool.layout.block_size == {"turbomind": 128, "pytorch": 64}[backend]
        assert [each.token_ids for each in ask(pipe, TEXTS)] == reference
    with pytest.raises(ConfigError, match="backend 'vllm': expected turbomind or pytorch"):
        pipeline(str(path), backend="vllm")


def test_log_level_is_what_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By default only errors are logged; a lower level also logs the package's messages while loading."""
    logs = [logging.getLogger(name) for name in ("pd_cluster", "pd_cluster.extras.lmdeploy")]
    before = [log.level for log in logs]
    try:
        for level, is_logged in (("ERROR", False), ("INFO", True)):
            caplog.clear()
            with pipeline(str(path), log_level=level, backend_config=small(TurbomindEngineConfig)):
                pass
            assert any(record.levelno == logging.INFO for record in caplog.records) == is_logged
            assert logs[1].getEffectiveLevel() == logging.ERROR
    finally:
        for log, each in zip(logs, before, strict=True):
            log.setLevel(each)


def test_a_converted_model_is_refused(tmp_path: Path) -> None:
    """TurboMind's folders have a config.ini and one file for each weight."""
    weights = tmp_path / "triton_models" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text("[llama]\nmodel_name = llama2\n")
    (weights / "tok_embeddings.weight").write_bytes(b"\0" * 64)
    for folder in (tmp_path, weights):
        with pytest.raises(ConfigError, match=r"config\.json: missing; the model folder needs config\.json"):
            pipeline(str(folder))
