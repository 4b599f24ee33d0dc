"""Sampling parameters in vLLM's and FastDeploy's form, and their conversion to the API's fields.

Does not check values; the code that checks HTTP requests checks these, too.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict

import msgspec

from pd_cluster.errors import RequestError

# vLLM's and FastDeploy's names that the API does not have -> the reason for refusal
NOT_HERE = {"reasoning_max_tokens": "reasoning is not counted separately; use max_tokens"}
HALF = "half a character (a lone surrogate), which is not valid text"
GUIDES = ("json", "regex", "choice", "grammar")


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """vLLM's parameters of guided output. `json`: a schema (a dict, a string, or a pydantic model)."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields under the API's names."""
        found = {f"guided_{name}": getattr(self, name) for name in GUIDES}
        found["guided_decoding_backend"] = self.backend
        found["guided_whitespace_pattern"] = self.whitespace_pattern
        return found | ({"response_format": {"type": "json_object"}} if self.json_object else {})


class LLMGuidedOptions(TypedDict, total=False):
    """TACO-LLM's and vLLM's former parameters of guided output, for `guided_options_request`; at most one is set."""

    guided_json: Any
    guided_regex: str
    guided_choice: list[str]
    guided_grammar: str
    guided_json_object: bool
    guided_decoding_backend: str
    guided_whitespace_pattern: str


@dataclass(slots=True)
class GuidedDecodingRequest:
    """LLMGuidedOptions as an object. If more than one guide is set, its use raises RequestError."""

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """GuidedDecodingParams under vLLM's current name."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class RequestOutputKind(Enum):
    """The content of each output of a stream: everything so far, the new part, or everything at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """vLLM's and FastDeploy's parameters. The defaults are the same as over HTTP: the model's own, or none.

    `max_tokens` counts output tokens, as in vLLM and the API; with `max_tokens_includes_prompt=True` it also counts the
    prompt, as in FastDeploy's documentation. In both cases the context (`max_model_len`) limits an answer, and a larger
    number is not an error. The default is 16 for `generate` and as many as fit the context for `chat`, as over HTTP;
    None: as many as fit, for both.

    `output_kind` applies to AsyncLLMEngine's outputs; `LLM` returns whole outputs.

    A value is checked when it is used, before any work; a wrong value raises RequestError with the parameter's name.
    """

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens_includes_prompt: bool = False
    min_tokens: int | None = None
    reasoning_max_tokens: int | None = None
    thinking_token_budget: int | None = None
    logprobs: int | None = None  # the number of most likely tokens to return with each token
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # return the logprobs of these tokens, not of the most likely
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: list[Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    guided_decoding: GuidedDecodingParams | dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None  # for the classes of LLM(logits_processors=[...])
    prediction: str | dict[str, Any] | None = None  # the expected text of the answer, or OpenAI's object
    speculative: bool | None = None  # False: no drafts
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a completion request. Raises RequestError for values that a request cannot have."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del given["max_tokens_includes_prompt"], given["output_kind"]
        guided = given.pop("guided_decoding")
        if guided is not None:
            given |= guided_fields("guided_decoding", guided)
        found = {name: value for name, value in given.items() if value is not None and value is not msgspec.UNSET}
        if self.max_tokens is None:
            found["max_tokens"] = None
        for name, why in NOT_HERE.items():
            if name in found:
                raise RequestError(f"{name}: {reprlib.repr(found[name])} is not supported: {why}", param=name)
        if found.get("logprob_token_ids"):
            found.setdefault("logprobs", 0)
        if "extra_args" in found:
            found["vllm_xargs"] = found.pop("extra_args")
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            found["structured_outputs"] = dataclasses.asdict(self.structured_outputs)
        if isinstance(self.prediction, str):
            found["prediction"] = {"type": "content", "content": self.prediction}
        return {name: plain(name, value) for name, value in found.items()}


def guided_fields(name: str, given: Any) -> dict[str, Any]:
    """Returns the API's fields of GuidedDecodingParams, or of vLLM's older mappings and objects with `guided_json` etc.

    Raises RequestError for anything else.
    """
    if isinstance(given, GuidedDecodingParams):
        return given.fields()
    if not isinstance(given, dict):
        given = {key: value for key in OPTIONS if (value := getattr(given, key, None)) is not None}
    known = {field.name for field in dataclasses.fields(GuidedDecodingParams)}
    options = {OPTIONS.get(key, key): value for key, value in given.items()}
    if not options or not known.issuperset(options):
        unknown = [key for key in given if OPTIONS.get(key, key) not in known]
        what = f"{reprlib.repr(unknown[0])} is not known" if unknown else "is empty"
        raise RequestError(f"{name}: {what}; known are {', '.join(sorted(known))}", param=name)
    return {key: value for key, value in GuidedDecodingParams(**options).fields().items() if value is not None}


OPTIONS = {f"guided_{name}": name for name in (*GUIDES, "json_object", "whitespace_pattern")} | {
    "guided_decoding_backend": "backend"
}


def plain(name: str, value: Any) -> Any:
    """Returns the value as decoded JSON: lists for tuples and arrays, strings for keys. Raises RequestError."""
    if name == "logits_processors":  # no list of them is accepted, so there is nothing to convert
        return value
    try:
        return _plain(value)
    except UnicodeEncodeError:
        raise RequestError(f"{name}: {reprlib.repr(value)}: {HALF}", param=name) from None
    except (TypeError, RecursionError):
        raise RequestError(f"{name}: {reprlib.repr(value)} is not a value that JSON can express", param=name) from None


def is_text(given: str) -> bool:
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Converts a value, including numpy's and torch's numbers and arrays, and pydantic models to their schemas.

    Raises TypeError, and UnicodeEncodeError for lone surrogates.
    """
    if isinstance(value, str):
        value.encode()
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError
