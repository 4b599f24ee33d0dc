"""Lets clients resume the streams of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter, Request

from pd_cluster.api.middleware.http_callers import owner_of
from pd_cluster.extras.resumable_streams.resume_routes import resume_routes
from pd_cluster.extras.resumable_streams.stream_tickets import StreamKeeper, StreamTicket, may_resume
from pd_cluster.extras.resumable_streams.ticketed_stream import TicketedStream
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.schema.completion_protocol import GenerationRequest
from pd_cluster.service.text_service import TextService


class ClientStreams:
    """Implements api.routes.stream_resumption.StreamResumption."""

    def __init__(self, service: TextService) -> None:
        self._service, self._keeper = service, StreamKeeper(service.settings.resume)

    def begin(self, http: Request, request: GenerationRequest, generations: list[Generation]) -> TicketedStream | None:
        """Also fixes the ids of tool calls, so that they are the same when the stream is written again."""
        if not request.stream or request.kv_transfer_params or request.include_metrics or not may_resume(generations):
            return None
        ticket = StreamTicket.new(owner_of(http))
        ticket.fix_call_ids(generations[0])
        return TicketedStream(ticket, self._keeper)

    def routes(self) -> list[APIRouter]:
        return [resume_routes(self._service, self._keeper)]
