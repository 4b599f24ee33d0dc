"""LMDeploy's calls over an engine that plays back an answer: batches and streams."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import typing
from typing import Any

import pytest

from pd_cluster.errors import ConfigError, RequestError, called
from pd_cluster.extras.lmdeploy import pipeline_setup
from pd_cluster.extras.lmdeploy.pipeline import pipeline
from pd_cluster.extras.lmdeploy.pipeline_vision_config import VisionConfig
from pd_cluster.extras.lmdeploy.prompt_templates import ChatTemplateConfig
from pd_cluster.messages import GenerationConfig, GenOut
from pd_cluster.offline.offline_service import OfflineConfig
from pd_cluster.pytorch import EngineConfig as PytorchConfig
from pd_cluster.settings.speculation import Speculation
from pd_cluster.turbomind import EngineConfig as TurbomindConfig
from tests.support.checkpoints import EOS_ID
from tests.support.lmdeploy_engine import ANSWER, Make, engines, steps_of, turn
from tests.support.playback_offline import PlaybackOffline

TALK = [{"role": "user", "content": "hi"}]


make = pytest.fixture(engines)


@pytest.mark.parametrize(("arguments", "num_ends"), [({}, 0), ({"allow_control_tokens": True}, 2)])
def test_control_tokens_in_messages_are_text(make: Make, arguments: dict[str, Any], num_ends: int) -> None:
    """Control tokens in messages, or in a prompt that becomes a message, stay text; raw prompts keep them."""
    engine, offline = make(**arguments)
    engine(["a<eos>"])
    engine([[{"role": "user", "content": "b<eos>"}]])
    assert sorted(offline.prompts) == ["<|user|>a<eos><|assistant|>", "<|user|>b<eos><|assistant|>"]
    assert sum(prompt.count(EOS_ID) for prompt in offline.router.prompts) == num_ends
    engine("c<eos>", do_preprocess=False)
    assert offline.router.prompts[-1].count(EOS_ID) == 1


def test_a_call_without_gen_config_has_its_own_defaults(make: Make) -> None:
    engine, offline = make()
    turn(engine, "hi", 1)
    calls: list[Any] = [engine, engine.batch_infer, engine.stream_infer]
    for call in calls:
        list(call(["hi"]))
    assert len(offline.router.requests) == 4
    for sampling in offline.router.requests:
        assert (sampling.max_tokens, sampling.top_k, sampling.top_p, sampling.temperature) == (512, 40, 0.8, 0.8)
        assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.0, False)


@pytest.mark.parametrize("name", ["__call__", "batch_infer", "generate"])
def test_an_old_keyword_still_works_and_says_that_it_will_go(make: Make, name: str) -> None:
    engine, offline = make()
    for option, field, value in (
        *(("request_output_len", "max_tokens", 7), ("top_k", "top_k", 3), ("top_p", "top_p", 0.5)),
        *(("temperature", "temperature", 0.25), ("repetition_penalty", "repetition_penalty", 1.5)),
        ("ignore_eos", "ignore_eos", True),
    ):
        given: dict[str, Any] = {option: value}
        with pytest.warns(FutureWarning, match=f"{option}: deprecated; use gen_config") as caught:
            turn(engine, "hi", 1, **given) if name == "generate" else getattr(engine, name)("hi", **given)
        assert getattr(offline.router.requests[-1], field) == value
        assert caught[0].filename.endswith(("test_offline_pipeline.py", "lmdeploy_engine.py", "asyncio/events.py"))


def test_a_long_prompt_hurts_only_itself(make: Make) -> None:
    engine, _ = make(backend_config=TurbomindConfig(session_len=64))
    long, short = engine(["x" * 5000, "hi"])
    assert (long.text, long.finish_reason, long.generate_token_len) == ("", "length", 0)
    assert long.error == f"{long.input_token_len} prompt tokens leave no room for an answer; session_len is 64"
    assert long.input_token_len == 5000 + len("<|user|><|assistant|>")
    assert (short.text, short.error) == (ANSWER, None)


def test_what_fails_on_the_way_hurts_only_itself(make: Make) -> None:
    engine, offline = make()
    offline.router.fails_for = offline.service.tokenizer.encode("!")[0]
    good, bad = engine(["hi", "hi!"])
    assert (good.text, good.finish_reason) == (ANSWER, "stop")
    assert (bad.text, bad.finish_reason, bad.error) == ("", "error", "the engine has failed")


def test_wrong_input_is_refused_before_any_work(make: Make) -> None:
    engine, offline = make()
    good = GenerationConfig()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "prompts: empty"),
        (["a", 5], {}, r"prompts\[1\]: 5 is neither a text nor a message"),
        ([["a"]], {}, r"prompts\[0\]\[0\]: 'a' is neither"),
        (["a"], {"gen_config": [good] * 2}, "gen_config: 2 configurations for 1 prompts"),
        (["a", ""], {"do_preprocess": False}, r"^prompts\[1\]: no tokens"),
        ([TALK, [{"role": "", "content": "b"}]], {}, r"^prompts\[1\]: messages.0.role: ''"),
        (["a", "\udcff"], {}, r"^prompts\[1\]: 'utf-8' codec can't encode"),
        (["a", "b"], {"gen_config": [good, GenerationConfig(top_p=2.0)]}, "top_p: 2.0"),
        (["a", "b"], {"gen_config": [good, GenerationConfig(logprobs=99)]}, "logprobs: 99 is more"),
    ]
    for prompts, options, message in wrong:
        with pytest.raises(RequestError, match=message):
            engine(prompts, **options)
    other_types: list[Any] = ["vicuna", {}]
    for given in other_types:
        with pytest.raises(ConfigError, match=r"^chat_template_config .*: expected a ChatTemplateConfig"):
            engine("hi", chat_template_config=given)
    with pytest.raises(ConfigError, match="Call: request_output_length is unknown; did you mean request_output_len"):
        engine("hi", request_output_length=3)
    assert offline.prompts == []


# ---- LMDeploy's sessions over an engine that plays back an answer: turns, steps and ends


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


# ---- arguments of LMDeploy's `pipeline`: honoured, refused by name, or without effect


def test_documented_defaults_of_pipeline(make: Make) -> None:
    """Each document's argument order is a separate signature over one implementation with the defaults."""
    for overload in typing.get_overloads(pipeline):
        defaults = {name: each.default for name, each in inspect.signature(overload).parameters.items()}
        assert [defaults[name] for name in ("instance_num", "tp", "log_level")] == [32, 1, "ERROR"]
        assert defaults["chat_template_config"] is None
    engine, _ = make()
    assert engine.backend == "turbomind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "vllm"}, "backend 'vllm': "),
        ({"backend_config": 5}, "backend_config 5: "),
        ({"tp": 0}, "pipeline.tp 0: "),
        ({"tp": 2, "backend_config": PytorchConfig(tp=4)}, "tp 2: backend_config has tp 4"),
        ({"log_level": "LOUD"}, "log_level 'LOUD': "),
        ({"chat_template_config": "llama2"}, "chat_template_config 'llama2': "),
        ({"model_name": "a", "backend_config": PytorchConfig("b")}, "model_name 'a': .* model_name 'b'"),
        ({"vision_config": {}}, "pipeline.vision_config {}: "),
        ({"vision_config": VisionConfig(0)}, "VisionConfig.max_batch_size 0: "),
        ({"model_name": 5}, "model_name 5: "),
        ({"arguments": "--kv-hmac"}, "arguments '--kv-hmac': "),
        ({"session_length": 5}, "pipeline: session_length is unknown"),
        ({"speculative_config": 5}, "speculative_config 5: expected a dict"),
        ({"speculative_config": {"method": "eagle"}}, "speculative_config: method 'eagle': only EAGLE-3 heads are"),
        ({"backend_confg": None}, "pipeline: backend_confg is unknown; did you mean backend_config?"),
    ],
)
def test_what_pipeline_cannot_do_is_refused_by_name(make: Make, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


def test_what_has_no_effect_is_told_in_one_warning(make: Make) -> None:
    told = r"without effect here: max_log_len=5 .*prefill_interval=8.*arguments=\['--kv-hmac'\]"
    with pytest.warns(UserWarning, match=told) as caught:
        make(max_log_len=5, backend_config=PytorchConfig(prefill_interval=8), arguments=["--kv-hmac"])
    assert len(caught) == 1


def test_what_the_engine_refuses_is_called_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(config: OfflineConfig) -> PlaybackOffline:
        raise ConfigError(f"{called('device')} cuda: not here; use {called('device')} cpu, {called('max_model_len')} 9")

    monkeypatch.setattr(pipeline_setup, "OfflineService", offline)
    with pytest.raises(ConfigError, match=r"^device_type cuda: not here; use device_type cpu, session_len 9$"):
        pipeline("/models/x")


def test_templates_of_a_folder_and_of_a_model_name(make: Make) -> None:
    with pytest.warns(UserWarning, match="the model folder has no chat template"):
        engine, offline = make(has_template=False)
    engine("hi")
    assert offline.prompts == ["hi"]
    with pytest.raises(RequestError, match="a conversation needs a chat template, but there is none"):
        engine([{"role": "user", "content": "hi"}])
    engine, offline = make(model_name="internlm-chat-7b", chat_template_config=ChatTemplateConfig(meta_instruction="s"))
    engine("hi")
    assert offline.prompts == ["<|System|>:s\n<|User|>:hi\n<|Bot|>:"]


def test_drafting_is_configured_as_in_vllm_or_by_lmdeploys_own_class(make: Make) -> None:
    @dataclasses.dataclass
    class Theirs:
        method: str
        model: str | None = None
        num_speculative_tokens: int = 1

    for given, drafts in ((Theirs("ngram"), 1), ({"method": "ngram", "num_speculative_tokens": 4}, 4)):
        _, offline = make(speculative_config=given)
        assert offline.config.engine.speculation == Speculation(methods=("ngram",), num_speculative_tokens=drafts)


def test_which_model_is_served_and_how_it_is_read(make: Make) -> None:
    """Arguments behave as in `LLM`; a field of the engine configuration takes precedence over the same override."""
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
