"""All settings of `pd-cluster serve`, and their given values.

Knows nothing of rank tables and starts nothing. Settings that only one role has are read and checked by processes
of this role, when they need them.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.parsers.parser_plugin import formats_of
from pd_cluster.parsers.reply_format import check_markers, check_names
from pd_cluster.settings.engine_config import EngineConfig, RopeSettings
from pd_cluster.settings.file_settings import KeptFiles
from pd_cluster.settings.http_settings import KEY_VARIABLE, HttpConfig, Tls
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.settings.media_settings import MediaSettings
from pd_cluster.settings.process_settings import HandoverSettings, JoinSettings, KeyFiles, KVSettings, ProcessSettings
from pd_cluster.settings.request_log_settings import RequestLogSettings
from pd_cluster.settings.request_settings import GUIDED_BACKENDS, Assurances, ChatConfig, RequestSettings
from pd_cluster.settings.response_settings import KeptResponses
from pd_cluster.settings.resume_settings import ResumeSettings
from pd_cluster.settings.routing_settings import AdminSettings, AdmissionSettings, ConnectionLimits, RoutingConfig
from pd_cluster.settings.setting import DeclaredSetting, Panel, declared, one_of, read
from pd_cluster.settings.speculation_flags import SpeculationFlags
from pd_cluster.settings.timeouts import Timeouts

T = TypeVar("T", bound=msgspec.Struct)

# In the order of the help screen, unless a setting's `after` overrides it.
GROUPS: tuple[type[msgspec.Struct], ...] = (
    *(
        EngineConfig,
        AdapterSettings,
        RopeSettings,
        SpeculationFlags,
        ProcessSettings,
        KeyFiles,
        JoinSettings,
        HandoverSettings,
        KVSettings,
    ),
    AdmissionSettings,
    *(ConnectionLimits, RoutingConfig, AdminSettings, RequestSettings, Assurances, ChatConfig, MediaSettings),
    ResumeSettings,
    *(HttpConfig, Tls),
    KeptResponses,
    KeptFiles,
    RequestLogSettings,
    Timeouts,
)


# Settings that most deployments need, which `serve --help` shows; --help-all shows all.
USUAL = frozenset(
    {
        *("model", "host", "port", "served_model_name", "role", "join", "device", "tensor_parallel_size"),
        *("max_model_len", "max_num_seqs", "dtype", "quantization", "gpu_memory_utilization", "kv_transport"),
        *("api_key", "api_key_file", "ssl_certfile", "tool_call_parser", "reasoning_parser", "enable_lora"),
        *("lora_modules", "slo_ttft"),
    }
)


@functools.cache
def settings() -> Mapping[str, DeclaredSetting]:
    """Returns every setting by its name, in the order of the help screen."""
    found = [each for panel in Panel for each in _of_panel(panel)]
    return {each.name: each for each in found}


def _of_panel(panel: Panel) -> list[DeclaredSetting]:
    here = [each for group in GROUPS for each in declared(group) if each.setting.panel is panel]
    placed = [each for each in here if not each.setting.after]
    waiting = [each for each in here if each.setting.after]
    while waiting:
        names = [each.name for each in placed]
        each = next(each for each in waiting if each.setting.after in names)
        placed.insert(names.index(each.setting.after) + 1, each)
        waiting.remove(each)
    return placed


# The variables that hold keys. Keys must not be on a command line, because any user of the host can read it.
SECRET_VARIABLES = tuple(
    variable for each in settings().values() if each.setting.is_secret for variable in each.variables
)


def without_keys(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without keys, for processes that check no keys: all except those at the public port."""
    return {name: value for name, value in env.items() if name not in SECRET_VARIABLES}


