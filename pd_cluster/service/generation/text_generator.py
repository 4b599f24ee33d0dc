"""Runs generations over the router, and yields or returns pieces of text. Knows nothing of requests' fields."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial

import msgspec

from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import GenerationError
from pd_cluster.service.generation.generation_watch import GenerationWatch
from pd_cluster.service.generation.merged_streams import merged, together
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.stream_interval import spaced
from pd_cluster.service.generation.text_sequence import Piece, joined
from pd_cluster.service.media.pixel_budget import PixelHold
from pd_cluster.types import TokenOutput

MOST_TOKENS_OF_PIECE = 64  # tokens in a piece of an answer that is not streamed


class TextGenerator:
    """`log`: the log of requests, if enabled. `interval`: tokens of a choice in each piece of a stream."""

    def __init__(self, router: Router, log: GenerationWatch | None, interval: int) -> None:
        self._router, self._log, self._interval = router, log, interval

    def pieces(self, generations: list[Generation]) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of all prompts of a request as they arrive. The first error ends all; so does closing this
        generator.
        """
        streams = [self._stream(generation) for generation in generations]
        return spaced(self._logged(generations, merged(streams, partial(_fail, generations))), self._interval)

    def stream(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Yields a piece when a sequence has text, and a last piece with its finish_reason. Closing this generator
        aborts the request.
        """
        return self._logged([generation], self._stream(generation))

    async def complete(self, generations: list[Generation]) -> list[Piece]:
        """Returns a piece for each choice. If there are more sequences than choices, the best ones are chosen."""
        if self._log is not None:
            self._log.begins(generations)
        works = [self._complete(generation) for generation in generations]
        pieces = [piece for whole in await together(works, partial(_fail, generations)) for piece in whole]
        if self._log is not None:
            self._log.ends(generations, pieces)
        return pieces

    def _logged(
        self, generations: list[Generation], pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[Piece, None]:
        return pieces if self._log is None else self._log.watched(generations, pieces)

    async def _stream(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        if generation.is_prompt_only:
            await self._learn_of_prompt(generation)
            for sequence in generation.sequences:
                yield generation.piece_of(sequence, sequence.end("length"))
            return
        if generation.order.batch and not generation.has_stops:
            async with contextlib.aclosing(self._whole(generation)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        async with contextlib.aclosing(self._tokens(generation)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                for piece in _pieces_of(generation, token):
                    yield piece

    async def _complete(self, generation: Generation) -> list[Piece]:
        first = generation.first_choice
        found: dict[int, list[Piece]] = {sequence.index: [] for sequence in generation.sequences}
        by_token = generation.is_prompt_only or generation.has_stops
        pieces = self._stream(generation) if by_token else self._whole(generation)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                found[piece.index - first].append(piece)
        if len(found) > generation.num_choices:
            generation.keep_best()
        whole = [joined(found[sequence.index]) for sequence in generation.sequences]
        return [msgspec.structs.replace(piece, index=first + at) for at, piece in enumerate(whole)]

    async def _whole(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Yields few, large pieces of an answer that has no stop strings. The caller must read to the end."""
        arrived: dict[int, list[TokenOutput]] = {sequence.index: [] for sequence in generation.sequences}
        async with contextlib.aclosing(self._tokens(generation, gathers=True)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                own = arrived[token.index]
                own.append(token)
                if token.finish_reason is not None or token.earlier or len(own) == MOST_TOKENS_OF_PIECE:
                    sequence, arrived[token.index] = generation.sequences[token.index], []
                    yield generation.piece_of(sequence, sequence.add_all(own))

    def _tokens(self, generation: Generation, gathers: bool = False) -> AsyncIterator[TokenOutput]:
        generation.arrived()
        order = msgspec.structs.replace(generation.order, gathers=True) if gathers else generation.order
        tokens = self._router.serve(order, generation.routed, generation.prompted, generation.origin)
        return tokens if generation.hold is None else _releasing(tokens, generation.hold)

    async def _learn_of_prompt(self, generation: Generation) -> None:
        """Computes the prompt without an answer, if its logprobs are requested."""
        if generation.sampling.prompt_logprobs is None:
            return
        async with contextlib.aclosing(self._tokens(generation)) as tokens:  # type: ignore[type-var]
            await anext(tokens)


def _pieces_of(generation: Generation, token: TokenOutput) -> Iterator[Piece]:
    """Yields a piece for a token and the tokens that came with it, if there is something to show.

    A resumable stream gets a piece for each token: its events must not depend on which tokens came together.
    """
    is_kept = generation.kept is not None
    sequence, text = generation.sequences[token.index], ""
    for each in token.apart():
        text += sequence.add(each)
        is_over, num_behind = sequence.finish_reason is not None, token.position - each.position
        if is_over and num_behind and token.drafts is not None and not is_kept:  # the last of `apart` has the report
            sequence.note_drafts(token.drafts, num_behind)
        if is_over and (num_behind or token.finish_reason is None):
            generation.stop(sequence.index, num_behind)
        if is_over or not num_behind or generation.parts_steps or is_kept:
            if text or generation.every_token or is_over:
                yield generation.piece_of(sequence, text)
            text = ""
        if is_over:
            return


async def _releasing(tokens: AsyncIterator[TokenOutput], hold: PixelHold) -> AsyncGenerator[TokenOutput, None]:
    """Yields the tokens, and then releases the memory of the images."""
    try:
        async with contextlib.aclosing(tokens):  # type: ignore[type-var]
            async for token in tokens:
                yield token
    finally:
        hold.release()


def _fail(generations: list[Generation], error: BaseException) -> None:
    """Ends all prompts of a request with one prompt's error, so that it does not count as a client's disconnect."""
    for generation in generations:
        generation.fail(GenerationError(f"another prompt of the request failed: {error}"))
