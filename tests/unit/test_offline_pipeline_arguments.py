"""What LMDeploy's `pipeline` takes, what it refuses by name, and what it says to have no effect."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
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


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with engines(tmp_path, monkeypatch) as make:
        yield make


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


def test_a_folder_without_a_template_takes_texts_as_they_are(make: Make) -> None:
    with pytest.warns(UserWarning, match="the model folder has no chat template"):
        engine, offline = make(has_template=False)
    engine("hi")
    assert offline.prompts == ["hi"]
    with pytest.raises(RequestError, match="a conversation needs a chat template, and there is none"):
        engine([{"role": "user", "content": "hi"}])


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
