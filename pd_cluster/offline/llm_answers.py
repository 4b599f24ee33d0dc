"""Answers requests, from an LLMRequest to a RequestOutput. Runs on the service's event loop.

A request's failure is never raised: its output reports it, and other requests are not affected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec

from pd_cluster.errors import PdClusterError, RequestError
from pd_cluster.offline.capacity_wait import when_capacity_frees
from pd_cluster.offline.llm_outputs import (
    CompletionOutput,
    CompletionOutputs,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from pd_cluster.offline.llm_prompts import Known, Prompt
from pd_cluster.offline.llm_requests import LLMRequest
from pd_cluster.service.answers.answer_logprobs import LogprobsFormat
from pd_cluster.service.answers.choice_message import ChoiceText
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.generation.merged_streams import together
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.schema.error_bodies import status_of
from pd_cluster.service.text_service import TextService
from pd_cluster.types import Logprobs

MAX_RUNNING = 512  # requests at a time; more would only wait in the engine

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Instant:
    """One instant, as two clocks show it."""

    wall_s: float = field(default_factory=time.time)
    monotonic_s: float = field(default_factory=time.monotonic)

    def wall(self, monotonic_s: float | None) -> float | None:
        return None if monotonic_s is None else self.wall_s + monotonic_s - self.monotonic_s


async def answers(
    service: TextService, asks: list[LLMRequest], tell: Callable[[RequestOutput], None] = lambda output: None
) -> list[RequestOutput]:
    """Returns the outputs in the order of `asks`; `tell` receives each when it is complete."""
    found: dict[int, RequestOutput] = {}
    waiting, batch = iter(enumerate(asks)), uuid4().hex

    async def work() -> None:
        for at, ask in waiting:
            found[at] = await answer(service, ask, batch)
            tell(found[at])

    await together([work() for _ in range(min(MAX_RUNNING, len(asks)))])
    outputs = [found[at] for at in range(len(asks))]
    failed = [output for output in outputs if output.error_msg is not None]
    if failed:
        log.warning("%d of %d requests failed: %s", len(failed), len(asks), failed[0].error_msg)
    return outputs


async def answer(service: TextService, ask: LLMRequest, batch: str = "") -> RequestOutput:
    arrival, generation = Instant(), None
    try:
        generation = await begun(service, ask, batch)
        generation.client_id, generation.received_s = ask.request_id, arrival.monotonic_s
        pieces = await service.complete([generation])
        return answered(service, ask, generation, pieces, arrival)
    except Exception as error:  # as in the API, an error affects only its own request
        if not isinstance(error, PdClusterError):
            log.error("%s: unexpected error", ask.request_id, exc_info=error)
        return _failed(ask, error, generation, arrival)


def answered(
    service: TextService, ask: LLMRequest, generation: Generation, pieces: list[Piece], arrival: Instant
) -> RequestOutput:
    return RequestOutput(
        request_id=ask.request_id,
        prompt=_prompt_text(service, ask, generation),
        prompt_token_ids=generation.prompt_token_ids,
        outputs=CompletionOutputs(_output(service, ask, generation, piece) for piece in pieces),
        metrics=_metrics(service, ask, arrival),
        num_cached_tokens=generation.num_cached_tokens,
        prompt_logprobs=_prompt_logprobs(service, generation),
        lora_request=ask.lora_request,
    )


# ---- the beginning


async def begun(service: TextService, ask: LLMRequest, batch: str = "") -> Generation:
    """Starts a generation, with max_tokens limited to what fits the context. Raises PdClusterError.

    `batch`: the generation's group of answers; see `RequestSpec`.
    """
    request = ask.request
    if ask.most_together is not None:
        short = request.model_copy(update={"max_tokens": 1, "min_tokens": None})
        num_prompt = len((await _generation(service, ask, short, batch)).prompt_token_ids)
        room = ask.most_together - num_prompt
        if room < 1:
            raise RequestError(
                f"max_tokens: {ask.most_together} limits prompt and output together, and the prompt already has "
                f"{num_prompt} tokens; give more",
                param="max_tokens",
            )
        request = request.model_copy(update={"max_tokens": room})
    try:
        return await _generation(service, ask, request, batch)
    except RequestError as error:
        if (error.param, error.code) != ("max_tokens", "context_length_exceeded"):
            raise
    return await _generation(service, ask, request.model_copy(update={"max_tokens": None}), batch)


async def _generation(
    service: TextService, ask: LLMRequest, request: CompletionRequest | ChatCompletionRequest, batch: str
) -> Generation:
    caller, pictures, variant = Caller(batch=batch), ask.pictures, ask.variant

    async def prepared() -> Generation:
        if isinstance(request, ChatCompletionRequest):
            allows = ask.allows_control_tokens
            return await service.chat(request, None, caller, allows, pictures, variant)
        assert ask.prompt is not None
        return await service.completion(request, ask.prompt, caller=caller, pictures=pictures, variant=variant)

    return await when_capacity_frees(prepared)


# ---- the end


def _failed(ask: LLMRequest, error: Exception, generation: Generation | None, arrival: Instant) -> RequestOutput:
    prompt = ask.prompt
    known = generation.prompt_token_ids if generation is not None else prompt if isinstance(prompt, list) else []
    return RequestOutput(
        request_id=ask.request_id,
        prompt=_text_of(prompt),
        prompt_token_ids=known,
        outputs=CompletionOutputs([CompletionOutput(finish_reason="error")]),
        metrics=RequestMetrics(arrival_time=arrival.wall_s, finished_time=time.time()),
        error_code=status_of(error),
        error_msg=str(error) if isinstance(error, PdClusterError) else f"{type(error).__name__}: {error}",
        lora_request=ask.lora_request,
    )


def _prompt_text(service: TextService, ask: LLMRequest, generation: Generation) -> str | None:
    if ask.prompt is None:  # only the tokens of a rendered conversation are kept
        return service.tokenizer.decode(generation.prompt_token_ids, skip_special_tokens=False)
    return _text_of(ask.prompt)


def _text_of(prompt: Prompt | None) -> str | None:
    """Returns the prompt's original text."""
    return prompt.text if isinstance(prompt, Known) else prompt if isinstance(prompt, str) else None


