"""What a request may ask of one engine. The API has checked the same: this guards the engine's loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Request, Resumed, SamplingParams

MAX_SEQUENCES = 1024
MAX_LOGPROB_ENTRIES = 1_000_000  # they travel in one message
MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0  # either way: a power of a length must remain a number
MAX_ANSWER_TOKENS = 1_000_000  # of a beam search, in one message


@dataclass(frozen=True, slots=True)
class Limits:
    vocab_size: int
    max_model_len: int

    def problem(self, request: Request, resumed: Sequence[Resumed] = ()) -> str | None:
        """Why this engine cannot take it, in one line."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt or sampling.max_tokens < 1:
            return "a request needs a prompt token and max_tokens of at least 1"
        if len(prompt) + sampling.max_tokens > self.max_model_len:
            return (
                f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed "
                f"max_model_len {self.max_model_len}"
            )
        if len(prompt) * ((sampling.prompt_logprobs or 0) + 1) > MAX_LOGPROB_ENTRIES:
            return f"prompt_logprobs {sampling.prompt_logprobs} for {len(prompt)} tokens are too many to tell"
        if not self._are_tokens(prompt):
            return f"prompt token ids must be in 0 to {self.vocab_size - 1}"
        if sampling.guide is not None and len(sampling.guide.text) > MAX_GUIDE_NUM_CHARS:
            return f"a guide of {len(sampling.guide.text)} characters; at most {MAX_GUIDE_NUM_CHARS} are allowed"
        return self._sampling_problem(sampling) or _beam_problem(sampling) or self._resumed_problem(request, resumed)

    def _resumed_problem(self, request: Request, resumed: Sequence[Resumed]) -> str | None:
        if not resumed:
            return None
        if request.leg != "hybrid" or request.sampling.beam_width:
            return "only a hybrid leg without a beam search can be resumed"
        indices = [each.index for each in resumed]
        if len(set(indices)) < len(indices) or not all(0 <= index < request.sampling.n for index in indices):
            return f"sequences {indices} of {request.sampling.n} cannot be resumed"
        for each in resumed:
            if len(each.output_token_ids) >= request.sampling.max_tokens or not self._are_tokens(each.output_token_ids):
                return f"sequence {each.index} cannot be resumed: it has ended, or has tokens that the model lacks"
        return None

    def _sampling_problem(self, sampling: SamplingParams) -> str | None:
        if not 1 <= sampling.n <= MAX_SEQUENCES:
            return f"n {sampling.n} must be in 1 to {MAX_SEQUENCES}"
        numbers = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            *(bias for _, bias in sampling.logit_bias if bias != -math.inf),  # which is a ban
        )
        if not all(math.isfinite(number) for number in numbers) or sampling.temperature < 0:
            return "sampling parameters must be finite numbers, and temperature not negative"
        if not (0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1 and sampling.repetition_penalty > 0):
            return "top_p must be in (0, 1], min_p in [0, 1] and repetition_penalty above 0"
        ids = (
            *sampling.allowed_token_ids,
            *(token_id for token_id, _ in sampling.logit_bias),
            *(token_id for word in sampling.bad_words for token_id in word),
        )
        if not self._are_tokens(ids) or not all(sampling.bad_words):
            return f"token ids in sampling parameters must be in 0 to {self.vocab_size - 1}, and bad_words not empty"
        counts = (sampling.logprobs or 0, sampling.prompt_logprobs or 0, sampling.min_tokens)
        if min(counts) < 0 or max(counts[:2]) > self.vocab_size:
            return "logprobs, prompt_logprobs and min_tokens must not be negative, nor more than there are tokens"
        return None

    def _are_tokens(self, ids: Sequence[int]) -> bool:
        return not ids or (min(ids) >= 0 and max(ids) < self.vocab_size)


def _beam_problem(sampling: SamplingParams) -> str | None:
    if not sampling.beam_width:
        return None
    if not max(2, sampling.n) <= sampling.beam_width <= MAX_BEAM_WIDTH:
        return f"beam_width {sampling.beam_width} must be in 2 to {MAX_BEAM_WIDTH}, and not less than n, {sampling.n}"
    if not sampling.greedy:
        return f"a beam search has temperature 0, not {sampling.temperature}"
    if sampling.guide is not None:
        return "a beam search cannot follow a guide"
    if not abs(sampling.length_penalty) <= MAX_LENGTH_PENALTY:  # nor is it NaN
        return f"length_penalty {sampling.length_penalty} must be in -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
    if sampling.n * sampling.max_tokens > MAX_ANSWER_TOKENS:
        return f"n {sampling.n} and max_tokens {sampling.max_tokens} make an answer of over {MAX_ANSWER_TOKENS} tokens"
    return None
