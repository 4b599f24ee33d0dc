"""Settings for reading requests and writing answers: names, logprobs, sampling defaults, chats."""

from __future__ import annotations

import reprlib
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.parsers.format_table import FORMATS, THINKING
from pd_cluster.settings.model_names import fault_of_name
from pd_cluster.settings.sampling_override import OVERRIDE
from pd_cluster.settings.setting import OBJECT, TEXTS, Check, Form, Panel, Scope, Setting, at_least, finite, one_of

# Names that vLLM accepts; llguidance is used for all of them.
GUIDED_BACKENDS = ("auto", "guidance", "llguidance", "outlines", "lm-format-enforcer", "xgrammar")
BY_MODEL = "auto: by the chat template and model_type"
# Request fields that are also variables of chat templates, and must not be given twice.
OWN_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents")

TEXT = partial(Setting, panel=Panel.REQUESTS, scope=Scope.TEXT)
SERVER = partial(Setting, panel=Panel.REQUESTS, scope=Scope.SERVER)


ContentFormat = Literal["auto", "string", "openai"]
DraftMetrics = Literal["none", "summary", "detailed"]


def _names(name: str, written: list[str]) -> list[str]:
    for each in written:
        if fault := fault_of_name(each):
            raise ConfigError(f"{called(name)} {reprlib.repr(each)}: {fault}")
    return list(written)


NAMES = Form(TEXTS.kind, _names, TEXTS.write)


def _template_kwargs(name: str, written: str) -> dict[str, Any]:
    found: dict[str, Any] = OBJECT.read(name, written)
    for each in (each for each in OWN_VARIABLES if each in found):
        raise ConfigError(f"{called(name)}: {each}: is a field of requests; leave it out here")
    return found


TEMPLATE_KWARGS = OBJECT._replace(read=_template_kwargs)


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of guided output. `disable_any_whitespace`: guided JSON has no whitespace between its parts."""

    backend: str = "auto"
    disable_fallback: bool = False  # no effect: there is one library
    disable_any_whitespace: bool = False
    reasoning_parser: str = ""


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of reasoning.

    The parser determines the delimiters; the delimiters given here must be among them.
    """

    reasoning_parser: str = ""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""


PoolingType = Literal["LAST", "MEAN"]


class PoolerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of vectors, which override the model folder's. `use_activation`: scales vectors to length 1."""

    task: Literal["embed", "classify"] | None = None  # the model determines it
    pooling_type: PoolingType | None = None
    seq_pooling_type: PoolingType | None = None
    use_activation: bool | None = None

    @property
    def kind(self) -> PoolingType | None:
        return self.seq_pooling_type or self.pooling_type


T = TypeVar("T", bound=msgspec.Struct)


