"""Describes streams that resume: the record that an instance keeps of each, and the search for it.

See docs/protocol/requests.md, "Streams that resume". Knows nothing of text, of HTTP, or of how the router tracks a
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import Members
from pd_cluster.errors import Overloaded, Unavailable
from pd_cluster.types import PromptOutput, TokenOutput

SOME_AWAY = "an instance that may have the stream does not answer; ask again"
MOST_SEARCHES = 256
MOST_SENT_NBYTES = 64 << 20  # the largest record, as `--resume-memory` measures it; its message has fewer bytes


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The instance where a stream's record was found."""

    instance: Instance
    found: wire.Found = field(repr=False)


@dataclass(slots=True)
class KeptStream:
    """A stream that an instance keeps. `place`: where the record was found, for a stream that resumes.

    `outlives_client`: whether it continues after its client has left.
    """

    keep: wire.Keep = field(repr=False)
    place: RecordPlace | None = None
    outlives_client: bool = True
    prompt: PromptOutput | None = field(default=None, repr=False)
    tokens: list[TokenOutput] = field(default_factory=list, repr=False)  # delivered so far

    def of_next_attempt(self) -> wire.Keep | None:
        """Returns the record that the next instance must keep; None if it is too large."""
        if wire.nbytes_of(self.tokens) > min(self.keep.capacity_nbytes, MOST_SENT_NBYTES):
            return None
        return msgspec.structs.replace(self.keep, prompt=self.prompt, tokens=list(self.tokens))


@dataclass(slots=True, eq=False)
class _Search:
    waiting: dict[str, Instance]  # conn -> instance, for those that have not answered
    done: asyncio.Future[None]
    found: list[RecordPlace] = field(default_factory=list)
    is_whole: bool = True  # False once an instance that may have the record was lost

    def answered(self, conn: str) -> None:
        self.waiting.pop(conn, None)
        if not self.waiting and not self.done.done():
            self.done.set_result(None)


class RecordFinder:
    """Asks all ready instances that generate for a record. `longest_s`: the maximum wait for their answers."""

    def __init__(self, send: Callable[[str, wire.Body], None], membership: Members, longest_s: float) -> None:
        self._send, self._membership, self._longest_s = send, membership, longest_s
        self._searches: list[tuple[bytes, _Search]] = []
        membership.watch(self)

    async def find(self, digest: bytes) -> RecordPlace | None:
        """Returns the latest attempt's record, or None. Takes equally long in both cases.

        Raises Overloaded; Unavailable if no instance is ready, or one that was asked does not answer.
        """
        if len(self._searches) >= MOST_SEARCHES:
            raise Overloaded(f"{MOST_SEARCHES} searches for streams are under way", 1)
        asked = [each for each in self._membership.instances if each.is_ready and each.role != "encode"]
        ready = {each.conn: each for each in asked if each.conn}
        if not ready:
            raise Unavailable(SOME_AWAY)
        search = _Search(ready, asyncio.get_running_loop().create_future())
        self._searches.append((digest, search))
        try:
            for conn in list(ready):
                self._send(conn, wire.Find(digest))
            await asyncio.wait([search.done], timeout=self._longest_s)
        finally:
            self._searches.remove((digest, search))
        if not search.found and (search.waiting or not search.is_whole):
            raise Unavailable(SOME_AWAY)
        return max(search.found, key=lambda place: place.found.attempt, default=None)

    def on_found(self, conn: str, found: wire.Found) -> None:
        for digest, search in self._searches:
            if digest == found.digest and (instance := search.waiting.get(conn)) is not None:
                if found.order is not None:
                    search.found.append(RecordPlace(instance, found))
                search.answered(conn)

    def on_lost(self, instance: Instance, reason: str) -> None:
        """Stops waiting for the instance."""
        for _, search in self._searches:
            found = [place for place in search.found if place.instance is not instance]
            waiting = [conn for conn, each in search.waiting.items() if each is instance]
            if waiting or len(found) < len(search.found):
                search.found, search.is_whole = found, False
            for conn in waiting:
                search.answered(conn)

    def move_on(self, instance: Instance, why: str) -> None:
        """Does nothing: the instance still answers."""
