"""Parses a request's body: JSON, refused fields, conflicting fields."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Collection
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ValidationError

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest, ChatFields
from pd_cluster.service.schema.completion_protocol import (
    CHAT_ONLY,
    ELSEWHERE,
    HARMLESS,
    MIN_TEMPERATURE,
    NOT_YET,
    SGLANGS,
    GenerateRequest,
    GenerationRequest,
)
from pd_cluster.service.schema.json_body import decoded
from pd_cluster.service.schema.lax_numbers import with_numbers
from pd_cluster.types import Sampling, ShapesDraws

log = logging.getLogger(__name__)

MAX_FIELDS = 1024  # the most fields of a request, including unknown fields, which are kept
_NEUTRAL = {  # the values that beam search, which does not sample, accepts for sampling fields
    name: mark.neutral
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if isinstance(mark, ShapesDraws)
}
_logged_fields: set[str] = set()
HANDLE = "kv_transfer_params"  # refused by routes that do not honour it
OFFSETS = "return_token_offsets"  # refused by routes that do not honour it

CHECKED = frozenset(
    {*NOT_YET, *ELSEWHERE, *SGLANGS, *CHAT_ONLY, *HARMLESS}
)  # names that are not logged as unknown: their accepted values have no effect
_NOT_YET_BUT_HANDLES = {name: neutral for name, neutral in NOT_YET.items() if name != HANDLE}

RequestT = TypeVar("RequestT", bound=BaseModel)


def parse(
    body: bytes,
    kind: type[RequestT],
    has_own_names: bool = False,
    takes: Collection[str] = (),
    vocab_size: int | None = None,
) -> RequestT:
    """Parses a body. Raises RequestError that names the field.

    `has_own_names`: the fields are another API's, so this API's names have no meaning. `takes`: which of HANDLE and
    OFFSETS the route honours. `vocab_size`: larger ids are refused together with invalid ones.
    """
    return checked(decoded(body), kind, has_own_names, takes, vocab_size)


def checked(
    data: Any,
    kind: type[RequestT],
    has_own_names: bool = False,
    takes: Collection[str] = (),
    vocab_size: int | None = None,
) -> RequestT:
    """Validates a decoded body."""
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    if len(data) > MAX_FIELDS:
        raise RequestError(f"the body has {len(data)} fields; at most {MAX_FIELDS} are allowed")
    if not has_own_names:
        _refuse(data, _NOT_YET_BUT_HANDLES if HANDLE in takes else NOT_YET, "is not supported yet by this server")
        for name in [each for each in data if each in SGLANGS]:
            neutral, way_out = SGLANGS[name]
            _refuse(data, {name: neutral}, f"is not a parameter here; {way_out}")
        own = {*kind.model_fields} - {OFFSETS} | {*takes}
        for name in [each for each in data if each in ELSEWHERE and each not in own]:
            neutral, way_out = ELSEWHERE[name]
            _refuse(data, {name: neutral}, way_out)
        if not issubclass(kind, ChatFields):
            others = {name: neutral for name, neutral in CHAT_ONLY.items() if name not in kind.model_fields}
            _refuse(data, others, "is for chats; use /v1/chat/completions")
    try:
        request = kind.model_validate(with_numbers(data, kind))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = [reprlib.repr(part)[1:-1] if isinstance(part, str) else str(part) for part in first["loc"]]
        value = first["input"]
        shown = f"{reprlib.repr(value)}: " if value is None or isinstance(value, bool | int | float | str) else ""
        raise RequestError(f"{'.'.join(place)}: {shown}{first['msg']}", param=place[0] if place else None) from None
    if isinstance(request, GenerationRequest):
        _check_together(request, vocab_size)
    _log_unknown(request, HARMLESS if has_own_names else CHECKED)
    return request


def _refuse(data: dict[str, Any], names: dict[str, tuple[Any, ...]], why: str) -> None:
    """Raises RequestError if one of these parameters asks for something."""
    for name, neutral in names.items() if not names.keys().isdisjoint(data) else ():
        value = data.get(name)
        if value is not None and not any(value == n and type(value) in _kin(n) for n in neutral):
            raise RequestError(f"{name}: {reprlib.repr(value)} {why}", param=name)


def _check_together(request: GenerationRequest, vocab_size: int | None) -> None:
    """Raises RequestError for fields that conflict with each other."""
    request.check_biases(vocab_size)
    _ = request.stops, request.asked
    n, best_of = request.num_choices, request.num_sequences
    if best_of < n:
        raise RequestError(f"best_of: {best_of} is less than n, {n}; give at least n, or leave it out", param="best_of")
    _check_beams(request)
    if request.stream and best_of > n and not request.beam_width:
        raise RequestError(
            f"best_of: {best_of} with n {n} cannot be streamed, because the best are known only at the end; "
            f"leave out stream or best_of",
            param="best_of",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs: {request.prompt_logprobs} is not available with stream; leave out one of the two",
            param="prompt_logprobs",
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options: only with stream: true; leave it out", param="stream_options")
    if isinstance(request, GenerateRequest) and request.stream_options is not None:
        raise RequestError(
            "stream_options: this API reports no usage; leave it out, or use a server with USE_OPENAI=1",
            param="stream_options",
        )
    if request.truncate_prompt_tokens == 0:
        raise RequestError(
            "truncate_prompt_tokens: 0 would leave no prompt; give how many of the last tokens to keep, or -1 for as "
            "many as fit",
            param="truncate_prompt_tokens",
        )
    _check_top_logprobs(request)
    _check_named_logprobs(request)


def _check_beams(request: GenerationRequest) -> None:
    """Refuses values that conflict with beam search, and values that need it."""
    if not request.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if (value := getattr(request, name)) not in (None, neutral):
                raise RequestError(f"{name}: {value} has no effect without use_beam_search: true", param=name)
        return
    if (asked := request.asked) is not None:
        raise RequestError(
            f"{asked.field}: a beam search cannot follow a guide; leave out one of the two",
            param=asked.field.partition(".")[0],
        )
    if isinstance(request, ChatCompletionRequest) and request.thinking_token_budget is not None:
        raise RequestError(
            f"thinking_token_budget: {request.thinking_token_budget}: a beam search cannot follow it; leave one out",
            param="thinking_token_budget",
        )
    if request.beam_width < 2:
        name = "best_of" if request.best_of is not None else "n" if request.n is not None else "use_beam_search"
        value = True if name == "use_beam_search" else request.beam_width
        raise RequestError(f"{name}: {value} needs n or best_of of at least 2 for a beam search", param=name)
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        is_greedy = name == "temperature" and value is not None and value < MIN_TEMPERATURE
        if value not in (None, neutral) and not is_greedy:
            raise RequestError(
                f"{name}: {value} is not for beam search, which does not sample; give {neutral:g}, or leave it out",
                param=name,
            )


def _check_top_logprobs(request: GenerationRequest) -> None:
    """Checks `logprobs`: in chats it is a switch for `top_logprobs`, elsewhere the number of logprobs."""
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise RequestError(f"top_logprobs: {request.top_logprobs} needs logprobs: true", param="top_logprobs")
    elif top := (request.model_extra or {}).get("top_logprobs"):
        raise RequestError(
            f"top_logprobs: {reprlib.repr(top)} is for chats; here use logprobs: N", param="top_logprobs"
        )


def _check_named_logprobs(request: GenerationRequest) -> None:
    """Refuses logprobs of named tokens if the answer cannot have them. Raises RequestError."""
    name = "logprob_token_ids"
    if not request.logprob_token_ids:
        return
    if request.num_logprobs is None:
        needed = "logprobs: true" if isinstance(request, ChatCompletionRequest) else "logprobs"
        raise RequestError(f"{name}: needs {needed}", param=name)
    if request.beam_width:
        raise RequestError(f"{name}: not for a beam search; leave out one of the two", param=name)
    if request.max_tokens == 0:
        raise RequestError(f"{name}: with max_tokens 0 no output token has logprobs; give prompt_logprobs", name)


def _kin(value: Any) -> tuple[type, ...]:
    """Returns the types whose values may equal this one: JSON may write 0.0 as 0, but True does not equal 1."""
    return (int, float) if isinstance(value, int | float) and not isinstance(value, bool) else (type(value),)


def _log_unknown(request: BaseModel, known: Collection[str]) -> None:
    for name in request.model_extra or {}:
        if name not in known and name not in _logged_fields and len(_logged_fields) < 1000:
            _logged_fields.add(name)
            log.warning("request field %r is unknown and has no effect", name[:80])
