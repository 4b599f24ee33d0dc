"""Makes the checks that need the model or the server's limits: ids, lengths, counts of logprobs.

Every refusal is a RequestError that names the field, its value and the remedy. Knows nothing of HTTP.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pd_cluster.engine.step.engine_limits import MAX_ANSWER_TOKENS, MAX_LOGPROB_ENTRIES
from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import (
    ALL_LOGPROBS,
    CompletionRequest,
    GenerationRequest,
    outside_of_vocabulary,
)
from pd_cluster.settings.request_settings import RequestSettings
from pd_cluster.types import MAX_SEQUENCES, Sampling

DEFAULT_MAX_LOGPROBS = RequestSettings().max_logprobs
MAX_STREAMED_LOGPROB_ENTRIES = 32_768  # the most for a prompt: a stream writes all at once, while others wait
OUTPUT_TOKENS_COUNTED = 16_384  # a longer max_tokens counts as this many, so that one sequence may fill the context
MAX_STREAMED_NBYTES = 256 << 20  # all frames of a streamed /generate, each of which repeats all texts


class Limits(NamedTuple):
    """The limits of one server and its model, except the context's length."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_logprobs: int = DEFAULT_MAX_LOGPROBS  # -1: all
    max_beam_width: int = MAX_SEQUENCES
    generates: bool = True  # False: the model is a classifier
    has_processors: bool = False  # the operator's logits processors

    def check(
        self, request: GenerationRequest, sampling: Sampling, num_prompt_tokens: int, num_prompts: int = 1
    ) -> Sampling:
        """Returns the sampling within the limits, for one of `num_prompts` prompts. Raises RequestError."""
        if not self.generates:
            raise RequestError("model: a classifier, which does not generate text; use /classify", param="model")
        if sampling.extra_args and not self.has_processors:
            shown = reprlib.repr(request.vllm_xargs)
            raise RequestError(
                f"vllm_xargs: {shown}: this server has no --logits-processors to read them; leave it out",
                param="vllm_xargs",
            )
        self._check_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias))
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        self._check_ids("logprob_token_ids", sampling.logprob_token_ids)
        self._check_ids("prompt_logprob_token_ids", itertools.chain(*sampling.prompt_logprob_token_ids))
        name = "top_logprobs" if isinstance(request, ChatCompletionRequest) else "logprobs"
        logprobs = self._num_logprobs(name, sampling.logprobs)
        prompt_logprobs = self._num_logprobs("prompt_logprobs", sampling.prompt_logprobs)
        # A bad word with an id outside of the vocabulary can never occur.
        words = tuple(word for word in sampling.bad_words if max(word) < self.vocab_size)
        if (logprobs, prompt_logprobs, words) != (sampling.logprobs, sampling.prompt_logprobs, sampling.bad_words):
            sampling = msgspec.structs.replace(
                sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs, bad_words=words
            )
        _check_size(request, sampling, num_prompt_tokens, num_prompts)
        _check_greedy(request, sampling)
        self._check_beams(request, sampling)
        if sampling.max_tokens and sampling.min_tokens > sampling.max_tokens:
            raise RequestError(
                f"min_tokens: {sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}; raise max_tokens "
                f"or lower min_tokens",
                param="min_tokens",
            )
        self._check_something_is_left(sampling)
        return sampling

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        if outside := [str(token_id) for token_id in token_ids if token_id >= self.vocab_size]:
            raise RequestError(f"{name}: {outside_of_vocabulary(outside, self.vocab_size)}", param=name)

    def _num_logprobs(self, name: str, asked: int | None) -> int | None:
        """Returns the number of logprobs, at most the size of the vocabulary. Raises RequestError."""
        if asked is None:
            return None
        number = self.vocab_size if asked == ALL_LOGPROBS else asked
        if self.max_logprobs != ALL_LOGPROBS and number > self.max_logprobs:
            shown = f"{asked}, all {number} of the vocabulary," if asked == ALL_LOGPROBS else f"{asked}"
            raise RequestError(
                f"{name}: {shown} is more than this server's {self.max_logprobs} (--max-logprobs); ask for fewer",
                param=name,
            )
        return min(number, self.vocab_size)

    def _check_beams(self, request: GenerationRequest, sampling: Sampling) -> None:
        name = "n" if request.best_of is None else "best_of"
        if sampling.beam_width > self.max_beam_width:
            raise RequestError(
                f"{name}: {sampling.beam_width} beams are more than this server's {self.max_beam_width} sequences in a "
                f"step (--max-num-seqs); ask for fewer",
                param=name,
            )
        if sampling.beam_width and sampling.n * sampling.max_tokens > MAX_ANSWER_TOKENS:
            raise RequestError(
                f"n: {sampling.n} hypotheses of up to {sampling.max_tokens} tokens are too much for one answer, which "
                f"has at most {MAX_ANSWER_TOKENS} tokens; ask for fewer, or lower max_tokens",
                param="n",
            )

    def _check_something_is_left(self, sampling: Sampling) -> None:
        """Raises RequestError if every token is forbidden."""
        forbidden = {word[0] for word in sampling.bad_words if len(word) == 1}
        if sampling.min_tokens and sampling.guide is None:  # a guide itself decides when end tokens are allowed
            forbidden |= {*sampling.stop_token_ids, *self.eos_token_ids}
        if sampling.allowed_token_ids and forbidden.issuperset(sampling.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids: bad_words and min_tokens forbid all of them; allow another token",
                param="allowed_token_ids",
            )
        if not sampling.allowed_token_ids and len(forbidden) >= self.vocab_size:
            raise RequestError("bad_words: they forbid the whole vocabulary; leave one out", param="bad_words")


