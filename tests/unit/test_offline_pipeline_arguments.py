"""What LMDeploy's `pipeline` takes, what it refuses by name, and what it says to have no effect."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

from pd_cluster.errors import ConfigError, RequestError, called
from pd_cluster.offline.lmdeploy import setup
from pd_cluster.offline.lmdeploy.pipeline import pipeline
from pd_cluster.offline.lmdeploy.templates import ChatTemplateConfig
from pd_cluster.offline.lmdeploy.vision_config import VisionConfig
from pd_cluster.offline.session import OfflineConfig
from pd_cluster.pytorch import EngineConfig as PytorchConfig
from pd_cluster.turbomind import EngineConfig as TurbomindConfig
from tests.support.lmdeploy_engine import Make, engines
from tests.support.playback_offline import PlaybackOffline

make = pytest.fixture(engines)


def test_documented_defaults_of_pipeline(make: Make) -> None:
    """Both documents' orders are signatures of their own, over an implementation with the defaults."""
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


def test_marks_without_a_name_take_the_place_of_those_that_model_name_has(make: Make) -> None:
    engine, offline = make(model_name="internlm-chat-7b", chat_template_config=ChatTemplateConfig(meta_instruction="s"))
    engine("hi")
    assert offline.prompts == ["<|System|>:s\n<|User|>:hi\n<|Bot|>:"]


def test_what_the_engine_refuses_is_called_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(config: OfflineConfig) -> PlaybackOffline:
        raise ConfigError(f"{called('device')} cuda: not here; use {called('device')} cpu, {called('max_model_len')} 9")

    monkeypatch.setattr(setup, "Offline", offline)
    with pytest.raises(ConfigError, match=r"^device_type cuda: not here; use device_type cpu, session_len 9$"):
        pipeline("/models/x")


def test_a_folder_without_a_template_takes_texts_as_they_are(make: Make) -> None:
    with pytest.warns(UserWarning, match="the model folder has no chat template"):
        engine, offline = make(has_template=False)
    engine("hi")
    assert offline.prompts == ["hi"]
    with pytest.raises(RequestError, match="a conversation needs a chat template, and there is none"):
        engine([{"role": "user", "content": "hi"}])


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
