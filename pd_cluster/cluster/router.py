"""A request across the cluster: two legs out, one ordered stream of tokens back. Read `Router.serve` first.

Runs on the scheduler's event loop. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.membership import Membership
from pd_cluster.errors import DeadlineExceeded, GenerationError, InstanceLost
from pd_cluster.mailbox import Mailbox
from pd_cluster.types import LegEnd, SamplingParams, TokenOutput

Choose = Callable[[list[Instance]], tuple[Instance, Instance]]


@dataclass(slots=True)
class Stream:
    """One request on its way. `arrived` holds tokens that came before an earlier one."""

    request_id: str
    attempt: int
    legs: dict[str, Instance]  # conn -> instance, of the legs that have not ended
    num_tokens: int  # what it counts as, for routing
    prefill: Instance
    decode: Instance
    num_delivered: int = 0
    arrived: dict[int, TokenOutput] = field(default_factory=dict)
    queue: asyncio.Queue[TokenOutput | Exception] = field(default_factory=asyncio.Queue)

    def put(self, token: TokenOutput) -> None:
        """Delivers in order of position; what was delivered already is dropped."""
        if token.attempt != self.attempt or token.position < self.num_delivered:
            return
        self.arrived.setdefault(token.position, token)
        while (next_token := self.arrived.pop(self.num_delivered, None)) is not None:
            self.num_delivered += 1
            self.queue.put_nowait(next_token)


class Router:
    def __init__(self, mailbox: Mailbox, choose: Choose, request_timeout_s: float) -> None:
        self._mailbox = mailbox
        self._choose = choose
        self._request_timeout_s = request_timeout_s
        self._streams: dict[str, Stream] = {}
        self._counter = itertools.count()
        self._life = secrets.token_hex(4)
        self.membership: Membership  # set by whoever builds both

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def serve(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        routed: Callable[[Instance, Instance], None] = lambda prefill, decode: None,
    ) -> AsyncIterator[TokenOutput]:
        """A request's whole life across the cluster. Every token once, in order; the last has a finish_reason.

        Raises Unavailable before the first token, GenerationError after it. Closing the iterator aborts both legs.
        """
        prefill, decode = self._choose(self.membership.instances)
        stream = self._dispatch(prefill, decode, prompt_token_ids, sampling)
        routed(prefill, decode)
        timeout_s = self._request_timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s if timeout_s else None
        try:
            while True:
                async with asyncio.timeout_at(deadline_s):
                    item = await stream.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        except TimeoutError:
            raise DeadlineExceeded(f"the request took longer than {timeout_s:g} s") from None
        finally:
            self._finish(stream)

    def _dispatch(
        self, prefill: Instance, decode: Instance, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> Stream:
        request_id = f"{self._life}-{next(self._counter)}"
        attempt = 0
        num_tokens = len(prompt_token_ids) + min(sampling.max_tokens, 256)
        legs = {prefill.conn: prefill, decode.conn: decode}
        stream = Stream(request_id, attempt, legs, num_tokens, prefill, decode)
        self._streams[request_id] = stream
        transfer_id = f"{request_id}-{attempt}"
        for instance, peer in ((prefill, decode), (decode, prefill)):
            instance.num_outstanding += 1
            instance.outstanding_tokens += num_tokens
            submit = wire.Submit(
                request_id,
                attempt,
                transfer_id,
                instance.role,
                peer.key,
                prompt_token_ids,
                sampling,
                self._request_timeout_s,
            )
            self._mailbox.send(instance.conn, submit)
        return stream

    def _finish(self, stream: Stream) -> None:
        """Aborts the legs that have not ended by themselves, and forgets the request."""
        if self._streams.pop(stream.request_id, None) is None:
            return
        for conn in list(stream.legs):
            self._mailbox.send(conn, wire.Abort(stream.request_id, stream.attempt))
            self._leg_ended(stream, conn)

    def _leg_ended(self, stream: Stream, conn: str) -> None:
        instance = stream.legs.pop(conn, None)
        if instance is not None:
            instance.num_outstanding -= 1
            instance.outstanding_tokens -= stream.num_tokens

    # ---- events from the workers

    def on_outputs(self, conn: str, outputs: wire.Outputs) -> None:
        for token in outputs.tokens:
            stream = self._streams.get(token.request_id)
            if stream is not None and token.attempt == stream.attempt and conn in stream.legs:
                if token.finish_reason is not None:
                    self._leg_ended(stream, conn)
                stream.put(token)
        for ended in outputs.ended:
            self._on_leg_end(conn, ended)

    def _on_leg_end(self, conn: str, ended: LegEnd) -> None:
        stream = self._streams.get(ended.request_id)
        if stream is None or ended.attempt != stream.attempt or conn not in stream.legs:
            return
        name = stream.legs[conn].name
        self._leg_ended(stream, conn)
        if ended.error is not None:
            stream.queue.put_nowait(GenerationError(f"{name}: {ended.error}"))

    def end_all(self) -> None:
        """This process stops: whatever still runs ends with an error in its stream."""
        for stream in self._streams.values():
            stream.queue.put_nowait(GenerationError("the server is shutting down"))

    def on_lost(self, instance: Instance, reason: str) -> None:
        """Every request with a leg there ends with an error that names the instance."""
        for stream in list(self._streams.values()):
            for conn in [conn for conn, member in stream.legs.items() if member is instance]:
                self._leg_ended(stream, conn)
                error = InstanceLost(f"{instance.name} was lost while it served this request: {reason}")
                stream.queue.put_nowait(error)
