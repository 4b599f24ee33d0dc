"""What clients send and get: OpenAI's chat and completion schemas with vLLM's extra parameters.

A parameter is honoured, or refused with a 400 that names it; one that this version does not know yet is refused
unless it has the value that means "as if not given". Unknown fields are accepted and logged once.
"""

from __future__ import annotations

import logging
import reprlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pd_cluster.errors import RequestError
from pd_cluster.types import SamplingParams

log = logging.getLogger(__name__)

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_CONTAINERS = 50_000  # arrays and objects in a body: millions of them hold the interpreter for seconds
MIN_TEMPERATURE = 1e-5  # below, it is greedy, as in vLLM
INT32_MAX = 2**31 - 1
_logged_fields: set[str] = set()

# Parameters that exist elsewhere and not here yet -> the values that ask for nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "detokenize": (True,),
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "tool_choice": ("none", "auto"),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "reasoning_effort": (),
    "priority": (0,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
}


_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[{'))
FAIL_FAST = Field(fail_fast=True)  # one error is reported; collecting millions holds the interpreter for seconds
TokenIds = Annotated[list[int], FAIL_FAST]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields that chat, completions and /generate share. None means the server's default."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
        | None
    ) = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool = False

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def stops(self) -> list[str]:
        """Stop strings. Raises RequestError for empty ones and too many."""
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
        if "" in stops:
            raise RequestError("stop: an empty string would stop everything", param="stop")
        return stops

    def sampling(self, max_tokens: int, seed: int, defaults: dict[str, Any]) -> SamplingParams:
        """`defaults` come from the model's generation_config.json."""

        def choose(value: Any, name: str, default: Any) -> Any:
            return value if value is not None else defaults.get(name, default)

        temperature = float(choose(self.temperature, "temperature", 1.0))
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            top_k=int(choose(self.top_k, "top_k", -1)),
            top_p=float(choose(self.top_p, "top_p", 1.0)),
            seed=self.seed if self.seed is not None else seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], FAIL_FAST] | None = None

    def to_template(self, index: int) -> dict[str, Any]:
        """As chat templates want it: text parts joined. Raises RequestError for images and the like."""
        fields = {**(self.model_extra or {}), "role": self.role, "content": self.content}
        message = {name: value for name, value in fields.items() if value is not None}
        if isinstance(self.content, list):
            texts = []
            for at, part in enumerate(self.content):
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise RequestError(
                        f"messages[{index}].content[{at}]: only parts of type 'text' are supported",
                        param="messages",
                    )
                texts.append(part["text"])
            message["content"] = "\n".join(texts)
        return message


class ChatCompletionRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: str | TokenIds | Annotated[list[str], FAIL_FAST] | Annotated[list[TokenIds], FAIL_FAST]
    echo: bool = False
    add_special_tokens: bool = True


class GenerateRequest(GenerationRequest):
    """vLLM's plain API, `USE_OPENAI=0`."""

    prompt: str | TokenIds


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """Raises RequestError that names the field, for anything that is not a good request."""
    num_containers = _count_containers(body)
    if num_containers > MAX_CONTAINERS:
        raise RequestError(f"the body has {num_containers} arrays and objects; at most {MAX_CONTAINERS} are allowed")
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    for name, neutral in NOT_YET.items():
        value = data.get(name)
        if value is not None and not any(value == n and type(value) in _kin(n) for n in neutral):
            raise RequestError(f"{name}: {reprlib.repr(value)} is not supported yet by this server", param=name)
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        raise RequestError(f"{'.'.join(place)}: {first['msg']}", param=place[0] if place else None) from None
    _log_unknown(request)
    return request


def _kin(value: Any) -> tuple[type, ...]:
    """JSON writes 0.0 as 0; True is not 1."""
    return (int, float) if isinstance(value, int | float) and not isinstance(value, bool) else (type(value),)


def _count_containers(body: bytes) -> int:
    """`[` and `{` outside of strings, in a few passes over the bytes: nothing is decoded yet."""
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
    outside = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def _log_unknown(request: GenerationRequest) -> None:
    for name in request.model_extra or {}:
        if name not in NOT_YET and name not in _logged_fields and len(_logged_fields) < 1000:
            _logged_fields.add(name)
            log.warning("request field %r is unknown and has no effect", name[:80])
