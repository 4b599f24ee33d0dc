"""The protocol of observers of generations, such as the log of requests (`extras/request_log`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pd_cluster import extra_table
from pd_cluster.errors import called
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.settings.request_log_settings import RequestLogSettings


class GenerationWatch(Protocol):
    def begins(self, generations: Sequence[Generation]) -> None:
        """Notes a prompt's generations before any of their tokens."""

    def ends(self, generations: Sequence[Generation], pieces: Sequence[Piece]) -> None:
        """Notes whole answers, one piece for each choice."""

    def watched(
        self, generations: Sequence[Generation], pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[Piece, None]:
        """Yields the pieces, and notes when the generations begin and end. Closing this generator closes `pieces`."""


def request_log(settings: RequestLogSettings) -> GenerationWatch | None:
    """Returns the log of requests; None if it is off. Raises MissingExtra."""
    if not settings.has_requests:
        return None
    made: GenerationWatch = extra_table.load(extra_table.REQUEST_LOG, called("enable_log_requests"))(settings)
    return made
