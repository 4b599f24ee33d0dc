"""Streams one prompt's answer, from an LLMRequest to an output for each step, on the service's event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from uuid import uuid4

import msgspec

from pd_cluster.offline.llm_answers import Instant, answered, begun
from pd_cluster.offline.llm_outputs import CompletionOutput, CompletionOutputs, RequestOutput
from pd_cluster.offline.llm_requests import LLMRequest
from pd_cluster.offline.llm_sampling import RequestOutputKind
from pd_cluster.service.generation.text_sequence import Piece, joined
from pd_cluster.service.text_service import TextService


async def growing(
    service: TextService, ask: LLMRequest, kind: RequestOutputKind
) -> AsyncGenerator[RequestOutput, None]:
    """Yields outputs as the answer grows; the last is `finished`. Raises PdClusterError. Closing this ends the work.

    CUMULATIVE outputs have everything so far, DELTA outputs the new part, FINAL_ONLY yields only the last output. The
    best sequences of a beam search or `best_of` are known only at the end.
    """
    arrival, request = Instant(), ask.request
    picks = not request.beam_width and request.num_sequences > request.num_choices
    is_whole = kind is RequestOutputKind.FINAL_ONLY or picks
    generation = await begun(service, ask, uuid4().hex if is_whole else "")
    generation.client_id, generation.received_s = ask.request_id, arrival.monotonic_s
    if is_whole:
        yield answered(service, ask, generation, await service.complete([generation]), arrival)
        return
    so_far = {at: Piece(at, "", [], []) for at in range(generation.num_choices)}
    unfinished = set(so_far)
    async with contextlib.aclosing(service.stream(generation)) as pieces:
        async for piece in pieces:
            at = piece.index
            so_far[at] = joined([so_far[at], piece])
            if piece.finish_reason is not None:
                unfinished.discard(at)
            shown = list(so_far.values()) if kind is RequestOutputKind.CUMULATIVE else [piece]
            output = answered(service, ask, generation, shown, arrival)
            yield replace(output, finished=not unfinished)
            if kind is RequestOutputKind.DELTA:
                so_far[at] = msgspec.structs.replace(so_far[at], text="", token_ids=[], logprobs=[])


def aborted(last: RequestOutput) -> RequestOutput:
    """Returns the last output of an aborted answer: everything so far, with finish_reason "abort"."""
    outputs = [each if each.finish_reason else replace(each, finish_reason="abort") for each in last.outputs]
    return replace(last, outputs=CompletionOutputs(outputs or [CompletionOutput(finish_reason="abort")]), finished=True)
