"""An answer's stream that its client may resume: the token in a header, and an id for each event."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pd_cluster.api.middleware.http_bodies import Last
from pd_cluster.api.routes.stream_resumption import Kind
from pd_cluster.extras.resumable_streams.stream_tickets import ResumeRecord, StreamKeeper, StreamTicket
from pd_cluster.service.answers.openai_answer import Answer

TOKEN_HEADER = "x-pd-resume-token"
ERROR = b'data: {"error"'


@dataclass(frozen=True, slots=True)
class TicketedStream:
    """One answer's stream. Implements api.routes.stream_resumption.ResumableStream."""

    ticket: StreamTicket
    keeper: StreamKeeper

    @property
    def headers(self) -> dict[str, str]:
        return {TOKEN_HEADER: self.ticket.token}

    def keep(self, kind: Kind, body: bytes, answer: Answer) -> None:
        self.keeper.keep(answer.generations[0], self.ticket, ResumeRecord(kind, body, *answer.identity))

    def numbered(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        return numbered(events, self.ticket)


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
