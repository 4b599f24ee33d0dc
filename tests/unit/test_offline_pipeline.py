"""LMDeploy's calls over an engine that plays back its answer: batches, streams, sessions, and what is refused."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import ConfigError, RequestError, called
from pd_cluster.messages import GenerationConfig, GenOut, Response
from pd_cluster.offline.lmdeploy import setup
from pd_cluster.offline.lmdeploy.async_engine import AsyncEngine
from pd_cluster.offline.lmdeploy.pipeline import pipeline
from pd_cluster.offline.lmdeploy.templates import ChatTemplateConfig
from pd_cluster.offline.lmdeploy.vision_config import VisionConfig
from pd_cluster.offline.session import OfflineConfig
from pd_cluster.pytorch import EngineConfig as PytorchConfig
from pd_cluster.turbomind import EngineConfig as TurbomindConfig
from tests.support.checkpoints import EOS_ID
from tests.support.playback_offline import PlaybackOffline

ANSWER = "Hello there."
TALK = [{"role": "user", "content": "hi"}]
VICUNA = ChatTemplateConfig("vicuna")
NUM_TOKENS = len(ANSWER) + 1  # a byte each, and the one that ends it
Make = Callable[..., tuple[AsyncEngine, PlaybackOffline]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Returns `make(**arguments of pipeline)`, which makes an engine with constant answers, and the engine's fakes."""
    made: list[PlaybackOffline] = []

    def build(says: str = ANSWER, has_template: bool = True, **arguments: Any) -> tuple[AsyncEngine, PlaybackOffline]:
        def offline(config: OfflineConfig) -> PlaybackOffline:
            made.append(PlaybackOffline(tmp_path, config, says, has_template))
            return made[-1]

        monkeypatch.setattr(setup, "Offline", offline)
        return pipeline("/models/x", **arguments), made[-1]

    yield build
    for each in made:
        each.close()
    logging.getLogger("pd_cluster").setLevel(logging.NOTSET)


async def steps_of(engine: AsyncEngine, *arguments: Any, **options: Any) -> list[GenOut]:
    return [out async for out in engine.generate(*arguments, **options)]


def turn(engine: AsyncEngine, *arguments: Any, **options: Any) -> GenOut:
    """A whole one, on an event loop of its own."""
    (out,) = asyncio.run(steps_of(engine, *arguments, stream_response=False, **options))
    return out


# ---- batches


def test_each_prompt_of_a_list_has_its_response_in_order(make: Make) -> None:
    engine, offline = make()
    responses = engine(["hi", "say this is a test"])
    assert [response.text for response in responses] == [ANSWER] * 2
    assert [(response.index, response.session_id) for response in responses] == [(0, 0), (1, 1)]
    assert sorted(offline.prompts) == ["<|user|>hi<|assistant|>", "<|user|>say this is a test<|assistant|>"]
    assert [response.input_token_len for response in responses] == [
        len(f"<|user|>{text}<|assistant|>") for text in ("hi", "say this is a test")
    ]
    assert engine.batch_infer(["hi", "say this is a test"]) == responses


def test_one_prompt_has_one_response(make: Make) -> None:
    engine, _ = make()
    response = engine("hi")
    assert isinstance(response, Response)
    assert response.text == ANSWER
    assert response.generate_token_len == len(response.token_ids) == NUM_TOKENS
    assert response.finish_reason == "stop"
    assert f"text='{ANSWER}', generate_token_len=13, input_token_len=23, session_id=0" in str(response)


def test_conversations_are_prompts_in_openai_format(make: Make) -> None:
    engine, offline = make()
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    second = [{"role": "user", "content": "Shanghai is"}]
    assert len(engine([first, second])) == 2
    assert sorted(offline.prompts) == [
        "<|system|>Be brief.<|user|>hi<|assistant|>",
        "<|user|>Shanghai is<|assistant|>",
    ]
    assert isinstance(engine(first), Response)


