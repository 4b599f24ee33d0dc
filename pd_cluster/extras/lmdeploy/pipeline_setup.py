"""Starts an engine from the arguments of `pipeline`. Each ConfigError names the argument."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, NamedTuple

import msgspec

from pd_cluster.errors import ConfigError
from pd_cluster.extras.lmdeploy.argument_checks import count, idle, refuse_unknown, warn
from pd_cluster.extras.lmdeploy.engine_configs import (
    BackendConfig,
    EarlyTurbomindConfig,
    PytorchEngineConfig,
    TurbomindEngineConfig,
    engine_of,
    naming_of,
)
from pd_cluster.extras.lmdeploy.pipeline_vision_config import vision_remarks
from pd_cluster.extras.lmdeploy.prompt_templates import BUILT_IN, ChatTemplateConfig, PromptStyle, way_of
from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.service.preprocessing.request_limits import DEFAULT_MAX_LOGPROBS
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.settings.speculation import Speculation
from pd_cluster.settings.speculative_config import speculation_of

BACKENDS = ("turbomind", "pytorch")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEFAULT_INSTANCE_NUM = 32  # this value means no limit except the batch size
WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_log_len": ((None,), "prompts are never logged"),
    "trust_remote_code": ((False, None), "code from a model folder is never run"),
}
DEFAULT_LEVEL = "ERROR"  # the level of this package's messages; the engine's log keeps its own
OWN = ("prefill", "decode", "arguments", "log_level", "max_logprobs", "allow_control_tokens", "vision_config")
DRAFTING = "speculative_config"
MODELS = ("try_unlisted", "language_model_only", "hf_overrides")  # fields of EngineConfig about reading the model
KNOWN = (
    *("model_path", "model_name", "backend", "backend_config", "chat_template_config", "instance_num", "tp"),
    *(*OWN, *MODELS, DRAFTING, *WITHOUT_EFFECT),
)


class Ready(NamedTuple):
    """`num_at_once`: the maximum number of prompts in progress; others wait."""

    offline: OfflineService
    way: PromptStyle
    backend_config: BackendConfig
    num_at_once: int


@dataclass(frozen=True)
class Setup:
    """The documented arguments of `pipeline`."""

    model_path: str
    model_name: str | None
    backend: str
    backend_config: BackendConfig | None
    chat_template_config: ChatTemplateConfig | None
    instance_num: int
    tp: int

    def open(self, others: dict[str, Any]) -> Ready:
        """Builds the engine. `others`: further keywords. Raises ConfigError."""
        refuse_unknown("pipeline", others, KNOWN)
        config = self._config()
        way = self._asked_way(config)
        num_at_once = count("pipeline", "instance_num", self.instance_num, 1)
        if num_at_once == DEFAULT_INSTANCE_NUM:
            num_at_once = config.max_batch_size
        offline, remarks = self._offline(config, others)
        if way is None:
            way = self._own_way(offline, config, remarks)
        remarks = [*idle(others, WITHOUT_EFFECT), *vision_remarks(others.get("vision_config")), *remarks]
        if remarks:
            warn(f"without effect here: {'; '.join(remarks)}")
        return Ready(offline, way, config, num_at_once)

    def _config(self) -> BackendConfig:
        """Returns the configuration. Either backend takes the other's, too, because there is only one engine."""
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend {reprlib.repr(self.backend)}: expected {' or '.join(BACKENDS)}")
        if not str(self.model_path):
            raise ConfigError("model_path: empty; give a model's folder")
        tp, config = count("pipeline", "tp", self.tp, 1), self.backend_config
        if config is None:
            return TurbomindEngineConfig(tp=tp) if self.backend == "turbomind" else PytorchEngineConfig(tp=tp)
        if not isinstance(config, TurbomindEngineConfig | EarlyTurbomindConfig | PytorchEngineConfig):
            raise ConfigError(
                f"backend_config {reprlib.repr(config)}: expected a TurbomindEngineConfig or a PytorchEngineConfig "
                f"(give backend='pytorch' by its name)"
            )
        if tp not in (1, count(type(config).__name__, "tp", config.tp, 1)):
            raise ConfigError(f"tp {tp}: backend_config has tp {config.tp}; give it only there")
        return config

    def _asked_way(self, config: BackendConfig) -> PromptStyle | None:
        """Returns the requested style of prompts; None: the model folder's own."""
        given, name = self.chat_template_config, self._name(config)
        if given is None:
            return way_of(ChatTemplateConfig(name)) if name.lower() in BUILT_IN else None
        if isinstance(given, ChatTemplateConfig) and given.model_name is None:
            given = replace(given, model_name=name or None)
        return way_of(given)

    def _name(self, config: BackendConfig) -> str:
        names: list[Any] = [name for name in (self.model_name, config.model_name) if name]
        for name in names:
            if not isinstance(name, str):
                raise ConfigError(f"model_name {reprlib.repr(name)}: must be a text")
            if name != names[0]:
                raise ConfigError(
                    f"model_name {reprlib.repr(names[0])}: backend_config has model_name {reprlib.repr(name)}; give one"
                )
        return str(names[0]) if names else ""

    def _own_way(self, offline: OfflineService, config: BackendConfig, remarks: list[str]) -> PromptStyle:
        name = self._name(config)
        if offline.service.tokenizer.template is not None:
            if name:
                remarks.append(f"model_name={name!r} (no chat template of that name is built in; the folder's is used)")
            return PromptStyle()
        warn(
            f"{self.model_path}: the model folder has no chat template, so the model gets texts unchanged; name one "
            f"with model_name, or give a chat_template_config"
        )
        return PromptStyle(is_plain=True)

    def _offline(self, config: BackendConfig, others: dict[str, Any]) -> tuple[OfflineService, list[str]]:
        level = others.get("log_level", DEFAULT_LEVEL)
        if level not in LEVELS:
            raise ConfigError(f"log_level {reprlib.repr(level)}: expected one of {', '.join(LEVELS)}")
        logging.getLogger("pd_cluster" if level != DEFAULT_LEVEL else __package__).setLevel(level)
        arguments = _arguments(others)
        numbers = {name: count("pipeline", name, others.get(name, 0), 0) for name in ("prefill", "decode")}
        size = count(type(config).__name__, "dp", getattr(config, "dp", 1), 1)
        if max(config.tp, size) > 1 and not any(numbers.values()):
            numbers = {"prefill": size, "decode": size}  # several ranks need worker processes
            told = f"dp={size}, tp={config.tp}: {size} prefill and {size} decode instances"
            if size == 1:
                told = f"tp={config.tp}: a prefill and a decode instance"
            warn(f"{told} of {config.tp} ranks each; each instance has all weights")
        try:
            engine, remarks = engine_of(str(self.model_path), config)
            engine = msgspec.structs.replace(_chosen(engine, others), speculation=_speculation(others.get(DRAFTING)))
            settings = OfflineConfig(
                engine=engine,
                chat=ChatConfig(allows_control_tokens=_allows_control_tokens(others)),
                prefill=numbers["prefill"],
                decode=numbers["decode"],
                max_logprobs=count("pipeline", "max_logprobs", others.get("max_logprobs", DEFAULT_MAX_LOGPROBS), 0),
                arguments=(*arguments, f"--log-level={level}") if any(numbers.values()) else (),
            )
            if arguments and not settings.arguments:
                remarks.append(f"arguments={arguments!r} (there are no worker processes)")
            return OfflineService(settings), remarks
        except ConfigError as error:
            raise error.named(naming_of(config)) from None


