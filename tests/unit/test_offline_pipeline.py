"""LMDeploy's calls over an engine that plays back its answer: batches and streams."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.messages import GenerationConfig
from pd_cluster.turbomind import EngineConfig as TurbomindConfig
from tests.support.checkpoints import EOS_ID
from tests.support.lmdeploy_engine import ANSWER, Make, engines, turn

TALK = [{"role": "user", "content": "hi"}]


make = pytest.fixture(engines)


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


def test_a_call_without_gen_config_has_its_own_defaults(make: Make) -> None:
    engine, offline = make()
    turn(engine, "hi", 1)
    for call in (engine, engine.batch_infer, engine.stream_infer):
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
        with pytest.warns(FutureWarning, match=f"{option}: will go away; use gen_config") as caught:
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
    for given in ("vicuna", {}):
        with pytest.raises(ConfigError, match=r"^chat_template_config .*: expected a ChatTemplateConfig"):
            engine("hi", chat_template_config=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Call: request_output_length is unknown; did you mean request_output_len"):
        engine("hi", request_output_length=3)
    assert offline.prompts == []