@pytest.mark.parametrize(("arguments", "num_ends"), [({}, 0), ({"allow_control_tokens": True}, 2)])
def test_control_tokens_in_messages_are_text(make: Make, arguments: dict[str, Any], num_ends: int) -> None:
    """In a text that becomes a message, too; one that goes to the model as it is keeps them."""
    engine, offline = make(**arguments)
    engine(["a<eos>"])
    engine([[{"role": "user", "content": "b<eos>"}]])
    assert sorted(offline.prompts) == ["<|user|>a<eos><|assistant|>", "<|user|>b<eos><|assistant|>"]
    assert sum(prompt.count(EOS_ID) for prompt in offline.router.prompts) == num_ends
    engine("c<eos>", do_preprocess=False)
    assert offline.router.prompts[-1].count(EOS_ID) == 1


def test_without_preprocessing_the_prompt_goes_to_the_model_as_it_is(make: Make) -> None:
    engine, offline = make()
    engine(["hi"], do_preprocess=False)
    assert offline.prompts == ["hi"]
    with pytest.raises(RequestError, match="do_preprocess is False; give a text"):
        engine([[{"role": "user", "content": "hi"}]], do_preprocess=False)


def test_a_call_may_bring_its_own_chat_template(make: Make) -> None:
    engine, offline = make()
    engine("hi", chat_template_config=ChatTemplateConfig("vicuna"))
    engine.batch_infer("hi", chat_template_config=ChatTemplateConfig(user="Q: ", eoh="\n", assistant="A: "))
    assert turn(engine, "hi", 1, chat_template_config=ChatTemplateConfig("base")).response == ANSWER
    assert offline.prompts == ["USER: hi ASSISTANT: ", "Q: hi\nA: ", "hi"]


@pytest.mark.parametrize("name", ["__call__", "batch_infer", "stream_infer", "generate"])
def test_a_call_without_gen_config_has_its_own_defaults(make: Make, name: str) -> None:
    engine, offline = make()
    if name == "generate":
        turn(engine, "hi", 1)
    else:
        list(getattr(engine, name)(["hi"]))
    (sampling,) = offline.router.requests
    assert (sampling.max_tokens, sampling.top_k, sampling.top_p, sampling.temperature) == (512, 40, 0.8, 0.8)
    assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.0, False)


@pytest.mark.parametrize("name", ["__call__", "batch_infer", "generate"])
@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("request_output_len", "max_tokens", 7),
        ("top_k", "top_k", 3),
        ("top_p", "top_p", 0.5),
        ("temperature", "temperature", 0.25),
        ("repetition_penalty", "repetition_penalty", 1.5),
        ("ignore_eos", "ignore_eos", True),
    ],
)
def test_an_old_keyword_still_works_and_says_that_it_will_go(
    make: Make, name: str, option: str, field: str, value: Any
) -> None:
    engine, offline = make()
    with pytest.warns(FutureWarning, match=f"{option}: will go away; use gen_config") as caught:
        turn(engine, "hi", 1, **{option: value}) if name == "generate" else getattr(engine, name)(
            "hi", **{option: value}
        )
    assert getattr(offline.router.requests[0], field) == value
    assert caught[0].filename.endswith(("test_offline_pipeline.py", "asyncio/events.py"))


def test_stop_words_may_be_a_keyword_too(make: Make) -> None:
    engine, _ = make()
    with pytest.warns(FutureWarning, match="stop_words: will go away"):
        assert turn(engine, "hi", 1, stop_words=["there"]).response == "Hello "


def test_old_keywords_have_no_effect_beside_gen_config_and_say_so(make: Make) -> None:
    engine, offline = make()
    with pytest.warns(FutureWarning, match="top_k: will go away, and have no effect beside gen_config"):
        engine("hi", gen_config=GenerationConfig(top_k=5), top_k=9)
    assert offline.router.requests[0].top_k == 5


def test_each_prompt_may_have_its_own_gen_config(make: Make) -> None:
    engine, offline = make()
    engine(["a", "b"], gen_config=[GenerationConfig(max_new_tokens=3), GenerationConfig(max_new_tokens=4)])
    assert sorted(sampling.max_tokens for sampling in offline.router.requests) == [3, 4]


