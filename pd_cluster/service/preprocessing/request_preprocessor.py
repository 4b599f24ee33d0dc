"""Converts parsed requests to generations: token ids, sampling, limits. Knows nothing of chats, routers or HTTP."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import GuideError, RequestError
from pd_cluster.service.callers.caller import NOBODY, Caller
from pd_cluster.service.callers.served_names import ServedNames
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import TextSequence
from pd_cluster.service.guides.guide_check import GuideCheck
from pd_cluster.service.media.media_preparation import PromptWithMedia
from pd_cluster.service.preprocessing.request_limits import Limits, check_priority, max_tokens_of, truncated
from pd_cluster.service.prompts.prompt_encoder import PromptEncoder
from pd_cluster.service.schema.completion_protocol import GenerationRequest
from pd_cluster.service.schema.structured_outputs.guide_fields import Asked
from pd_cluster.service.service_config import ServiceConfig
from pd_cluster.text.stop_strings import StopStrings
from pd_cluster.types import Guide, RequestSpec, Sampling
from pd_cluster.types.variants import PLACEHOLDER, num_virtual_tokens

MAX_PREDICTED_TOKENS = 1 << 20  # limit of a prediction's tokens times the number of prompts; further tokens are ignored
MAX_GUIDES_NUM_CHARS = 1 << 20  # limit of a guide's characters times the number of prompts, each of which has a copy
SLICE_NUM_TOKENS = 1 << 17  # checked without a pause, in a few milliseconds


class SharedFields(NamedTuple):
    """The fields that all prompts of a request share. `bad_words` and `prediction`: in tokens."""

    guide: Guide | None
    bad_words: tuple[tuple[int, ...], ...]
    markers: Collection[str]
    num_prompts: int
    caller: Caller = NOBODY
    variant: str = ""
    prediction: tuple[int, ...] = ()


class RequestPreprocessor:
    """Owns and closes its `encoder` and its `guides`. `names` maps a request's model name to an adapter's digest."""

    def __init__(
        self, encoder: PromptEncoder, guides: GuideCheck, limits: Limits, names: ServedNames, config: ServiceConfig
    ) -> None:
        self.encoder, self.guides, self.limits, self._names = encoder, guides, limits, names
        self.tokenizer, self._limit = encoder.tokenizer, encoder.limit
        self.has_priorities = config.settings.routing.has_priorities
        self.seeds = random.Random(secrets.randbits(128) if config.seed is None else config.seed)
        self._sampling_defaults = config.sampling_defaults
        self._reports_drafts = config.settings.spec_decode_metrics != "none"
        self._most_retention_s = config.settings.prefix_retention_s
        self._most_tokens = config.sampling_defaults.get("max_new_tokens")

    async def close(self) -> None:
        self.encoder.close()
        await self.guides.close()

    async def token_ids(
        self, request: GenerationRequest, prompts: list[str | list[int]], special: bool, caller: Caller = NOBODY
    ) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        may_be_cut = request.truncate_prompt_tokens is not None
        encoded = iter(await self.encoder.encode(texts, special, may_be_cut, "prompt", caller))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def shared(
        self,
        request: GenerationRequest,
        asked: Asked | None,
        markers: Collection[str] = (),
        num_prompts: int = 1,
        caller: Caller = NOBODY,
        variant: str | None = None,
    ) -> SharedFields:
        """Makes the fields that all prompts share. Raises RequestError.

        `markers`: special tokens that a reader needs. `variant`: given by an in-process caller; None: the variant that
        the request names as its model.
        """
        if asked is not None and len(asked.guide.text) * num_prompts > MAX_GUIDES_NUM_CHARS:
            raise RequestError(
                f"{asked.field}: {len(asked.guide.text)} characters for each of {num_prompts} prompts are too many; "
                f"send fewer prompts in a request",
                param=asked.field.partition(".")[0],
            )
        check_priority(request.priority or 0, self.has_priorities)
        self._check_text(request, asked)
        bad_words = await self.encoder.bad_words(request.bad_words or [], caller)
        await self._check_guide(asked)
        if variant is None:
            variant = self._names.variant_of(request.model, caller)
        prediction = await self._prediction(request, num_prompts, caller)
        guide = asked.guide if asked is not None else None
        return SharedFields(guide, bad_words, markers, num_prompts, caller, variant, prediction)

    async def _prediction(self, request: GenerationRequest, num_prompts: int, caller: Caller) -> tuple[int, ...]:
        """Returns the predicted tokens of the answer, up to a token that the model lacks."""
        if request.prediction is None:
            return ()
        most = MAX_PREDICTED_TOKENS // num_prompts
        found = await self.encoder.prediction(request.prediction.text, most, caller)
        vocab_size = self.limits.vocab_size
        if max(found, default=0) < vocab_size:
            return found
        return found[: next(at for at, token_id in enumerate(found) if token_id >= vocab_size)]

    async def generation(
        self,
        request: GenerationRequest,
        shown: PromptWithMedia,
        default_max_tokens: int | None,
        param: str,
        shared: SharedFields,
    ) -> Generation:
        """Makes a generation and checks the limits. Raises RequestError."""
        num_virtual, prompt = num_virtual_tokens(shared.variant), shown.prompt
        limit = self._limit() - num_virtual
        if num_virtual and prompt.images:
            raise RequestError("model: a prompt adapter takes no images; leave them out", param="model")
        token_ids = truncated(request, prompt.token_ids, limit, default_max_tokens or 1)
        if prompt.images and len(token_ids) < len(prompt.token_ids):
            raise RequestError(
                "truncate_prompt_tokens: a prompt with images cannot be truncated; send a shorter one",
                param="truncate_prompt_tokens",
            )
        await self._check_ids(token_ids, param)
        wanted = self._max_tokens(request, len(token_ids), default_max_tokens, param, shared)
        sampling = self._sampling(request, wanted, len(token_ids), shared)
        sequences = self._sequences(request, sampling, shared.markers, token_ids)
        if num_virtual and (rows := sampling.prompt_logprob_token_ids):
            sampling = msgspec.structs.replace(sampling, prompt_logprob_token_ids=((),) * num_virtual + rows)
        if wanted == 0:  # the engine computes at least one token, which is not shown
            sampling = msgspec.structs.replace(sampling, n=1, max_tokens=1, min_tokens=0, beam_width=0)
        order = RequestSpec(
            [PLACEHOLDER] * num_virtual + token_ids if num_virtual else token_ids,
            sampling,
            shared.caller.salt(request.cache_salt),
            shared.variant,
            session=request.prompt_cache_key or request.session_id or shared.caller.session,
            retention_s=min(request.retention_s, self._most_retention_s),
            priority=shared.caller.priority(request.priority),
            batch=shared.caller.batch,
            spans=prompt.spans,
            images=prompt.images,
            rope_positions=prompt.rope_positions,
            prediction=shared.prediction,
            may_draft=request.speculative is not False,
            reports_drafts=self._reports_drafts and sampling.num_sequences == shared.num_prompts == 1,
        )
        return Generation(
            order,
            sequences,
            request.num_choices,
            every_token=bool(request.return_token_ids),
            is_prompt_only=wanted == 0,
            owner=shared.caller.owner,
            arrived=shared.caller.arrived,
            hold=shown.hold,
        )

    async def _check_ids(self, token_ids: list[int], param: str) -> None:
        """Checks that the model has these tokens; other tasks run between slices of a long prompt."""
        vocab_size = self.limits.vocab_size
        for start in range(0, len(token_ids), SLICE_NUM_TOKENS):
            if start:
                await asyncio.sleep(0)
            ids = token_ids[start : start + SLICE_NUM_TOKENS]
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise RequestError(f"{param}: token ids must be in 0 to {vocab_size - 1}", param=param)

    def check(self, request: GenerationRequest, num_tokens: int, param: str, shared: SharedFields) -> None:
        """Checks the limits as `generation` does, except the prompt's length. Raises RequestError."""
        most = self._limit() - num_virtual_tokens(shared.variant) - 1
        num_tokens = min(num_tokens, most)
        self._sampling(request, self._max_tokens(request, num_tokens, None, param, shared), num_tokens, shared)

    def _max_tokens(
        self,
        request: GenerationRequest,
        num_tokens: int,
        default_max_tokens: int | None,
        param: str,
        shared: SharedFields,
    ) -> int:
        """Returns the maximum output tokens after a prompt of `num_tokens`. Raises RequestError."""
        limit = self._limit() - num_virtual_tokens(shared.variant)
        wanted = max_tokens_of(request, num_tokens, limit, default_max_tokens, param)
        if self._most_tokens is not None:  # limits every request, as in vLLM's server
            wanted = min(wanted, int(self._most_tokens))
            least = request.min_tokens or 0
            if least > wanted:
                raise RequestError(
                    f"min_tokens: {least} is more than {wanted}, this server's limit for answers (max_new_tokens of "
                    f"its generation config); lower it",
                    param="min_tokens",
                )
        return wanted

    def _sampling(self, request: GenerationRequest, max_tokens: int, num_tokens: int, shared: SharedFields) -> Sampling:
        """Returns the sampling parameters after a prompt of `num_tokens`. Raises RequestError."""
        seed = request.own_seed if request.own_seed is not None else self.seeds.getrandbits(63)
        sampling = request.sampling(max_tokens, seed, self._sampling_defaults, shared.bad_words, shared.guide)
        return self.limits.check(request, sampling, num_tokens, shared.num_prompts)

    def _sequences(
        self, request: GenerationRequest, sampling: Sampling, markers: Collection[str], token_ids: list[int]
    ) -> list[TextSequence]:
        """Makes the sequences of a prompt with these tokens."""
        skips, spaces = request.skip_special_tokens is not False, request.spaces_between_special_tokens is not False
        include, stops = bool(request.include_stop_str_in_output), request.stops
        told = frozenset(sampling.stop_token_ids) - (frozenset() if sampling.ignore_eos else self.limits.eos_token_ids)
        detokenizer = self.tokenizer.detokenizer(skips, markers, spaces)
        if self.tokenizer.has_text:
            detokenizer.follow(token_ids)
        return [
            TextSequence(
                index,
                detokenizer.copy(),
                StopStrings(stops, include),
                sampling.min_tokens,
                shows_stop_token=include,
                stop_token_ids=told,
            )
            for index in range(sampling.n)
        ]

    def _check_text(self, request: GenerationRequest, asked: Asked | None) -> None:
        """Raises RequestError for parameters that need a tokenizer, if the server has none."""
        if self.tokenizer.has_text:
            return
        given = {"stop": request.stops, "bad_words": request.bad_words, "prediction": request.prediction}
        field = asked.field if asked is not None else next((name for name, value in given.items() if value), "")
        if field:
            raise RequestError(
                f"{field}: needs a tokenizer, which this server lacks (--skip-tokenizer-init); leave it out",
                param=field.partition(".")[0],
            )

    async def _check_guide(self, asked: Asked | None) -> None:
        """Checks a guide before the request is sent. Raises RequestError that names the field, or Unavailable."""
        if asked is None:
            return
        try:
            await self.guides.check(asked.guide)
        except GuideError as error:
            raise RequestError(f"{asked.field}: {error}", param=asked.field.partition(".")[0]) from None


def preprocessor_of(
    checkpoint: Checkpoint, encoder: PromptEncoder, names: ServedNames, config: ServiceConfig
) -> RequestPreprocessor:
    """Makes the request preprocessor of a process."""
    settings, eos_token_ids = config.settings, checkpoint.eos_token_ids
    vocab_size = int(checkpoint.config.get("vocab_size", encoder.tokenizer.vocab_size))
    most, width, generates = settings.max_logprobs, settings.engine.max_num_seqs, not checkpoint.is_classifier
    processes = bool(settings.engine.logits_processors)
    limits = Limits(vocab_size, eos_token_ids, most, width, generates, processes)
    file = (checkpoint.tokenizer_path or checkpoint.path) / "tokenizer.json"
    guides = GuideCheck(file, vocab_size, eos_token_ids, settings.timeouts.guided_timeout_s)
    return RequestPreprocessor(encoder, guides, limits, names, config)
