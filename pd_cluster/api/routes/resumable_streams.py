"""Streams that clients may resume: the token in a header, and an id for each event."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from fastapi import Request

from pd_cluster.api.middleware.http_bodies import Last
from pd_cluster.api.middleware.http_callers import owner_of
from pd_cluster.service.answers.openai_answer import Answer
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.stream_resumption import Kind, ResumeRecord, StreamTicket, may_resume
from pd_cluster.service.schema.completion_protocol import GenerationRequest
from pd_cluster.service.text_service import TextService

TOKEN_HEADER = "x-pd-resume-token"
ERROR = b'data: {"error"'


def ticket_for(
    http: Request, service: TextService, request: GenerationRequest, generations: list[Generation]
) -> StreamTicket | None:
    """Returns the ticket to resume this request's stream, which fixes ids of tool calls; None: it cannot resume."""
    if not service.resumption.is_on or not request.stream:
        return None
    if request.kv_transfer_params or request.include_metrics or not may_resume(generations):
        return None
    ticket = StreamTicket.new(owner_of(http))
    ticket.fix_call_ids(generations[0])
    return ticket


def keep(service: TextService, ticket: StreamTicket, kind: Kind, body: bytes, answer: Answer) -> None:
    """Records a new stream, so that it can be resumed."""
    recipe = ResumeRecord(kind, body, *answer.identity)
    service.resumption.keep(answer.generations[0], ticket, recipe)


async def numbered(events: AsyncGenerator[bytes, None], ticket: StreamTicket) -> AsyncGenerator[bytes, None]:
    """Gives each event of an answer its id, and leaves out events that the client already has. Errors have no id."""
    index, has_failed = 0, False
    async with contextlib.aclosing(events):
        async for several in events:
            written = b""
            for each in several.split(b"\n\n")[:-1]:
                has_failed = has_failed or each.startswith(ERROR)
                if has_failed:
                    written += each + b"\n\n"
                    continue
                if index > ticket.after:
                    written += b"id: %s-%d\n%s\n\n" % (ticket.token.encode(), index, each)
                index += 1
            if type(several) is Last:
                yield Last(written)
            elif written:
                yield written