def test_a_long_prompt_hurts_only_itself(make: Make) -> None:
    engine, _ = make(backend_config=TurbomindConfig(session_len=64))
    long, short = engine(["x" * 5000, "hi"])
    assert (long.text, long.finish_reason, long.generate_token_len) == ("", "length", 0)
    assert long.error == f"{long.input_token_len} prompt tokens leave no room for an answer; session_len is 64"
    assert long.input_token_len == 5000 + len("<|user|><|assistant|>")
    assert (short.text, short.error) == (ANSWER, None)


def test_an_answer_is_no_longer_than_the_session_has_room_for(make: Make) -> None:
    engine, offline = make(backend_config=TurbomindConfig(session_len=64))
    engine("hi", gen_config=GenerationConfig(max_new_tokens=1000))
    assert offline.router.requests[0].max_tokens == 64 - len("<|user|>hi<|assistant|>")


def test_what_fails_on_the_way_hurts_only_itself(make: Make) -> None:
    engine, offline = make()
    offline.router.fails_for = offline.service.tokenizer.encode("!")[0]
    good, bad = engine(["hi", "hi!"])
    assert (good.text, good.finish_reason) == (ANSWER, "stop")
    assert (bad.text, bad.finish_reason, bad.error) == ("", "error", "the engine has failed")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: empty"),
        (None, {}, "prompts: None; expected a text"),
        (["a", 5], {}, r"prompts\[1\]: 5 is neither a text nor a message"),
        (["a", [{"role": "user", "content": "b"}]], {}, r"prompts\[1\]: texts and conversations do not go into one"),
        ([[]], {}, r"prompts\[0\]: an empty conversation"),
        ([["a"]], {}, r"prompts\[0\]\[0\]: 'a' is neither"),
        ([("describe this", "image")], {}, r"prompts\[0\]: images and the like are not supported"),
        (["a"], {"gen_config": [GenerationConfig()] * 2}, "gen_config: 2 configurations for 1 prompts"),
        (["a"], {"gen_config": {"top_k": 1}}, "gen_config: .* expected a GenerationConfig"),
        (["a"], {"adapter_name": "lora"}, "adapter_name: 'lora'; the engine's adapters: none"),
        (["a", ""], {"do_preprocess": False}, r"^prompts\[1\]: no tokens"),
        ("", {"do_preprocess": False}, "^prompts: no tokens"),
        ([TALK, [{"role": "", "content": "b"}]], {}, r"^prompts\[1\]: messages.0.role: ''"),
        (
            [TALK, [{"role": "tool", "content": "b"}]],
            {"chat_template_config": VICUNA},
            r"^prompts\[1\]: the chat templ",
        ),
        (["a", "\udcff"], {}, r"^prompts\[1\]: 'utf-8' codec can't encode"),
        ("\udcff", {"do_preprocess": False}, "^prompts: 'utf-8' codec can't encode"),
        ([[{"role": "user", "content": [{"type": "image_url"}]}]], {}, "only parts of type 'text' are supported"),
        (["a", "b"], {"gen_config": [GenerationConfig(), GenerationConfig(top_p=2.0)]}, "top_p: 2.0"),
        (["a", "b"], {"gen_config": [GenerationConfig(), GenerationConfig(stop_token_ids=[-1])]}, "stop_token_ids"),
        (["a", "b"], {"gen_config": [GenerationConfig(), GenerationConfig(logprobs=99)]}, "logprobs: 99 is more"),
    ],
)
def test_wrong_input_is_refused_before_any_work(
    make: Make, prompts: Any, options: dict[str, Any], message: str
) -> None:
    engine, offline = make()
    with pytest.raises(RequestError, match=message):
        engine(prompts, **options)
    assert offline.prompts == []


@pytest.mark.parametrize("given", ["vicuna", {}])
def test_a_calls_chat_template_config_of_another_type_is_refused(make: Make, given: Any) -> None:
    engine, _ = make()
    with pytest.raises(ConfigError, match=r"^chat_template_config .*: expected a ChatTemplateConfig"):
        engine("hi", chat_template_config=given)


def test_an_unknown_option_of_a_call_names_the_nearest_one(make: Make) -> None:
    engine, _ = make()
    with pytest.raises(ConfigError, match="Call: request_output_length is unknown; did you mean request_output_len"):
        engine("hi", request_output_length=3)


