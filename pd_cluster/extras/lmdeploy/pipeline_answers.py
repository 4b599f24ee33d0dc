"""Answers many prompts over a text service, on the service's event loop. Knows nothing of sessions."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import uuid4

from pd_cluster.errors import GenerationError, GuideError, Overloaded, RequestError, Unavailable
from pd_cluster.extras.lmdeploy.generation_config import Response, placed, renamed
from pd_cluster.extras.lmdeploy.pipeline_prompts import Prompt, encoded
from pd_cluster.extras.lmdeploy.prompt_templates import PromptStyle
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.generation.merged_streams import merged
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.text_service import TextService

# Errors that end one answer, but not the others.
FAULTS = (GenerationError, GuideError, Overloaded, RequestError, Unavailable)


class Job(NamedTuple):
    """A prompt, its parameters, its name in errors, and the tokens before a plain text.

    `copies`: how many times its answer is returned; `n` greedy answers are equal, so only one is computed.
    """

    at: int
    prompt: Prompt
    request: CompletionRequest
    way: PromptStyle
    place: str
    history: Sequence[int] = ()
    copies: int = 1


class Begun(NamedTuple):
    """A prompt that has passed all checks. It has no generation if the prompt leaves no room for an answer."""

    at: int
    token_ids: list[int]
    limit: int
    generation: Generation | None
    copies: int = 1

    async def responses(self, service: TextService) -> AsyncGenerator[Response, None]:
        """Yields the responses as they arrive; the last has a finish_reason."""
        if self.generation is None:
            why = f"{len(self.token_ids)} prompt tokens leave no room for an answer; session_len is {self.limit}"
            for choice in range(self.copies):
                num_prompt = len(self.token_ids)
                yield Response("", 0, num_prompt, self.at, "length", index=self.at, error=why, choice=choice)
            return
        num_tokens: Counter[int] = Counter()
        unfinished = set(range(max(self.copies, self.generation.num_choices)))
        try:
            async with contextlib.aclosing(service.stream(self.generation)) as pieces:
                async for piece in pieces:
                    num_tokens[piece.index] += len(piece.token_ids)
                    response = self._response(piece, num_tokens[piece.index])
                    if piece.finish_reason is not None:
                        unfinished -= set(range(self.copies)) if self.copies > 1 else {piece.index}
                    for copy in range(self.copies):
                        yield replace(response, choice=copy) if copy else response
        except FAULTS as error:
            num_prompt = len(self.token_ids)
            for choice in sorted(unfinished):
                done = num_tokens[0 if self.copies > 1 else choice]
                failed = Response("", done, num_prompt, self.at, "error", index=self.at, error=str(error))
                yield replace(failed, choice=choice)

    def _response(self, piece: Piece, num_tokens: int) -> Response:
        assert self.generation is not None
        told = [
            {**dict(entry.logprobs.top), entry.token_id: entry.logprobs.logprob}
            for entry in piece.logprobs
            if entry.logprobs is not None
        ]
        return Response(
            text=piece.text,
            generate_token_len=num_tokens,
            input_token_len=len(self.token_ids),
            session_id=self.at,
            finish_reason=piece.finish_reason,
            token_ids=piece.token_ids,
            logprobs=told if self.generation.sampling.logprobs is not None else None,
            index=self.at,
            choice=piece.index,
        )


async def begin(service: TextService, job: Job, batch: str = "") -> Begun:
    """Prepares a job. Raises RequestError, but not for a prompt that is too long: only its own answer is empty."""
    try:
        spelled = service.spelled if service.takes_images else None
        found = await encoded(service.tokenizer, job.prompt, job.way, not job.history, service.guard, spelled)
        shown = await service.illustrated([*job.history, *found.token_ids], found.pictures)
        token_ids, limit = shown.prompt.token_ids, service.max_model_len
        room = limit - len(token_ids)
        if room < 1:
            return Begun(job.at, token_ids, limit, None, max(job.copies, job.request.n or 1))
        request = job.request
        if request.max_tokens is not None and request.max_tokens > room:
            request = request.model_copy(update={"max_tokens": room})
        generation = await service.completion(request, shown, caller=Caller(batch=batch))
        return Begun(job.at, token_ids, limit, generation, job.copies)
    except RequestError as error:
        raise placed(renamed(error), job.place) from None


async def answers(
    service: TextService, jobs: Sequence[Job], num_at_once: int, batch: str = ""
) -> AsyncGenerator[Response, None]:
    """Yields the responses of all jobs as they arrive. The responses of a `batch` come in large parts.

    Checks all jobs before anything is computed. Raises RequestError.
    """
    begun = [await begin(service, job, batch) for job in jobs]
    places = asyncio.Semaphore(num_at_once)

    async def in_turn(one: Begun) -> AsyncGenerator[Response, None]:
        async with places, contextlib.aclosing(one.responses(service)) as responses:
            async for response in responses:
                yield response

    async with contextlib.aclosing(merged([in_turn(one) for one in begun])) as responses:
        async for response in responses:
            yield response


async def whole_answers(
    service: TextService, jobs: Sequence[Job], num_at_once: int, ended: Callable[[Response], object]
) -> list[Response]:
    """Returns a response for each job, in order. `ended` gets each first answer's last part. Raises RequestError."""
    parts: list[dict[int, list[Response]]] = [{} for _ in jobs]
    async with contextlib.aclosing(answers(service, jobs, num_at_once, uuid4().hex)) as responses:
        async for response in responses:
            parts[response.index].setdefault(response.choice, []).append(response)
            if response.finish_reason is not None and not response.choice:
                ended(response)
    return [_whole([joined(of_one) for _, of_one in sorted(choices.items())]) for choices in parts]


def _whole(choices: list[Response]) -> Response:
    """Returns the first choice's response; if there are several choices, its `choices` has them all."""
    return replace(choices[0], choices=choices) if len(choices) > 1 else choices[0]


def joined(parts: list[Response]) -> Response:
    """Joins all responses of one stream."""
    last = parts[-1]
    has_logprobs = any(part.logprobs is not None for part in parts)
    return replace(
        last,
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=[each for part in parts for each in part.logprobs or []] if has_logprobs else None,
    )
