"""Stand-ins for the modules that vLLM's tests import: vLLM's names, implemented by this project's parsers.

A name that is in no table becomes an `Internal`: tests that use it can be collected, but fail.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import char_tokenizer
import messages
import pytest
from class_names import CLASSES, CONSTANTS, DSML, ENGINES
from reply_parser import ReplyParser, arguments_of, parser_class

STAND_INS = ("vllm", "mistral_common", "openai_harmony", "partial_json_parser", "pytest_asyncio", "xgrammar")


class InternalUsed(Exception):
    """A test used an internal name of vLLM's that this project does not implement."""


class _InternalType(type):
    is_collecting = True

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or not _InternalType.is_collecting:
            raise AttributeError(f"{cls.__name__}.{name}")
        return internal(f"{cls.__name__}.{name}")

    def __call__(cls, *given: Any, **settings: Any) -> Any:
        if not _InternalType.is_collecting:
            raise InternalUsed(cls.__name__)
        return super().__call__()


class Internal(metaclass=_InternalType):
    """An internal name of vLLM's. Has any attribute while tests are collected."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _InternalType.is_collecting:
            raise AttributeError(name)
        return internal(name)


def internal(name: str) -> Any:
    return _InternalType(name, (Internal,), {})


def tests_begin() -> None:
    """Makes every later use of an `Internal` an error."""
    _InternalType.is_collecting = False


@dataclasses.dataclass
class EngineConfig:
    """A format's names and markers; replaces the tables of vLLM's parser engine."""

    name: str
    calls: str
    thinking: str
    arg_converter: Any = None
    arg_value_extender: Any = None
    transitions: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def terminal_literals(self) -> set[str]:
        return {mark for mark in parser_class(self.calls, self.thinking)("").markers if len(mark) > 1}

    @property
    def token_id_terminals(self) -> dict[str, str]:
        marks = sorted(self.terminal_literals)
        return {
            "TOOL_END": next((mark for mark in marks if "tool" in mark and ("end" in mark or "/" in mark)), marks[0])
        }

    def terminal_literal(self, name: str) -> str:
        return ""


class ParserEngine(ReplyParser):
    """A parser that takes its formats from a configuration."""

    def __init__(self, tokenizer: Any, tools: Any = None, *others: Any, **settings: Any) -> None:
        config = settings.get("parser_engine_config", self.parser_engine_config)
        self.calls, self.thinking = config.calls, config.thinking
        super().__init__(tokenizer, tools, *others, **settings)

    parser_engine_config: Any = None


class ToolAdapter(ReplyParser):
    pass


class ReasoningAdapter(ReplyParser):
    pass


class DelegatingParser(ReplyParser):
    """A parser for the formats of two classes; either class may be missing."""

    tool_parser_cls: Any = None
    reasoning_parser_cls: Any = None

    def __init__(self, tokenizer: Any, tools: Any = None, *others: Any, **settings: Any) -> None:
        self.calls = getattr(self.tool_parser_cls, "calls", "")
        self.thinking = getattr(self.reasoning_parser_cls, "thinking", "")
        super().__init__(tokenizer, tools, *others, **settings)


def _engines() -> dict[str, Any]:
    """Returns each engine's class, the classes of its two adapters, and the function that makes its configuration."""
    made: dict[str, Any] = {}
    for name, (vllm_name, calls, thinking) in ENGINES.items():
        config = EngineConfig(vllm_name, calls, thinking)
        engine = type(name, (ParserEngine,), {"calls": calls, "thinking": thinking, "parser_engine_config": config})
        own = {"_parser_engine_cls": engine}
        adapters = {
            f"{name}ToolAdapter": parser_class(calls, "", ToolAdapter, own),
            f"{name}ReasoningAdapter": parser_class("", thinking, ReasoningAdapter, own),
        }
        made |= {name: engine, **adapters, f"{vllm_name}_config": functools.partial(_configured, config)}
    return made


def _configured(config: EngineConfig, thinking: bool = True, **more: Any) -> EngineConfig:
    return config if thinking else dataclasses.replace(config, thinking="")


def _gemma_arguments(text: str, partial: bool = False) -> Any:
    return arguments_of("gemma4", "<|tool_call>call:f{", text, "}<tool_call|>")