def test_an_unknown_option_of_generate_names_the_nearest_one(make: Make) -> None:
    engine, _ = make()
    with pytest.raises(ConfigError, match="Call: sequence_stop is unknown"):
        turn(engine, "hi", 1, sequence_stop=True)


def test_a_stream_has_what_is_new_of_each_prompt(make: Make) -> None:
    engine, _ = make()
    found = list(engine.stream_infer(["a", "b"]))
    for index in (0, 1):
        mine = [response for response in found if response.index == index]
        assert "".join(response.text for response in mine) == ANSWER
        assert [response.finish_reason for response in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1].generate_token_len == NUM_TOKENS


def test_leaving_a_stream_ends_its_work(make: Make) -> None:
    engine, offline = make()
    offline.router.holds = True
    stream = engine.stream_infer("hi")
    assert next(iter(stream)).text == ANSWER[0]
    stream.close()  # type: ignore[attr-defined]
    assert offline.router.was_closed


def test_a_bar_counts_the_prompts(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = make()
    engine(["a", "b"], use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    engine(["a", "b"])
    assert capsys.readouterr().err == ""


# ---- sessions


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


def test_without_stream_response_everything_comes_at_once(make: Make) -> None:
    engine, _ = make()
    out = turn(engine, [{"role": "user", "content": "hi"}], 1)
    assert (out.response, out.history_token_len, out.finish_reason) == (ANSWER, 0, "stop")


def test_a_session_keeps_its_conversation_until_sequence_end(make: Make) -> None:
    engine, offline = make()
    turn(engine, "one", 5, sequence_end=False)
    second = turn(engine, "two", 5, sequence_start=False)
    assert offline.prompts[1] == f"<|user|>one<|assistant|>{ANSWER}<|user|>two<|assistant|>"
    assert second.history_token_len == len(f"<|user|>one<|assistant|>{ANSWER}")
    assert second.input_token_len == len("<|user|>two<|assistant|>")
    assert set(offline.router.sessions) == {"session-5"}
    with pytest.raises(RequestError, match="there is no session 5; begin it with sequence_start=True"):
        turn(engine, "three", 5, sequence_start=False)


def test_a_session_of_texts_goes_on_from_its_tokens(make: Make) -> None:
    engine, offline = make()
    turn(engine, "one", 5, sequence_end=False, do_preprocess=False)
    turn(engine, " two", 5, sequence_start=False, sequence_end=False, do_preprocess=False)
    assert offline.prompts[1] == f"one{ANSWER} two"
    with pytest.raises(RequestError, match="session 5 began without a chat template"):
        turn(engine, "three", 5, sequence_start=False)


def test_step_goes_back_to_a_turns_end(make: Make) -> None:
    engine, offline = make()
    for text in ("one", "two"):
        last = turn(engine, text, 5, sequence_start=text == "one", sequence_end=False)
    turn(engine, "again", 5, sequence_start=False, sequence_end=False, step=last.history_token_len)
    assert offline.prompts[2] == f"<|user|>one<|assistant|>{ANSWER}<|user|>again<|assistant|>"
    with pytest.raises(RequestError, match="step: 3 is no turn's end in session 5; they are at 0, 36, "):
        turn(engine, "again", 5, sequence_start=False, step=3)


def test_sequence_start_begins_anew(make: Make) -> None:
    engine, offline = make()
    turn(engine, "one", 5, sequence_end=False)
    turn(engine, "two", 5)
    assert offline.prompts[1] == "<|user|>two<|assistant|>"


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "", "content": "x"}], {"sequence_start": False}),
        ([{"role": "", "content": "x"}], {"sequence_start": True}),
        ("x", {"sequence_start": True, "step": 3}),
        ("x", {"sequence_start": False, "do_preprocess": False}),
        ([{"role": "", "content": "x"}], {"sequence_start": False, "step": 36}),
    ],
)
def test_a_turn_that_is_refused_leaves_the_session_as_it_was(
    make: Make, messages: Any, options: dict[str, Any]
) -> None:
    engine, offline = make()
    turn(engine, "one", 5, sequence_end=False)
    second = turn(engine, "two", 5, sequence_start=False, sequence_end=False)
    with pytest.raises(RequestError):
        turn(engine, messages, 5, **options)
    turn(engine, "three", 5, sequence_start=False)
    assert second.history_token_len == 36
    talk = f"<|user|>one<|assistant|>{ANSWER}<|user|>two<|assistant|>{ANSWER}<|user|>three<|assistant|>"
    assert offline.prompts[-1] == talk