def _chosen(engine: EngineConfig, others: dict[str, Any]) -> EngineConfig:
    """Applies the call's settings for reading the model. Raises ConfigError."""
    given = {name: others[name] for name in MODELS if others.get(name) is not None}
    if isinstance(given.get("hf_overrides"), dict):
        given["hf_overrides"] = {**given["hf_overrides"], **engine.hf_overrides}
    try:
        return msgspec.convert({**msgspec.to_builtins(engine), **given}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"pipeline: {error}") from None


def _speculation(given: Any) -> Speculation:
    """Reads LMDeploy's own SpeculativeConfig, or a mapping with vLLM's keys. Raises ConfigError."""
    if given is None:
        return Speculation()
    given = asdict(given) if is_dataclass(given) and not isinstance(given, type) else given
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ConfigError(f"{DRAFTING} {reprlib.repr(given)}: expected a dict, such as {{'method': 'ngram'}}")
    return speculation_of(given, lambda key: f"{DRAFTING}: {key}")


def _allows_control_tokens(others: dict[str, Any]) -> bool:
    allows = others.get("allow_control_tokens", False)
    if not isinstance(allows, bool):
        raise ConfigError(f"allow_control_tokens {reprlib.repr(allows)}: expected True or False")
    return allows


def _arguments(others: dict[str, Any]) -> list[str]:
    given = others.get("arguments", ())
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"arguments {reprlib.repr(given)}: expected a list of flags, such as ['--kv-hmac']")
    return list(given)