def _object_of(kind: type[T]) -> Form:
    """Returns the form of a JSON object with the struct's fields."""

    def read(name: str, written: str) -> T:
        try:
            return msgspec.convert(OBJECT.read(name, written), kind)
        except msgspec.ValidationError as error:
            known = ", ".join(kind.__struct_fields__)
            what = str(error).partition(" - at `$")[0]
            raise ConfigError(f"{called(name)}: {what[:1].lower()}{what[1:]}; known are {known}") from None

    return Form(str, read, lambda value: msgspec.json.encode(value).decode() if value != kind() else "{}", True)


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The common settings of answers. `sampling_override` takes precedence over the model's generation config."""

    served_model_names: Annotated[
        list[str],
        Setting(
            "Names of the model for clients; default: the last part of its path. The path itself is always accepted.",
            Panel.BASIC,
            Scope.SERVER,
            name="served_model_name",
            form=NAMES,
            is_several=True,
            after="port",
        ),
    ] = []
    prefix_retention_s: Annotated[
        float,
        TEXT(
            "Maximum seconds for which prompt_cache_retention and cache_control may retain cached prompts. 0: none.",
            name="prefix_retention",
            checks=(at_least(0), finite("must be a number of seconds, or 0")),
        ),
    ] = 0.0
    max_logprobs: Annotated[
        int,
        TEXT(
            "Maximum number of logprobs per token; -1: the whole vocabulary.",
            checks=(at_least(-1),),
        ),
    ] = 20
    sampling_override: Annotated[
        dict[str, int | float | None],
        TEXT(
            "JSON object that overrides the defaults of temperature, top_p, top_k, min_p, repetition_penalty, "
            "max_new_tokens.",
            name="override_generation_config",
            form=OVERRIDE,
        ),
    ] = {}
    requires_model: Annotated[
        bool,
        SERVER(
            "Refuse requests that do not name a model.",
            name="require_model",
            has_off=True,
        ),
    ] = False
    returns_tokens_as_token_ids: Annotated[
        bool,
        SERVER(
            "By default, show the tokens in logprobs as token_id:5.",
            name="return_tokens_as_token_ids",
        ),
    ] = False
    forces_usage: Annotated[
        bool,
        SERVER(
            "Give usage in every chunk of a stream.",
            name="enable_force_include_usage",
        ),
    ] = False
    tells_request_metrics: Annotated[
        bool,
        SERVER(
            "Return the times of tokens in every answer, as include_metrics does for one answer.",
            name="enable_per_request_metrics",
        ),
    ] = False
    pooler: Annotated[
        PoolerConfig,
        TEXT(
            "JSON object with pooling_type (LAST or MEAN) and use_activation; overrides the model's own values.",
            name="pooler_config",
            form=_object_of(PoolerConfig),
        ),
    ] = PoolerConfig()
    shows_tokenizer: Annotated[
        bool,
        SERVER(
            "Serve the tokenizer's configuration and the chat template at /tokenizer_info.",
            name="enable_tokenizer_info_endpoint",
        ),
    ] = False
    structured_outputs: Annotated[
        StructuredOutputs,
        TEXT(
            "vLLM's JSON object with backend, disable_any_whitespace, disable_fallback and reasoning_parser.",
            name="structured_outputs_config",
            form=_object_of(StructuredOutputs),
        ),
    ] = StructuredOutputs()
    stream_interval: Annotated[
        int,
        SERVER(
            "Number of tokens in each chunk of a stream after the first.",
            checks=(at_least(1),),
        ),
    ] = 1
    spec_decode_metrics: Annotated[
        DraftMetrics,
        SERVER(
            "Report counts of drafted tokens in answers: none, summary or detailed.",
            name="per_request_spec_decode_metrics",
        ),
    ] = "none"


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a chat becomes a prompt, and a model's text becomes a message.

    `template`: a source that replaces the model folder's template; "": not replaced. Parsers have the names of
    parsers/reply_format.py; without a name, answers are not parsed for calls or reasoning. `template_kwargs`: default
    variables of the template. `allows_control_tokens`: the text of a control token in a message becomes that token.
    """

    template: Annotated[
        str,
        TEXT("File of a chat template, or the template's text; default: the model folder's.", name="chat_template"),
    ] = ""
    template_kwargs: Annotated[
        dict[str, Any],
        TEXT(
            "JSON object of default variables for the chat template, such as enable_thinking.",
            name="default_chat_template_kwargs",
            form=TEMPLATE_KWARGS,
        ),
    ] = {}
    content_format: Annotated[
        ContentFormat,
        TEXT(
            "Form of a message's content in templates: string (auto), or openai, a list of text parts.",
            name="chat_template_content_format",
        ),
    ] = "auto"
    trusts_request_templates: Annotated[
        bool, SERVER("Let requests contain a chat template.", name="trust_request_chat_template")
    ] = False
    allows_control_tokens: Annotated[
        bool,
        TEXT(
            "Let the text of a control token, such as <|im_start|>, become that token in chat messages.",
            name="allow_control_tokens",
        ),
    ] = False
    response_role: Annotated[
        str,
        TEXT(
            "The role in a chat's answers.",
            checks=(Check(str.strip, "must not be empty; leave it out for assistant"),),
        ),
    ] = "assistant"
    tool_parser: Annotated[
        str,
        TEXT(
            f"Format in which the model writes tool calls: {', '.join(sorted(FORMATS))}; {BY_MODEL}.",
            name="tool_call_parser",
        ),
    ] = ""
    excludes_barred_tools: Annotated[
        bool,
        TEXT(
            "Leave tools out of the prompt if tool_choice is none.",
            name="exclude_tools_when_tool_choice_none",
            has_off=True,
        ),
    ] = False
    tool_parser_plugin: Annotated[
        str,
        TEXT("Python file whose FORMATS adds names to --tool-call-parser; its code runs in the server."),
    ] = ""
    reasoning_parser: Annotated[
        str, TEXT(f"Format in which the model delimits its reasoning: {', '.join(sorted(THINKING))}; {BY_MODEL}.")
    ] = ""


class Assurances(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's settings for behaviour that is always on, or that another setting controls."""

    guided_decoding_backend: Annotated[
        str,
        TEXT(
            "auto, or one of vLLM's names; llguidance is always used.",
            checks=(one_of(GUIDED_BACKENDS),),
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool,
        TEXT("Accepted with --tool-call-parser, which already enables tool_choice auto.", after="tool_call_parser"),
    ] = False
    enable_reasoning: Annotated[
        bool,
        TEXT("Accepted with --reasoning-parser, which already has this effect.", after="reasoning_parser"),
    ] = False

    reasoning: Annotated[
        ReasoningConfig,
        TEXT(
            "vLLM's JSON object with reasoning_parser, and the parser's own reasoning_start_str and reasoning_end_str.",
            name="reasoning_config",
            form=_object_of(ReasoningConfig),
            after="reasoning_parser",
        ),
    ] = ReasoningConfig()

    def check_parsers(self, chat: ChatConfig) -> None:
        """Raises ConfigError if a setting is given without the parser that it needs."""
        for switch, is_on, needed, parser in (
            ("enable_auto_tool_choice", self.enable_auto_tool_choice, "tool_call_parser", chat.tool_parser),
            ("enable_reasoning", self.enable_reasoning, "reasoning_parser", chat.reasoning_parser),
        ):
            if is_on and not parser:
                why = "which determines the format of the model's answers"
                raise ConfigError(f"{called(switch)}: needs {called(needed)} NAME, {why}")