def test_a_session_that_was_refused_at_its_start_is_none(make: Make) -> None:
    engine, _ = make()
    with pytest.raises(RequestError, match=r"^messages.0.role: ''"):
        turn(engine, [{"role": "", "content": "x"}], 5, sequence_end=False)
    with pytest.raises(RequestError, match="there is no session 5"):
        turn(engine, "two", 5, sequence_start=False)


@pytest.mark.parametrize("session_id", [None, [], 1.5, "a", True])
def test_a_session_id_is_a_whole_number(make: Make, session_id: Any) -> None:
    engine, _ = make()
    with pytest.raises(RequestError, match=r"^session_id: .* must be a whole number"):
        turn(engine, "hi", session_id)


@pytest.mark.parametrize("how", ["stop_session", "generate", "get_generator"])
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
                    elif how == "generate":
                        assert [each.response async for each in engine.generate("", 5, stop=True)] == [""]
                    else:
                        waiting = asyncio.create_task(engine.get_generator(True, 5))
            if how == "get_generator":
                assert (await waiting).session_id == 5
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


def test_a_caller_that_leaves_ends_the_work(make: Make) -> None:
    engine, offline = make()
    offline.router.holds = True

    async def run() -> None:
        async with asyncio.timeout(20):
            steps = engine.generate("one", 5)
            await anext(steps)
            await steps.aclose()

    asyncio.run(run())
    assert offline.router.was_closed


def test_get_generator_is_a_handle_of_its_session(make: Make) -> None:
    engine, offline = make()

    async def run() -> None:
        generator = await engine.get_generator(False, 8)
        async for _ in generator.generate("one", sequence_end=False):
            pass
        async for _ in generator.generate("two", sequence_start=False, sequence_end=False):
            pass
        generator.end()

    asyncio.run(run())
    assert offline.prompts[1].startswith("<|user|>one<|assistant|>")
    with pytest.raises(RequestError, match="there is no session 8"):
        turn(engine, "three", 8, sequence_start=False)


def test_a_prompt_beyond_the_session_says_so_and_leaves_the_session_as_it_was(make: Make) -> None:
    engine, offline = make(backend_config=PytorchConfig(session_len=80))
    turn(engine, "one", 5, sequence_end=False)
    out = turn(engine, "x" * 100, 5, sequence_start=False, sequence_end=False)
    assert (out.response, out.finish_reason, out.generate_token_len) == ("", "length", 0)
    turn(engine, "two", 5, sequence_start=False)
    assert offline.prompts[-1] == f"<|user|>one<|assistant|>{ANSWER}<|user|>two<|assistant|>"


def test_many_sessions_answer_at_once(make: Make) -> None:
    engine, offline = make()

    async def run() -> list[list[GenOut]]:
        return await asyncio.gather(*[steps_of(engine, f"prompt {at}", at) for at in range(40)])

    assert all("".join(out.response for out in found) == ANSWER for found in asyncio.run(run()))
    assert len(offline.prompts) == 40


# ---- what pipeline takes