class ServeOptions(Mapping[str, Any]):
    """The given value of each setting, as written, or its default."""

    def __init__(self, **given: Any) -> None:
        """Raises ConfigError for an unknown setting."""
        if unknown := given.keys() - settings().keys():
            raise ConfigError(f"{called(min(unknown))}: no such setting")
        self._given = {name: given.get(name, each.default) for name, each in settings().items()}

    @classmethod
    def typed(cls, given: Mapping[str, Any]) -> ServeOptions:
        """Reads values that were not parsed from a command line. Raises ConfigError for a value of the wrong type."""
        return cls(**{name: _typed(settings()[name], value) for name, value in given.items()})

    @classmethod
    def written(cls, given: Mapping[str, str]) -> ServeOptions:
        """Reads values of environment variables, as typer does. Raises ConfigError for a value of the wrong type."""
        return cls(**{name: _of_text(settings()[name], text) for name, text in given.items()})

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __repr__(self) -> str:
        """Shows the given values, without secrets."""
        hidden = {name for name, each in settings().items() if each.setting.is_secret}
        shown = (f"{name}={value!r}" for name, value in self.items() if value != settings()[name].default)
        return f"ServeOptions({', '.join(each for each in shown if each.partition('=')[0] not in hidden)})"

    def read(self, group: type[T], **own: Any) -> T:
        """Returns the group's struct; `own` sets fields that are not settings, or overrides settings. Raises
        ConfigError.
        """
        return read(group, self, **own)

    def check(self) -> None:
        """Checks every value, for all roles, except those that depend on this host's files. Raises ConfigError."""
        for group in GROUPS:
            if group is not EngineConfig and group is not Tls:
                self.read(group)
        self.engine()
        self.timeouts()
        self.read(Tls).checked()
        self.read(RequestLogSettings).checked()
        self.chat(has_files=False)

    def engine(self) -> EngineConfig:
        """Raises ConfigError."""
        overrides = settings()["hf_overrides"].read(self["hf_overrides"])
        rope, adapters = self.read(RopeSettings), self.read(AdapterSettings)
        drafting = self.read(SpeculationFlags)
        return self.read(
            EngineConfig,
            hf_overrides=rope.into(overrides),
            adapters=adapters,
            speculation=drafting.into(settings()["speculative_config"].read(self["speculative_config"])),
        )

    def remarks(self) -> list[str]:
        """Returns warnings about given values that have no effect. Raises ConfigError."""
        return self.read(SpeculationFlags).remarks()

    def routing(self, policies: Collection[str]) -> RoutingConfig:
        """`policies`: the names of the router's policies.

        A name with a colon is an operator's own policy, which the router finds. Raises ConfigError.
        """
        if ":" not in self["routing_policy"]:
            self._check_choice("routing_policy", policies)
        return self.read(RoutingConfig)

    def handover(self, transports: Collection[str]) -> HandoverSettings:
        """`transports`: the names of the available transports. Raises ConfigError."""
        self._check_choice("kv_transport", transports)
        return self.read(HandoverSettings)

    def _check_choice(self, name: str, known: Collection[str]) -> None:
        rule = one_of(tuple(known))
        if not rule.accepts(self[name]):
            raise ConfigError(f"{called(name)} {self[name]!r}: {rule.says}")

    def timeouts(self) -> Timeouts:
        """Raises ConfigError."""
        times = self.read(Timeouts)
        times.check_death()
        return times

    def http(self, env: Mapping[str, str]) -> HttpConfig:
        """Uses VLLM_API_KEY where no API key is given. Raises ConfigError, which never contains a key."""
        variable = [env[KEY_VARIABLE]] if KEY_VARIABLE in env else []
        source, keys = (called("api_key"), self["api_key"]) if self["api_key"] else (KEY_VARIABLE, variable)
        given = self.read(
            HttpConfig,
            connections=self.read(ConnectionLimits),
            tls=self.read(Tls).checked(),
            responses=self.read(KeptResponses),
            files=self.read(KeptFiles),
            log=self.read(RequestLogSettings).checked(),
        )
        return given.with_tenants(source, keys, has_origins=self["allowed_origins"] is not None)

    def chat(self, has_files: bool = True) -> ChatConfig:
        """Leaves the template as it was given; text/template_source.py reads it. Raises ConfigError.

        `has_files`: whether the file of --tool-parser-plugin is on this host; its formats may have any name.
        """
        chat, assurances = self.read(ChatConfig), self.read(Assurances)
        structured = self.read(RequestSettings).structured_outputs
        if not (rule := one_of(GUIDED_BACKENDS)).accepts(structured.backend):
            raise ConfigError(f"{called('structured_outputs_config')}: backend {structured.backend!r}: {rule.says}")
        others = {
            "structured_outputs_config": structured.reasoning_parser,
            "reasoning_config": assurances.reasoning.reasoning_parser,
        }
        for name, parser in others.items():
            if parser and chat.reasoning_parser not in ("", parser):
                both = f"{called('reasoning_parser')} {chat.reasoning_parser}"
                raise ConfigError(
                    f"{called(name)}: reasoning_parser {parser!r} differs from {both}; give only one of them"
                )
            chat = msgspec.structs.replace(chat, reasoning_parser=parser or chat.reasoning_parser)
        assurances.check_parsers(chat)
        if chat.tool_parser_plugin and not has_files:
            return chat
        formats = formats_of(chat.tool_parser_plugin)
        check_names(chat.tool_parser, chat.reasoning_parser, formats)
        reasoning = assurances.reasoning
        check_markers(chat.reasoning_parser, reasoning.reasoning_start_str, reasoning.reasoning_end_str)
        return chat


def _of_text(each: DeclaredSetting, text: str) -> Any:
    """Returns a value from a variable's text, in which spaces separate several values."""
    is_list = any(get_origin(kind) is list for kind in (each.kind, *get_args(each.kind)))
    return _typed(each, text.split() if is_list else text, strict=False)


def _typed(each: DeclaredSetting, value: Any, strict: bool = True) -> Any:
    try:
        return msgspec.convert(value, each.kind, strict=strict)
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at `$")[0]
        raise ConfigError(f"{called(each.name)} {reprlib.repr(value)}: {what[:1].lower()}{what[1:]}") from None