def _gemma_array(text: str, partial: bool = False) -> Any:
    return _gemma_arguments(f"a:[{text}]")["a"]


def _dsml_arguments(text: str, partial: bool = False) -> str:
    begin, end = f'<{DSML}tool_calls><{DSML}invoke name="f">', f"</{DSML}invoke></{DSML}tool_calls>"
    return json.dumps(arguments_of("deepseek_v4", begin, text, end), ensure_ascii=False)


def _qwen_arguments(text: str, partial: bool = False) -> str:
    return json.dumps(arguments_of("qwen3_coder", "<tool_call><function=f>", text, "</function></tool_call>"))


_required_stream: list[Any] = []


def _required(previous_text: str, current_text: str, *others: Any, **more: Any) -> tuple[Any, bool]:
    """Reads the next text of a reply that must be a JSON array of calls."""
    if not previous_text:
        _required_stream[:] = [ReplyParser(None)]
    request = messages.ChatCompletionRequest(tool_choice="required")
    return _required_stream[0].parse_delta(current_text[len(previous_text) :], (), request), False


def _get_parser(
    tool_parser_name: str | None = None, reasoning_parser_name: str | None = None, *others: Any, **more: Any
) -> type[ReplyParser]:
    return parser_class(tool_parser_name, reasoning_parser_name)


class ParserManager:
    get_parser = staticmethod(_get_parser)
    get_tool_parser = staticmethod(lambda name, *others: parser_class(name))
    get_reasoning_parser = staticmethod(lambda name, *others: parser_class("", name))


def _function_gemma_arguments(parser: Any, text: str) -> Any:
    return arguments_of("functiongemma", "<start_function_call>call:f{", text, "}<end_function_call>")


_ENGINES_MADE = _engines()
parser_class("functiongemma", "", ReplyParser, {"_parse_arguments": _function_gemma_arguments})
ANYWHERE: dict[str, Any] = {  # names that have the same meaning in every module
    **{name: getattr(messages, name) for name in dir(messages) if isinstance(getattr(messages, name), type)},
    **{name: parser_class(*formats) for name, formats in CLASSES.items()},
    **_ENGINES_MADE,
    "ParserEngine": ParserEngine,
    "ParserEngineToolAdapter": ToolAdapter,
    "ParserEngineReasoningAdapter": ReasoningAdapter,
    "DelegatingParser": DelegatingParser,
    "ParserManager": ParserManager,
    "ToolParserManager": ParserManager,
    "ReasoningParserManager": ParserManager,
    "BaseThinkingReasoningParser": parser_class("", "deepseek_r1"),
    "ToolParser": ReplyParser,
    "ReasoningParser": ReplyParser,
    "TokenizerLike": object,
    "VLLMValidationError": ValueError,
    "get_tokenizer": char_tokenizer.from_pretrained,
    "detokenize_incrementally": char_tokenizer.detokenize_incrementally,
    "is_mistral_tokenizer": lambda tokenizer: isinstance(tokenizer, char_tokenizer.MistralTokenizer),
    "MistralTokenizer": char_tokenizer.MistralTokenizer,
    "extract_required_tool_call_streaming": _required,
    "_parse_gemma4_args": _gemma_arguments,
    "_parse_gemma4_array": _gemma_array,
    "_dsml_arg_converter": _dsml_arguments,
    "_qwen3_arg_converter": _qwen_arguments,
    "VLLM_PATH": Path(),
    "fixture": pytest.fixture,
    "ensure_json": lambda text, *others: text,
    "Allow": types.SimpleNamespace(OBJ=1, STR=2),
}


class Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = CONSTANTS.get(self.__name__, {})
        if name in own:
            return own[name]
        return ANYWHERE[name] if name in ANYWHERE else internal(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module under the names of STAND_INS, unless it is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.split(".")[0] in STAND_INS or name == "tests.utils"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = Module(spec.name)
        if spec.name == "vllm.parser.engine.registered_adapters":
            made.__dict__.update(_ENGINES_MADE)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Makes imports find the stand-ins before installed modules."""
    import transformers

    sys.meta_path.insert(0, Finder())
    transformers.AutoTokenizer.from_pretrained = char_tokenizer.from_pretrained  # type: ignore[method-assign]