def test_documented_defaults_of_pipeline(make: Make) -> None:
    """Both documents' orders are signatures of their own, over an implementation with the defaults."""
    for overload in typing.get_overloads(pipeline):
        defaults = {name: each.default for name, each in inspect.signature(overload).parameters.items()}
        assert {name: defaults[name] for name in ("instance_num", "tp", "log_level")} == {
            "instance_num": 32,
            "tp": 1,
            "log_level": "ERROR",
        }
        assert defaults["chat_template_config"] is None
    engine, _ = make()
    assert engine.backend == "turbomind"


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_either_backend_runs_this_engine_with_its_own_defaults(make: Make, backend: str) -> None:
    engine, offline = make(backend=backend)
    assert engine.backend == backend
    assert offline.config.engine.block_size == {"turbomind": 128, "pytorch": 64}[backend]
    assert offline.config.engine.max_num_seqs == engine.instance_num == 128
    assert engine("hi").text == ANSWER


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "vllm"}, "backend 'vllm': expected turbomind or pytorch"),
        ({"backend_config": 5}, "backend_config 5: expected a TurbomindEngineConfig"),
        ({"tp": 0}, "pipeline.tp 0: must be a whole number of at least 1"),
        ({"tp": 2, "backend_config": PytorchConfig(tp=4)}, "tp 2: backend_config has tp 4"),
        ({"instance_num": 0}, "pipeline.instance_num 0"),
        ({"log_level": "LOUD"}, "log_level 'LOUD': expected one of DEBUG"),
        ({"chat_template_config": "llama2"}, "chat_template_config 'llama2': expected a ChatTemplateConfig"),
        (
            {"model_name": "a", "backend_config": PytorchConfig("b")},
            "model_name 'a': backend_config has model_name 'b'",
        ),
        ({"vision_config": {}}, "pipeline.vision_config {}: expected a VisionConfig"),
        ({"vision_config": VisionConfig(0)}, "VisionConfig.max_batch_size 0: must be a whole number of at least 1"),
        ({"model_name": 5}, "model_name 5: must be a text"),
        ({"backend_config": PytorchConfig(tp=None)}, "PytorchEngineConfig.tp None: must be a whole number"),
        ({"arguments": "--kv-hmac"}, "arguments '--kv-hmac': expected a list of flags"),
        ({"session_length": 5}, "pipeline: session_length is unknown"),
        ({"backend_confg": None}, "pipeline: backend_confg is unknown; did you mean backend_config?"),
    ],
)
def test_what_pipeline_cannot_do_is_refused_by_name(make: Make, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


def test_what_has_no_effect_is_told_in_one_warning(make: Make) -> None:
    with pytest.warns(UserWarning, match="without effect here: max_log_len=5 .*prefill_interval=8") as caught:
        make(max_log_len=5, backend_config=PytorchConfig(prefill_interval=8))
    assert len(caught) == 1


def test_instance_num_is_how_many_prompts_are_answered_at_a_time(make: Make) -> None:
    engine, offline = make(instance_num=2)
    offline.router.holds = True

    def read_three() -> None:
        stream = engine.stream_infer(["a", "b", "c"])
        assert sorted(next(iter(stream)).index for _ in range(2)) == [0, 1]
        assert len(offline.prompts) == 2
        stream.close()  # type: ignore[attr-defined]

    read_three()


def test_a_pipeline_brings_its_chat_template(make: Make) -> None:
    template = ChatTemplateConfig(user="Q: ", eoh="\n", assistant="A: ", stop_words=["Q:"])
    engine, offline = make("Well.Q: more", chat_template_config=template)
    assert engine("hi").text == "Well."
    assert offline.prompts == ["Q: hi\nA: "]


def test_log_level_is_that_of_this_packages_loggers(make: Make) -> None:
    logs = [logging.getLogger(name) for name in ("pd_cluster", "pd_cluster.offline.lmdeploy")]
    before = [log.level for log in logs]
    try:
        make()
        assert [log.isEnabledFor(logging.WARNING) for log in logs] == [True, False]  # an `LLM` may be beside it
        make(log_level="DEBUG")
        assert logs[0].isEnabledFor(logging.DEBUG)
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


def test_model_name_asks_for_a_built_in_chat_template(make: Make) -> None:
    engine, offline = make(model_name="internlm-chat-7b")
    engine("hi")
    assert offline.prompts == ["<|User|>:hi\n<|Bot|>:"]


def test_the_backends_model_name_asks_for_it_as_well(make: Make) -> None:
    engine, offline = make(backend_config=TurbomindConfig("qwen-7b"))
    engine("hi")
    assert offline.prompts[0].endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_marks_without_a_name_take_the_place_of_those_that_model_name_has(make: Make) -> None:
    engine, offline = make(model_name="internlm-chat-7b", chat_template_config=ChatTemplateConfig(meta_instruction="s"))
    engine("hi")
    assert offline.prompts == ["<|System|>:s\n<|User|>:hi\n<|Bot|>:"]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (f"{called('dtype')} 'int3': expected one of auto", "dtype 'int3': expected one of auto"),
        (
            f"{called('device')} cuda: not here; use {called('device')} cpu",
            "device_type cuda: not here; use device_type cpu",
        ),
        (f"{called('max_model_len')} 9: too long", "session_len 9: too long"),
    ],
)
def test_what_the_engine_refuses_is_called_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, raised: str, told: str
) -> None:
    def offline(config: OfflineConfig) -> PlaybackOffline:
        raise ConfigError(raised)

    monkeypatch.setattr(setup, "Offline", offline)
    with pytest.raises(ConfigError) as caught:
        pipeline("/models/x")
    assert str(caught.value) == told


