"""The protocol of streams that clients may resume, which the extra `resumable_streams` implements."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Literal, Protocol

from fastapi import APIRouter, Request

from pd_cluster import extra_table
from pd_cluster.errors import called
from pd_cluster.service.answers.openai_answer import Answer
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.schema.completion_protocol import GenerationRequest
from pd_cluster.service.text_service import TextService

Kind = Literal["chat", "completions"]


class ResumableStream(Protocol):
    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers with which a client can resume the stream."""

    def keep(self, kind: Kind, body: bytes, answer: Answer) -> None:
        """Records a new stream. `body`: the request's original body."""

    def numbered(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Gives each event of an answer its id, and leaves out events that the client already has."""


class StreamResumption(Protocol):
    def begin(self, http: Request, request: GenerationRequest, generations: list[Generation]) -> ResumableStream | None:
        """Returns a request's stream; None: it cannot be resumed. Must be called before its answer is made."""

    def routes(self) -> Iterable[APIRouter]: ...


class NoResumption:
    """No stream can be resumed."""

    def begin(self, http: Request, request: GenerationRequest, generations: list[Generation]) -> ResumableStream | None:
        return None

    def routes(self) -> Iterable[APIRouter]:
        return ()


def stream_resumption(service: TextService) -> StreamResumption:
    """Raises MissingExtra if a window is set without the extra."""
    if not service.settings.resume.window_s:
        return NoResumption()
    found: StreamResumption = extra_table.load(extra_table.STREAM_RESUMPTION, called("resume_window"))(service)
    return found