def _output(service: TextService, ask: LLMRequest, generation: Generation, piece: Piece) -> CompletionOutput:
    told = piece.logprobs if ask.request.num_logprobs is not None else None
    output = CompletionOutput(
        index=piece.index,
        text=piece.text if ask.shows_text else "",
        token_ids=piece.token_ids,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
    )
    if told is not None:
        output.cumulative_logprob = sum(e.logprobs.logprob for e in told if e.logprobs is not None)
        shown = _token_logprobs(service, [e.token_id for e in told], [e.logprobs for e in told])
        output.logprobs = [each for each in shown if each is not None]
    if generation.new_reader is not None:
        text = ChoiceText(generation)
        message, _ = text.message(piece)
        output.text = message.content or ""
        output.reasoning_content = message.reasoning_content or None
        output.tool_calls = msgspec.to_builtins(message.tool_calls or [])
        output.finish_reason = text.finish_reason(piece)
    return output


def _prompt_logprobs(service: TextService, generation: Generation) -> list[TokenLogprobs | None] | None:
    if generation.sampling.prompt_logprobs is None:
        return None
    return _token_logprobs(service, generation.prompt_token_ids, generation.prompt_logprobs)


def _token_logprobs(
    service: TextService, token_ids: list[int], found: list[Logprobs | None]
) -> list[TokenLogprobs | None]:
    shown = LogprobsFormat(service.tokenizer).prompt(token_ids, found)
    return [
        None if each is None else {int(i): Logprob(**msgspec.structs.asdict(value)) for i, value in each.items()}
        for each in shown
    ]


def _metrics(service: TextService, ask: LLMRequest, arrival: Instant) -> RequestMetrics:
    """Returns the metrics from the request's timeline, which is kept for the last 1,000 requests."""
    now_s = time.monotonic()
    metrics = RequestMetrics(
        arrival_time=arrival.wall_s,
        finished_time=arrival.wall(now_s),
        model_execute_time=now_s - arrival.monotonic_s,
    )
    timeline = service.router.timelines.find(ask.request_id)
    if timeline is None:
        return metrics
    first_s = next((at_s for at_s, what in timeline.own if what == "first token"), None)
    if first_s is None:
        return metrics
    metrics.first_token_time = first_s - arrival.monotonic_s
    admitted_s = timeline.admitted_s(first_s)
    if admitted_s is not None:
        begun_s = min(
            max(admitted_s, arrival.monotonic_s), first_s
        )  # clamped, because times of other processes are only approximate
        metrics.inference_start_time = arrival.wall(begun_s)
        metrics.time_in_queue = begun_s - arrival.monotonic_s
        metrics.model_forward_time = now_s - begun_s
    return metrics
