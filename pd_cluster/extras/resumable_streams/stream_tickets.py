"""Makes resume tokens, and the record from which a scheduler repeats the chunks of a stream.

See docs/protocol/requests.md, "Streams that resume". Knows nothing of HTTP or of the format of events.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pd_cluster import wire
from pd_cluster.api.routes.stream_resumption import Kind
from pd_cluster.cluster.streams.stream_records import KeptStream, RecordPlace
from pd_cluster.errors import RequestError
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.settings.resume_settings import ResumeSettings

TOKEN_NBYTES = 16
PURPOSE = b"pd-cluster stream "


class StreamNotFound(RequestError):
    status = 404

    def __init__(self) -> None:
        super().__init__(
            "no such stream: the token is wrong or belongs to another key, or the stream can no longer be resumed",
            code="stream_not_found",
        )


class ResumeRecord(msgspec.Struct, frozen=True, array_like=True):
    """All that an answer's chunks depend on, except RequestSpec and tokens. `body`: the request's original body."""

    kind: Kind
    body: bytes
    id: str
    created: int

    def __repr__(self) -> str:
        return "ResumeRecord(…)"


@dataclass(frozen=True, slots=True)
class StreamTicket:
    """A client's right to resume one stream. `after`: the index of the last event that it received; -1: none.

    `owner`: a pseudonym of the client's tenant, for limits by tenant.
    """

    token: str = field(repr=False)
    digest: bytes = field(repr=False)
    after: int = -1
    owner: bytes = b""

    @classmethod
    def of(cls, token: str, owner: str, after: int = -1) -> StreamTicket:
        """Makes the ticket of a resume token. `owner`: the tenant of the client's API key."""
        digest = hmac.digest(token.encode(), PURPOSE + owner.encode(), "sha256")
        return cls(token, digest, after, wire.owner_of(owner))

    @classmethod
    def new(cls, owner: str) -> StreamTicket:
        return cls.of(secrets.token_hex(TOKEN_NBYTES), owner)

    def draws(self) -> Callable[[int], bytes]:
        """Returns a source of bytes, which are the same whenever the stream is written again."""
        count = itertools.count()
        return lambda nbytes: hmac.digest(self.digest, f"draw {next(count)}".encode(), "sha256")[:nbytes]

    def fix_call_ids(self, generation: Generation) -> None:
        """Makes call ids reproducible; must be called before an answer is made from the generation."""
        generation.new_call_id = partial(generation.new_call_id, draw=self.draws())


class StreamKeeper:
    def __init__(self, settings: ResumeSettings) -> None:
        self._window_s, self._capacity_nbytes = settings.window_s, settings.memory_mib << 20
        self._outlives_client = not settings.is_for_schedulers

    def keep(
        self, generation: Generation, ticket: StreamTicket, recipe: ResumeRecord, place: RecordPlace | None = None
    ) -> None:
        """Keeps the generation's stream. `place`: the location of a stream that resumes."""
        written = msgspec.msgpack.encode(recipe)
        keep = wire.Keep(ticket.digest, self._window_s, self._capacity_nbytes, written, owner=ticket.owner)
        generation.kept = KeptStream(keep, place, outlives_client=self._outlives_client)
        if place is not None and place.found.order is not None:
            generation.resume(place.found.order)

    def recipe_of(self, place: RecordPlace) -> ResumeRecord:
        return msgspec.msgpack.decode(place.found.recipe, type=ResumeRecord)


def may_resume(generations: list[Generation]) -> bool:
    """Whether the chunks depend only on one sequence's tokens, and need little memory."""
    if len(generations) != 1:
        return False
    (generation,) = generations
    order, sampling = generation.order, generation.sampling
    is_single = sampling.n == 1 and not sampling.beam_width and sampling.prompt_logprobs is None
    return is_single and not order.images and not generation.is_prompt_only
