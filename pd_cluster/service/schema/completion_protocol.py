"""Defines the schema of requests: OpenAI's chat and completion schemas with vLLM's extra parameters.

A parameter is honoured, or refused with a 400 that names it; an unsupported parameter is accepted only with a value
that has no effect. Unknown fields are accepted and logged once. Checks that need the model or the server's limits
(ids, lengths) are in request_limits.py.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from pd_cluster.engine.step.engine_limits import MAX_LENGTH_PENALTY, MAX_LOGPROB_TOKEN_IDS
from pd_cluster.errors import RequestError
from pd_cluster.service.schema.predicted_outputs import Prediction
from pd_cluster.service.schema.structured_outputs.guide_fields import Asked, GuideFields, guide_of
from pd_cluster.types import INT32_MAX, MAX_EXTRA_ARGS_NUM_CHARS, MAX_SEQUENCES, Guide, Sampling

MAX_STOP_STRINGS = 16
MAX_STOP_NUM_CHARS = 1024
MAX_PROMPTS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_STOP_TOKEN_IDS = 1024
MAX_CHOICES = 4096  # the choices of all prompts of a request together
MAX_BAD_WORDS = 128
MAX_BAD_WORD_NUM_CHARS = 256
MAX_SALT_NUM_CHARS = 256
MAX_SESSION_NUM_CHARS = 1024
MAX_LOGIT_BIAS = 100.0
MOST_NAMED = 10  # wrong keys listed in an error
ALL_LOGPROBS = -1  # logprobs of the whole vocabulary, as in vLLM
RANDOM_SEED = -1  # a random seed, as in vLLM
MIN_TEMPERATURE = 1e-5  # lower temperatures are greedy, as in vLLM

# Parameters of other servers that are not supported yet -> the values without effect, which are accepted.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "guided_decoding": (),
    "logits_processors": ([],),
    "detokenize": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,),
    "watermarking": (False,),
    "stream_interval": (1,),
    "media_io_kwargs": ({},),
    "moderation": (),
}
# Parameters that are not for this route, or not for this server -> the values without effect, and what errors say.
ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "prompt_embeds": (([], ""), "is not supported, since prompts are never embeddings; give a text or token ids"),
    "return_token_offsets": ((False,), "is for the routes that render a prompt, such as /v1/completions/render"),
    "prompt_logprob_token_ids": (([],), "is for sampling_params of /inference/v1/generate"),
    "prompt_logprob_start": ((0,), "is for sampling_params of /inference/v1/generate"),
    "extra_args": (({},), "is for sampling_params of /inference/v1/generate; give vllm_xargs"),
}
# SGLang's names for parameters that have another name here -> the values without effect, and what to send instead.
SGLANGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "regex": (("",), 'give structured_outputs: {"regex": …}'),
    "ebnf": (("",), 'give structured_outputs: {"grammar": …}'),
    "json_schema": (("",), 'give structured_outputs: {"json": …}'),
    "stop_regex": (([], ""), "give stop, or structured_outputs"),
    "no_stop_trim": ((False,), "give include_stop_str_in_output"),
    "lora_path": ((), "give the adapter's name as model"),
    "input_ids": ((), "give them as prompt to /v1/completions, or as token_ids to /inference/v1/generate"),
    "rid": ((), "give request_id"),
    "extra_key": (("",), "give cache_salt"),
    "thinking": (
        ({"type": "auto"}, {"type": "adaptive"}),
        'give chat_template_kwargs, such as {"enable_thinking": false}, or reasoning_effort',
    ),
    "separate_reasoning": ((True,), "--reasoning-parser separates reasoning; leave it out"),
    "stream_reasoning": ((True,), "reasoning is streamed as it comes; leave it out"),
    "session_params": (({},), "give session_id and the whole prompt"),
    "custom_logit_processor": ((), "give logit_bias, bad_words or structured_outputs"),
    "watermark": ((False,), "leave it out"),
    "return_hidden_states": ((False,), "ask /v1/embeddings for vectors"),
    "return_prompt_token_ids": ((False,), "give return_token_ids"),
    "return_meta_info": ((False,), "give include_metrics"),
}
# Parameters that do not concern the answer; they are accepted, and have no effect.
HARMLESS = frozenset(
    {"metadata", "prompt_cache_options", "safety_identifier"}
    | {"service_tier", "store", "verbosity"}
    | {"mm_payload", "return_mm_kwargs"}  # vLLM's, for the form of images in rendered requests
)
# Parameters that only chats have -> the values without effect.
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "reasoning_effort": (),
    "mm_processor_kwargs": ({},),
    "thinking_token_budget": (),
}
REQUEST_ID = r"^[\x21-\x7e]{1,128}$"

DERIVED_FROM = {
    "stop",
    "logit_bias",
    *GuideFields.__annotations__,
}  # the fields from which a request's cached properties are derived

MAX_MESSAGES = 4096  # also the most items of a request: validating each holds the interpreter's lock for microseconds
MAX_PARTS = 8192  # the parts of all contents of a request, including calls
FAIL_FAST = Field(fail_fast=True)  # only one error is reported; collecting millions blocks the interpreter for seconds
TokenIds = Annotated[list[int], FAIL_FAST]
Id = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_NUM_CHARS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
SessionId = Annotated[str, Field(max_length=MAX_SESSION_NUM_CHARS)]  # vLLM's prompt_cache_key; "": no session
CacheRetention = Literal["in_memory", "in-memory", "5m", "1h", "24h"]  # 5m and 1h: of Anthropic's cache_control
RETENTION_S: dict[CacheRetention, float] = {"5m": 300.0, "1h": 3600.0, "24h": 86400.0}
NumLogprobs = Annotated[int, Field(ge=ALL_LOGPROBS, le=INT32_MAX)]


def few(messages: Any) -> Any:
    """Limits a request's messages, in all its conversations together, and their parts, before they are validated."""
    found = messages if isinstance(messages, list) else []
    if any(isinstance(each, list) for each in found):
        found = [message for each in found if isinstance(each, list) for message in each]
    _check_few(len(found), MAX_MESSAGES, "messages")
    lists = (value for each in found if isinstance(each, dict) for value in each.values() if isinstance(value, list))
    _check_few(sum(map(len, lists)), MAX_PARTS, "parts of messages")
    return messages


