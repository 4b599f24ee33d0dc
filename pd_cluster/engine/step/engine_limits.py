"""Checks requests against one engine's limits. The API has already checked them; this protects the engine's loop."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from pd_cluster.media.image_rules import ImageRules
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.types import (
    MAX_EXTRA_ARGS_NUM_CHARS,
    MAX_GUIDE_NUM_CHARS,
    MAX_POOLED_TOKEN_IDS,
    MAX_SEQUENCES,
    NO_SAMPLING,
    Pooling,
    Range,
    Request,
    Resumed,
    Sampling,
)
from pd_cluster.types.request_spec import largest_id
from pd_cluster.types.variants import PLACEHOLDER

MAX_ENGINE_SEQUENCES = 8 * MAX_SEQUENCES  # more than the API allows
# All entries travel in one message. Each takes about half a kilobyte while an answer is built.
MAX_LOGPROB_ENTRIES = 1_000_000
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BEAM_WIDTH = MAX_SEQUENCES
MAX_LENGTH_PENALTY = 10.0  # the limit of the absolute value: length ** penalty must stay finite
MAX_ANSWER_TOKENS = 1_000_000  # the most tokens in the answer of a beam search, which is one message
# The allowed ranges of `Sampling`'s fields, from their annotations.
RANGES: dict[str, Range] = {
    name: range_
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    for range_ in getattr(hint, "__metadata__", ())
    if isinstance(range_, Range)
}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    vocab_size: int
    max_model_len: int
    rope: RopeLimit
    variants: Container[str] = ()  # the adapters that are loaded here
    images: ImageRules | None = None  # None: the model takes no images

    def problem(self, request: Request, resumed: Sequence[Resumed] = ()) -> str | None:
        """Returns one line that says why this engine cannot accept the request, or None."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt or sampling.max_tokens < 1:
            return "a request needs at least one prompt token, and max_tokens of at least 1"
        if request.most_tokens > self.max_model_len:
            most = "" if request.pooling is not None else f" and max_tokens {sampling.max_tokens}"
            return (
                f"{len(prompt)} prompt tokens{most} exceed max_model_len {self.max_model_len}; use fewer, or start the "
                f"server with a larger --max-model-len"
            )
        per_token = 0 if sampling.prompt_logprobs is None else sampling.prompt_logprobs + 1
        num_named = sum(map(len, sampling.prompt_logprob_token_ids))
        if len(prompt) * per_token + num_named > MAX_LOGPROB_ENTRIES:
            return (
                f"prompt_logprobs {sampling.prompt_logprobs} for {len(prompt)} tokens are too many to return; at most "
                f"{MAX_LOGPROB_ENTRIES} logprobs are allowed"
            )
        if request.order.largest_token_id >= self.vocab_size:
            return f"prompt token ids must be in 0 to {self.vocab_size - 1}"
        if len(request.order.prediction) > self.max_model_len or not self._are_tokens(request.order.prediction):
            return f"prediction: at most {self.max_model_len} token ids in 0 to {self.vocab_size - 1}"
        if request.num_virtual_tokens and (problem := _virtual_problem(request)):
            return problem
        if problem := self.rope.problem(request.order) or self._images_problem(request):
            return problem
        if len(sampling.extra_args) > MAX_EXTRA_ARGS_NUM_CHARS:
            return (
                f"extra_args of {len(sampling.extra_args)} characters; at most {MAX_EXTRA_ARGS_NUM_CHARS} are allowed"
            )
        if sampling.guide is not None and len(sampling.guide.text) > MAX_GUIDE_NUM_CHARS:
            return f"a guide of {len(sampling.guide.text)} characters; at most {MAX_GUIDE_NUM_CHARS} are allowed"
        if request.pooling is not None:
            return _pooling_problem(request, resumed) or self._pooled_ids_problem(request.pooling)
        return self._sampling_problem(sampling) or _beam_problem(sampling) or self._resumed_problem(request, resumed)

    def _images_problem(self, request: Request) -> str | None:
        order = request.order
        if not order.images:
            return None
        if self.images is None:
            return "images: this model takes no images; leave them out"
        if len(order.images) != len(order.spans):
            return f"images: {len(order.images)} for {len(order.spans)} spans; each span needs one image"
        stop = 0
        for at, (image, span) in enumerate(zip(order.images, order.spans, strict=True)):
            if problem := self.images.problem(image):
                return f"images[{at}]: {problem}"
            if not image.pixels and request.leg != "decode":
                return f"images[{at}]: it has no pixels, but this leg computes it"
            num_tokens = self.images.num_tokens(image)
            if not stop <= span.start <= span.stop <= len(order.prompt_token_ids):
                return f"images[{at}]: tokens {span.start} to {span.stop} must be in the prompt, after earlier spans"
            if span.stop - span.start != num_tokens:
                return f"images[{at}]: {span.stop - span.start} tokens; expected {num_tokens}"
            stop = span.stop
        return None

    def lacks(self, request: Request) -> str | None:
        """Returns what this instance lacks that another instance may have; None if it lacks nothing."""
        variant = request.order.variant
        if not variant or variant in self.variants:
            return None
        return f"the adapter {variant[:12]} is not loaded on this instance"

    def _resumed_problem(self, request: Request, resumed: Sequence[Resumed]) -> str | None:
        if not resumed:
            return None
        if request.leg != "hybrid" or request.sampling.beam_width:
            return "only a hybrid leg without a beam search can be resumed"
        indices = [each.index for each in resumed]
        if len(set(indices)) < len(indices) or not all(0 <= index < request.sampling.n for index in indices):
            return f"sequences {indices} cannot be resumed: expected different indices below n, {request.sampling.n}"
        for each in resumed:
            if len(each.output_token_ids) >= request.sampling.max_tokens or not self._are_tokens(each.output_token_ids):
                return f"sequence {each.index} cannot be resumed: it has ended, or has tokens unknown to the model"
        return None

    def _sampling_problem(self, sampling: Sampling) -> str | None:
        if not 1 <= sampling.n <= MAX_ENGINE_SEQUENCES:
            return f"n {sampling.n} must be in 1 to {MAX_ENGINE_SEQUENCES}"
        for name, allowed in RANGES.items():
            if getattr(sampling, name) not in allowed:
                return f"{name} {getattr(sampling, name)} must be in {allowed}"
        if not all(math.isfinite(bias) for _, bias in sampling.logit_bias if bias != -math.inf):  # -inf bans a token
            return "logit_bias must be finite numbers, or -inf"
        ids = (
            *sampling.allowed_token_ids,
            *(token_id for token_id, _ in sampling.logit_bias),
            *(token_id for word in sampling.bad_words for token_id in word),
            *sampling.logprob_token_ids,
            *(token_id for row in sampling.prompt_logprob_token_ids for token_id in row),
        )
        if not self._are_tokens(ids) or not all(sampling.bad_words):
            return f"token ids in sampling parameters must be in 0 to {self.vocab_size - 1}, and bad_words not empty"
        counts = (sampling.logprobs or 0, sampling.prompt_logprobs or 0, sampling.min_tokens)
        if min(counts) < 0 or max(counts[:2]) > self.vocab_size:
            return (
                "logprobs, prompt_logprobs and min_tokens must not be negative; the first two must not exceed "
                f"{self.vocab_size}, the size of the vocabulary"
            )
        if len(sampling.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            return f"logprob_token_ids has {len(sampling.logprob_token_ids)} ids; at most {MAX_LOGPROB_TOKEN_IDS}"
        return None

    def _pooled_ids_problem(self, pooling: Pooling) -> str | None:
        ids = pooling.token_ids
        if pooling.kind != "logits":
            return f"token_ids need a pooling of kind logits, not {pooling.kind}" if ids else None
        if not ids or len(ids) > MAX_POOLED_TOKEN_IDS or not self._are_tokens(ids):
            return f"a pooling of logits needs 1 to {MAX_POOLED_TOKEN_IDS} token_ids in 0 to {self.vocab_size - 1}"
        return "dimensions do not apply to a pooling of logits; omit them" if pooling.dimensions is not None else None

    def _are_tokens(self, ids: Sequence[int]) -> bool:
        return largest_id(ids) < self.vocab_size


def _pooling_problem(request: Request, resumed: Sequence[Resumed]) -> str | None:
    """Returns why a request cannot be pooled. The Pooler compares its dimensions with the model's."""
    if request.leg != "hybrid" or resumed:
        return f"a pooling request must be a hybrid leg that computes all of its prompt, not {request.leg} or resumed"
    for name in Sampling.__struct_fields__:
        if (value := getattr(request.sampling, name)) != getattr(NO_SAMPLING, name):
            return f"{name} {value}: a pooling request chooses no token; leave it out"
    assert request.pooling is not None
    if (dimensions := request.pooling.dimensions) is not None and dimensions < 1:
        return f"dimensions {dimensions} must be at least 1"
    return None


def _beam_problem(sampling: Sampling) -> str | None:
    if not sampling.beam_width:
        return None
    if not max(2, sampling.n) <= sampling.beam_width <= MAX_BEAM_WIDTH:
        return f"beam_width {sampling.beam_width} must be in 2 to {MAX_BEAM_WIDTH}, and not less than n, {sampling.n}"
    if not sampling.greedy:
        return f"a beam search needs temperature 0, not {sampling.temperature}"
    if sampling.guide is not None:
        return "a beam search cannot follow a guide"
    if sampling.logprob_token_ids:
        return "a beam search does not return logprob_token_ids"
    if not abs(sampling.length_penalty) <= MAX_LENGTH_PENALTY:  # also rejects NaN
        return f"length_penalty {sampling.length_penalty} must be in -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
    if sampling.n * sampling.max_tokens > MAX_ANSWER_TOKENS:
        return f"n {sampling.n} and max_tokens {sampling.max_tokens} make an answer of over {MAX_ANSWER_TOKENS} tokens"
    return None


def _virtual_problem(request: Request) -> str | None:
    order, num_virtual = request.order, request.num_virtual_tokens
    if request.pooling is not None or order.images or order.rope_positions is not None:
        return "a prompt adapter does not support vectors or images"
    prompt = order.prompt_token_ids
    if len(prompt) <= num_virtual or any(token_id != PLACEHOLDER for token_id in prompt[:num_virtual]):
        return (
            f"the prompt adapter has {num_virtual} virtual tokens, but the prompt lacks placeholders for them, or text"
        )
    return None