def test_flags_for_worker_processes_without_any_are_told(make: Make) -> None:
    with pytest.warns(UserWarning, match=r"without effect here: arguments=\['--kv-hmac'\] .there are no worker proc"):
        make(arguments=["--kv-hmac"])


def test_a_model_name_without_a_template_leaves_the_folders_own(make: Make) -> None:
    with pytest.warns(UserWarning, match="model_name='my-model' .no chat template of that name is built in"):
        engine, offline = make(model_name="my-model")
    engine("hi")
    assert offline.prompts == ["<|user|>hi<|assistant|>"]


def test_a_folder_without_a_template_takes_texts_as_they_are(make: Make) -> None:
    with pytest.warns(UserWarning, match="the model folder has no chat template"):
        engine, offline = make(has_template=False)
    engine("hi")
    assert offline.prompts == ["hi"]
    with pytest.raises(RequestError, match="a conversation needs a chat template, and there is none"):
        engine([{"role": "user", "content": "hi"}])


def test_prefill_and_decode_are_numbers_of_worker_processes(make: Make) -> None:
    _, offline = make(prefill=2, decode=1, arguments=["--kv-hmac"])
    assert (offline.config.prefill, offline.config.decode) == (2, 1)
    assert offline.config.arguments == ("--kv-hmac", "--log-level=ERROR")


def test_several_ranks_are_worker_processes(make: Make) -> None:
    for arguments in ({"tp": 2}, {"backend_config": PytorchConfig(tp=2)}):
        with pytest.warns(UserWarning, match="tp=2: a prefill and a decode instance of 2 ranks each"):
            _, offline = make(**arguments)
        assert (offline.config.prefill, offline.config.decode) == (1, 1)
        assert offline.config.engine.tensor_parallel_size == 2


def test_a_pipeline_with_nothing_special_warns_of_nothing(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, _ = make()
        engine(["hi"], gen_config=GenerationConfig())


# ---- names


def test_the_names_are_the_packages() -> None:
    from pd_cluster import AsyncEngine, ChatTemplateConfig, GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig
    from pd_cluster import pipeline as made_by
    from pd_cluster.messages import GenerationConfig as OfMessages

    assert GenerationConfig is OfMessages
    names = [each.__name__ for each in (AsyncEngine, ChatTemplateConfig, PytorchEngineConfig, TurbomindEngineConfig)]
    assert names == ["AsyncEngine", "ChatTemplateConfig", "PytorchEngineConfig", "TurbomindEngineConfig"]
    assert callable(made_by)


def test_which_model_is_served_and_how_it_is_read(make: Make) -> None:
    """Arguments follow `LLM`'s; a field of the engine's configuration precedes the same override."""
    _, offline = make(
        try_unlisted=["helium"],
        language_model_only=True,
        hf_overrides={"rope_theta": 5, "use_logn_attn": False},
        backend_config=TurbomindConfig(use_logn_attn=True),
    )
    engine = offline.config.engine
    assert (engine.try_unlisted, engine.language_model_only) == (("helium",), True)
    assert engine.hf_overrides == {"rope_theta": 5, "use_logn_attn": True}
    with pytest.raises(ConfigError, match=r"^pipeline: Expected `array`, got `str` - at `\$\.try_unlisted`"):
        make(try_unlisted="helium")