def _check_size(request: GenerationRequest, sampling: Sampling, num_prompt_tokens: int, num_prompts: int) -> None:
    """Limits the size of an answer, which is built in memory. Raises RequestError."""
    num_entries = 0  # assumes that all prompts are as long as this one
    if sampling.prompt_logprobs is not None:
        num_told = request.num_choices if isinstance(request, CompletionRequest) else 1
        num_entries += num_prompt_tokens * (sampling.prompt_logprobs + 1) * num_told
        num_entries += sum(map(len, sampling.prompt_logprob_token_ids))
    if sampling.logprobs is not None:
        num_told = sampling.logprobs + len(sampling.logprob_token_ids) + 1
        num_entries += min(sampling.max_tokens, OUTPUT_TOKENS_COUNTED) * num_told * sampling.n
    num_entries *= num_prompts
    if request.stream and sampling.prompt_logprobs is not None:  # the stream sends the prompt's logprobs, too
        num_told = num_prompt_tokens * (sampling.prompt_logprobs + 1) * request.num_choices
        if num_told > MAX_STREAMED_LOGPROB_ENTRIES:
            raise RequestError(
                f"logprobs: a stream would begin with {num_told} logprobs of the prompt, more than the "
                f"{MAX_STREAMED_LOGPROB_ENTRIES} allowed; leave out stream, or ask for fewer",
                param="logprobs",
            )
    if num_entries > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"logprobs: the answer could have {num_entries}, more than the {MAX_LOGPROB_ENTRIES} allowed; ask for "
            f"fewer logprobs, fewer choices or a shorter answer",
            param="logprobs",
        )


def check_streamed_texts(num_texts: int, num_prompt_chars: int, max_tokens: int) -> None:
    """Limits a streamed /generate, whose frames repeat all texts from their beginning. Raises RequestError."""
    nbytes = num_texts * max_tokens * num_texts * (num_prompt_chars + 4 * max_tokens)
    if num_texts > 1 and nbytes > MAX_STREAMED_NBYTES:
        raise RequestError(
            f"n: {num_texts} texts of up to {max_tokens} tokens, each after {num_prompt_chars} characters of prompt, "
            f"would take {nbytes >> 20} MiB of frames, more than the {MAX_STREAMED_NBYTES >> 20} allowed; ask for "
            f"fewer, or leave out stream",
            param="n",
        )


def _check_greedy(request: GenerationRequest, sampling: Sampling) -> None:
    if not sampling.greedy or sampling.n == 1 or sampling.beam_width:
        return
    name, value = ("n", request.num_choices) if request.num_choices > 1 else ("best_of", sampling.n)
    raise RequestError(
        f"{name}: {value} with temperature 0: greedy sampling gives one answer; use 1, or a temperature above 0",
        param=name,
    )


def truncated(request: GenerationRequest, token_ids: list[int], limit: int, default_max_tokens: int) -> list[int]:
    """Truncates a prompt to the last or first tokens, as many as the request keeps. Raises RequestError."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    wanted = request.wanted_tokens if request.wanted_tokens is not None else default_max_tokens
    if keep == -1:
        keep = limit - max(wanted, 1)
    if not 0 < keep < limit:
        raise RequestError(
            f"truncate_prompt_tokens: {request.truncate_prompt_tokens} with {wanted} output tokens does not fit the "
            f"model's context of {limit} tokens; keep fewer, or lower max_tokens",
            param="truncate_prompt_tokens",
        )
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]


def max_tokens_of(
    request: GenerationRequest, num_prompt: int, limit: int, default_max_tokens: int | None, param: str
) -> int:
    """Returns the maximum output tokens of this request: as many as it asks for, or as many as fit the context.

    Raises RequestError if no output token fits, or if the requested number alone exceeds the context.
    """
    if not num_prompt:
        raise RequestError(f"{param}: no tokens", param=param)
    if num_prompt >= limit:
        raise RequestError(
            f"{param}: the prompt is too long: {num_prompt} tokens; this model's maximum context length is {limit} "
            f"tokens, prompt and output together",
            param=param,
            code="context_length_exceeded",
        )
    wanted = request.wanted_tokens
    least = 0 if isinstance(request, CompletionRequest) and request.echo else 1
    if wanted is not None and wanted < least:
        name = request.wanted_name
        raise RequestError(f"{name}: {wanted}; must be at least 1 (0 only with echo)", param=name)
    room = limit - num_prompt
    if wanted is None:
        return room if default_max_tokens is None or request.wants_whole_context else min(default_max_tokens, room)
    if wanted > limit:
        name = request.wanted_name
        raise RequestError(
            f"{name}: {wanted}; this model's maximum context length is {limit} tokens, prompt and output together; ask "
            f"for fewer",
            param=name,
            code="context_length_exceeded",
        )
    return min(wanted, room)


def check_priority(priority: int, has_priorities: bool) -> None:
    """Raises RequestError for a priority if the server ignores priorities."""
    if priority and not has_priorities:
        raise RequestError(
            f"priority: {priority}; this server ignores priorities (--scheduling-policy fcfs); leave it out",
            param="priority",
        )