def _check_few(number: int, most: int, what: str) -> None:
    if number > most:
        said = {"number": number, "what": what, "most": most}
        raise PydanticCustomError("too_many", "{number} {what}; at most {most} are allowed", said)


def named(values: Sequence[str]) -> str:
    """Lists the first values, and counts the others."""
    more = f" and {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else ""
    return f"{', '.join(values[:MOST_NAMED])}{more}"


def outside_of_vocabulary(ids: Sequence[str], vocab_size: int) -> str:
    what = "is" if len(ids) == 1 else "are"
    return f"{named(ids)} {what} not in the vocabulary; ids are 0 to {vocab_size - 1}"


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = True  # as in vLLM: a client that sends options wants the usage
    continuous_usage_stats: bool | None = (
        False  # vLLM's: each chunk has usage, for the prompt of its choice; only with include_usage
    )


class GenerationRequest(BaseModel):
    """The fields that chat, completions and /generate share. None means the server's default."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SEQUENCES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_SEQUENCES)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(
        default=None, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY, allow_inf_nan=False
    )
    early_stopping: bool | Literal["never"] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=2, allow_inf_nan=False)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    min_tokens: Count | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES, fail_fast=True)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[Id], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[list[Id], Field(max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)] | None = None
    return_tokens_as_token_ids: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    prompt_cache_key: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    prompt_cache_retention: CacheRetention | None = None
    session_id: SessionId | None = None
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    truncation_side: Literal["left", "right"] | None = None  # the side to cut off
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], FAIL_FAST] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_token_offsets: bool | None = None  # for routes that render a prompt
    include_metrics: bool | None = None
    prediction: Prediction | None = None
    speculative: bool | None = None
    vllm_xargs: dict[str, Any] | None = None  # for logits processors
    kv_transfer_params: dict[str, Any] | None = None  # only for routes that take handles

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_name(self) -> str:
        """The name of the field that limits the output tokens."""
        return "max_tokens"

    @property
    def wants_whole_context(self) -> bool:
        """Whether max_tokens is an explicit null, which asks for as many tokens as fit the context, as in vLLM."""
        return self.max_tokens is None and "max_tokens" in self.model_fields_set

    @property
    def own_seed(self) -> int | None:
        return None if self.seed == RANDOM_SEED else self.seed

    @property
    def retention_s(self) -> float:
        return RETENTION_S.get(self.prompt_cache_retention, 0.0) if self.prompt_cache_retention is not None else 0.0

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_sequences(self) -> int:
        """The number of sequences to generate, or a beam search's width; the answer has the best `num_choices`."""
        return self.best_of or self.num_choices

    @property
    def beam_width(self) -> int:
        """The width of a beam search; 0: no beam search."""
        return self.num_sequences if self.use_beam_search else 0

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens to return with each output token; None: no logprobs at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def named_prompt_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """For each prompt token but the first, the tokens whose logprobs are returned in addition to the most likely
        ones.
        """
        return ()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copies the request; keeps cached values unless a field from which they are derived changes."""
        copy = super().model_copy(update=update, deep=deep)
        if not DERIVED_FROM.isdisjoint(update or ()):
            for name in ("stops", "biases", "asked"):
                copy.__dict__.pop(name, None)
        return copy

    @cached_property
    def asked(self) -> Asked | None:
        """The guide that the output must follow, and the field that asks for it. Raises RequestError."""
        return guide_of(self)

    @cached_property
    def stops(self) -> list[str]:
        """The stop strings. Raises RequestError for an empty string, and for too many."""
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
        if (longest := max(map(len, stops), default=0)) > MAX_STOP_NUM_CHARS:
            raise RequestError(
                f"stop: a string of {longest} characters, at most {MAX_STOP_NUM_CHARS} are allowed", param="stop"
            )
        if "" in stops:
            raise RequestError("stop: an empty string would stop every answer; leave it out", param="stop")
        return stops

    def sampling(
        self,
        max_tokens: int,
        seed: int,
        defaults: Mapping[str, int | float],
        bad_words: tuple[tuple[int, ...], ...] = (),
        guide: Guide | None = None,
    ) -> Sampling:
        """Returns the sampling parameters. `defaults` are the server's (sampling_defaults.py).

        `bad_words`: in tokens. `guide`: the request's compiled guide.
        """

        def choose(value: Any, name: str, default: Any) -> Any:
            return value if value is not None else defaults.get(name, default)

        if self.beam_width:  # beam search does not sample, so the model's sampling defaults do not apply
            defaults = {name: value for name, value in defaults.items() if name == "repetition_penalty"}
        temperature = float(choose(self.temperature, "temperature", 0.0 if self.beam_width else 1.0))
        num_sequences = self.num_choices if self.beam_width else self.num_sequences
        num_logprobs = self.num_logprobs
        named = tuple(dict.fromkeys(self.logprob_token_ids or ())) if num_logprobs is not None else ()
        num_logprobs = 0 if named else num_logprobs  # as in vLLM, the named tokens replace the most likely ones
        return Sampling(
            n=num_sequences,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            top_k=int(choose(self.top_k, "top_k", -1)),
            top_p=float(choose(self.top_p, "top_p", 1.0)),
            min_p=float(choose(self.min_p, "min_p", 0.0)),
            seed=seed if self.own_seed is None else self.own_seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=float(choose(self.repetition_penalty, "repetition_penalty", 1.0)),
            logit_bias=tuple(sorted(self.biases.items())),
            allowed_token_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
            # Ranking sequences needs the logprobs of their tokens.
            logprobs=0 if num_logprobs is None and num_sequences > self.num_choices else num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            logprob_token_ids=named,
            prompt_logprob_token_ids=self.named_prompt_token_ids,
            beam_width=self.beam_width,
            length_penalty=1.0 if self.length_penalty is None else float(self.length_penalty),
            early_stopping=self.early_stopping or False,
            bad_words=bad_words,
            guide=guide,
            extra_args=self.extra_args,
        )

    @property
    def extra_args(self) -> str:
        """The arguments for logits processors, as JSON; "" without any. Raises RequestError."""
        if not self.vllm_xargs:
            return ""
        text = json.dumps(self.vllm_xargs, separators=(",", ":"))
        if len(text) > MAX_EXTRA_ARGS_NUM_CHARS:
            raise RequestError(
                f"vllm_xargs: {len(text)} characters of JSON, at most {MAX_EXTRA_ARGS_NUM_CHARS} are taken; send less",
                param="vllm_xargs",
            )
        return text

    @cached_property
    def biases(self) -> dict[int, float]:
        """Returns token id -> bias. Raises RequestError for keys that are not ids."""
        if not self.logit_bias:
            return {}
        self.check_biases()
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def check_biases(self, vocab_size: int | None = None) -> None:
        """Raises RequestError that names all keys that are not ids, and all ids outside of the vocabulary."""
        wrong, outside = [], []
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdecimal() and len(key) < 11 and (key == "0" or key[0] != "0")):
                wrong.append(reprlib.repr(key))
            elif vocab_size is not None and int(key) >= vocab_size:
                outside.append(key)
        faults = []
        if wrong:
            what = "is not a token id" if len(wrong) == 1 else "are not token ids"
            faults.append(f'{named(wrong)} {what}; keys are ids, as in {{"5": -100}}')
        if outside:
            faults.append(outside_of_vocabulary(outside, vocab_size or 0))
        if faults:
            raise RequestError(f"logit_bias: {'; '.join(faults)}", param="logit_bias")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def include_usage_so_far(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


_PROMPTS = Field(
    fail_fast=True, json_schema_extra={"maxItems": MAX_PROMPTS}
)  # checked in `prompts`, with a better message


class CompletionRequest(GenerationRequest):
    prompt: str | TokenIds | Annotated[list[str], _PROMPTS] | Annotated[list[TokenIds], _PROMPTS]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: NumLogprobs | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream includes usage. As in vLLM, empty options ask for it only in a chat."""
        return super().include_usage and "include_usage" in (self.stream_options or StreamOptions()).model_fields_set

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts. Raises RequestError if there are none, or more choices than one answer may have."""
        prompt = self.prompt
        if not prompt and not isinstance(prompt, str):
            raise RequestError("prompt: empty; give a text, a list of token ids, or a list of these", param="prompt")
        several: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        if len(several) > MAX_PROMPTS:
            raise RequestError(
                f"prompt: {len(several)} prompts are more than the {MAX_PROMPTS} that a request may have; send fewer",
                param="prompt",
            )
        if len(several) * self.num_sequences > MAX_CHOICES:
            raise RequestError(
                f"prompt: {len(several)} prompts with {self.num_sequences} sequences each are more than {MAX_CHOICES} "
                f"sequences; send fewer prompts in a request",
                param="prompt",
            )
        return several

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of logprobs to return for each prompt token; `echo` with `logprobs` asks for them, too."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs


class TokensCompletionRequest(CompletionRequest):
    """A request of /inference/v1/generate as a completion.

    `prompt_logprob_token_ids`: tokens to score after each prompt token from `prompt_logprob_start` to the last but one.
    """

    prompt_logprob_token_ids: Annotated[list[Annotated[list[Id], FAIL_FAST]], FAIL_FAST] | None = None
    prompt_logprob_start: Count | None = None
    output_mode: Literal["tokens", "text"] = "tokens"

    @property
    def num_prompt_logprobs(self) -> int | None:
        found = super().num_prompt_logprobs
        return 0 if found is None and self.prompt_logprob_token_ids else found

    @property
    def named_prompt_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The tokens to score, as rows. Raises RequestError unless there is a row for each scored token."""
        rows, start = self.prompt_logprob_token_ids, self.prompt_logprob_start or 0
        if not rows:
            return ()
        if self.truncate_prompt_tokens is not None:
            name = "truncate_prompt_tokens"
            raise RequestError(f"{name}: conflicts with prompt_logprob_token_ids; leave out one of the two", param=name)
        num_scored = max(0, len(self.prompt) - 1 - start)
        if len(rows) != num_scored:
            name = "prompt_logprob_token_ids"
            raise RequestError(
                f"{name}: {len(rows)} rows for {num_scored} scored tokens; give one for each prompt token after "
                f"number {start}",
                param=name,
            )
        return ((),) * start + tuple(map(tuple, rows))


class GenerateRequest(GenerationRequest):
    """A request to vLLM's plain API, which `USE_OPENAI=0` serves."""

    prompt: str | TokenIds
    logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
