"""LMDeploy's GenerationConfig and responses, and the conversion of a configuration to an API request.

Knows nothing of prompts or instances.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.extras.lmdeploy.argument_checks import checks_names, warn
from pd_cluster.service.schema.completion_protocol import MAX_LOGIT_BIAS, CompletionRequest
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.text.tokenizer import Tokenizer

Finish = Literal["stop", "length", "abort", "error"]

# The API's fields -> LMDeploy's names.
RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "random_seed",
    "stop": "stop_words",
    "logit_bias": "bad_token_ids",
    "structured_outputs": "response_format",
}
SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos", "bad_words"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logprobs"),
)
NOT_HERE = {
    "logits_processors": "custom functions cannot process logits",
    "output_logits": "logits are not available, but logprobs are",
    "output_last_hidden_state": "hidden states are not available",
}


@checks_names
@dataclass
class GenerationConfig:
    """`top_k` 1, or `do_sample` False with any `top_k`, chooses the most likely token; `top_k` 0 samples from all
    tokens.

    `max_new_tokens` None: as many as fit the context. The `n` answers to each prompt are in `Response.choices`; greedy
    answers are equal.
    """

    n: int = 1
    max_new_tokens: int | None = 512
    top_p: float = 1.0
    top_k: int = 1
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    _: KW_ONLY
    # fields of other versions
    do_sample: bool | None = None
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    logits_processors: Any = None
    output_logits: Any = None
    output_last_hidden_state: Any = None


@dataclass
class Response:
    """The response to one prompt. In a stream, `text`, `token_ids` and `logprobs` have only what is new, and the counts
    are totals.

    `finish_reason` is "length" with an empty text if the prompt fills the session, and "error" if an answer could not
    be finished; `error` gives the reason. `choices` has all answers, including the first, if `n` requests several; in a
    stream `choice` is the number of the answer to which this part belongs.
    """

    text: str
    generate_token_len: int
    input_token_len: int
    session_id: int
    finish_reason: Finish | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    index: int = 0
    error: str | None = None
    choice: int = 0
    choices: list[Response] = field(default_factory=list, repr=False)


@dataclass
class GenOut:
    """A step of `generate`: its new text, and the counts of all tokens so far.

    `history_token_len` counts the session's tokens before this turn, `input_token_len` those that the turn added.
    """

    response: str
    history_token_len: int
    input_token_len: int
    generate_token_len: int
    finish_reason: Finish | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None


def request_of(config: GenerationConfig, tokenizer: Tokenizer, stop_words: tuple[str, ...] = ()) -> CompletionRequest:
    """Returns a request without its prompt. `stop_words`: the template's. Raises RequestError with LMDeploy's names."""
    _check(config)
    fields = {name: getattr(config, name) for name in SAME if getattr(config, name) is not None}
    ends = () if config.ignore_eos else stop_words  # a template's stop words end an answer like the model's end token
    stops, stop_ids = _stops([*(config.stop_words or []), *ends], tokenizer)
    stop_ids += config.stop_token_ids or []
    fields |= {"stop": stops, "stop_token_ids": list(dict.fromkeys(stop_ids))}
    # Sent even if they are defaults: only an explicit null for max_tokens means as many as fit.
    fields |= {"max_tokens": config.max_new_tokens, "seed": config.random_seed, "min_tokens": config.min_new_tokens}
    if config.do_sample and config.top_k == 1:
        warn("do_sample=True has no effect with top_k 1, the default; give a larger top_k, or 0 for all tokens")
    if config.bad_token_ids:
        fields["logit_bias"] = {str(token_id): -MAX_LOGIT_BIAS for token_id in config.bad_token_ids}
    if config.response_format is not None:
        fields |= _format(config.response_format)
    try:
        request = parse(msgspec.json.encode({**fields, "prompt": ""}), CompletionRequest)
    except RequestError as error:
        raise renamed(error) from None
    except (TypeError, ValueError) as error:  # values that JSON cannot express
        raise RequestError(f"GenerationConfig: {error}") from None
    update: dict[str, Any] = {}
    if config.bad_token_ids:  # these tokens are forbidden even if they have a logit bias
        update["logit_bias"] = dict.fromkeys(map(str, config.bad_token_ids), -math.inf)
    if config.top_k == 1 or config.do_sample is False or request.temperature == 0:
        update |= {"temperature": 0.0, "top_k": -1, "n": 1}  # one answer is computed and copied
    return request.model_copy(update=update)


def renamed(error: RequestError) -> RequestError:
    """Returns the error with LMDeploy's names."""
    text = str(error)
    for theirs, ours in RENAMED.items():
        text = re.sub(rf"^{theirs}\b" if "_" not in theirs else rf"\b{theirs}\b", ours, text)
    return type(error)(text, param=RENAMED.get(error.param or "", error.param), code=error.code)


def placed(error: RequestError, place: str) -> RequestError:
    """Returns the error with `place` as the prompt's name."""
    text = str(error)
    if error.param == "prompt":
        text = f"{place}: {text.removeprefix('prompt: ')}"
    elif error.param == "messages" and "[" in place:
        text = f"{place}: {text}"
    else:
        return error
    return type(error)(text, param=place.partition("[")[0], code=error.code)


def check_text(place: str, text: str) -> None:
    """Raises RequestError for a lone surrogate, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{place}: {error}", param=place.partition("[")[0]) from None


def _check(config: GenerationConfig) -> None:
    """Checks values that do not reach the API. Raises RequestError."""
    for name, why in NOT_HERE.items():
        if getattr(config, name) is not None:
            raise RequestError(f"{name}: {why}; leave it out", param=name)
    for name, value in asdict(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: {value} is not a finite number", param=name)
    for name in ("temperature", "top_k", "top_p"):
        if getattr(config, name) is None:
            raise RequestError(f"{name}: None; give a number, or leave it out", param=name)
    for name in ("stop_words", "bad_words", "stop_token_ids", "bad_token_ids"):
        value = getattr(config, name)
        if value is not None and not isinstance(value, list | tuple):
            raise RequestError(f"{name}: {reprlib.repr(value)} must be a list", param=name)
    for word in config.stop_words or []:
        if not isinstance(word, str):
            raise RequestError(f"stop_words: {reprlib.repr(word)} must be a text", param="stop_words")
        check_text("stop_words", word)
    form: Any = config.response_format
    if form is not None and not isinstance(form, dict):
        raise RequestError(
            f'response_format: {reprlib.repr(form)} must be a dict, as {{"type": …}}', param="response_format"
        )


def _stops(words: list[str], tokenizer: Tokenizer) -> tuple[list[str], list[int]]:
    """Returns stop texts, and the ids of special tokens among them, which the searched text does not contain."""
    texts: dict[str, None] = {}
    token_ids = []
    for word in words:
        found = tokenizer.encode(word, add_special_tokens=False)
        if word and len(found) == 1 and tokenizer.is_special(found[0]):
            token_ids += found
        else:
            texts[word] = None
    return list(texts), token_ids


def _format(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the API's fields; OpenAI's response_format has no type `regex_schema`."""
    if given.get("type") == "regex_schema":
        return {"structured_outputs": {"regex": given.get("regex_schema")}}
    return {"response_format": given}
