"""A request across the cluster: two legs out, one stream of tokens back, every sequence of it in order.

Read `Router.serve` first. Runs on the scheduler's event loop. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.membership import Membership
from pd_cluster.cluster.timeline import Timelines
from pd_cluster.errors import DeadlineExceeded, GenerationError, InstanceLost, PdClusterError
from pd_cluster.mailbox import Mailbox
from pd_cluster.types import LegEnd, PromptOutput, SamplingParams, TokenOutput

Choose = Callable[[list[Instance]], tuple[Instance, Instance]]


@dataclass(slots=True)
class Sequence:
    """One of a request's n sequences. `arrived` holds tokens that came before an earlier one."""

    num_delivered: int = 0
    arrived: dict[int, TokenOutput] = field(default_factory=dict)
    is_finished: bool = False  # its last token has come, perhaps before others; or it was stopped
    is_over: bool = False  # its last token has been read, or it was stopped


@dataclass(slots=True)
class Stream:
    """One request on its way, and the reader's handle on it: who serves it, and `stop`."""

    request_id: str
    attempt: int
    legs: dict[str, Instance]  # conn -> instance, of the legs that have not ended
    num_tokens: int  # what it counts as, for routing
    prefill: Instance
    decode: Instance
    sequences: list[Sequence]
    send: Callable[[str, wire.Body], None]
    prompted: Callable[[PromptOutput], None] = lambda prompt: None
    is_prompted: bool = False
    has_prefill_spoken: bool = False  # and so has told of the prompt, which the first token must not come before
    queue: asyncio.Queue[TokenOutput | Exception | None] = field(default_factory=asyncio.Queue)

    def put(self, token: TokenOutput) -> None:
        """Takes a token, of whatever leg and in whatever order; what was delivered already is dropped."""
        if token.attempt != self.attempt or not 0 <= token.index < len(self.sequences):
            return
        sequence = self.sequences[token.index]
        if sequence.is_over or token.position < sequence.num_delivered:
            return
        sequence.arrived.setdefault(token.position, token)
        if token.finish_reason is not None:
            sequence.is_finished = True
        self.release([sequence])

    def release(self, sequences: list[Sequence]) -> None:
        """Delivers each sequence's tokens in order of position, once the prompt's own outputs must have come."""
        if not self.has_prefill_spoken and any(member is self.prefill for member in self.legs.values()):
            return
        for sequence in sequences:
            while (token := sequence.arrived.pop(sequence.num_delivered, None)) is not None:
                sequence.num_delivered += 1
                self.queue.put_nowait(token)

    def put_prompt(self, prompt: PromptOutput) -> None:
        if prompt.attempt == self.attempt and not self.is_prompted:
            self.is_prompted = True
            self.prompted(prompt)

    def take(self, token: TokenOutput) -> bool:
        """The reader gets this one; False when its sequence was stopped meanwhile."""
        sequence = self.sequences[token.index]
        if sequence.is_over:
            return False
        sequence.is_over = token.finish_reason is not None
        return True

    def stop(self, index: int) -> None:
        """Ends one sequence where the reader stands: its further tokens are dropped, wherever they are made."""
        sequence = self.sequences[index]
        if sequence.is_over:
            return
        sequence.is_finished = sequence.is_over = True
        sequence.arrived.clear()
        if self.is_over:
            self.queue.put_nowait(None)  # the last one: the whole request ends, and its legs with it
            return
        for conn in self.legs:
            self.send(conn, wire.Abort(self.request_id, self.attempt, index))

    @property
    def transfer_id(self) -> str:
        return f"{self.request_id}-{self.attempt}"

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        return all(sequence.is_over for sequence in self.sequences)


class Router:
    def __init__(self, mailbox: Mailbox, choose: Choose, request_timeout_s: float) -> None:
        self._mailbox = mailbox
        self._choose = choose
        self._request_timeout_s = request_timeout_s
        self._streams: dict[str, Stream] = {}
        self._counter = itertools.count()
        self._life = secrets.token_hex(4)
        self.timelines = Timelines()
        self.membership: Membership  # set by whoever builds both

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def serve(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        routed: Callable[[Stream], None] = lambda stream: None,
        prompted: Callable[[PromptOutput], None] = lambda prompt: None,
        cache_salt: str = "",
        client_id: str = "",
        received_s: float | None = None,
    ) -> AsyncIterator[TokenOutput]:
        """A request's whole life across the cluster. Every token of its n sequences once, each sequence in order.

        A sequence ends with a token that has a finish_reason, or when the reader calls `stop` of the stream that
        `routed` was given; the iterator ends when all have. `prompted` is called before the first token. Raises
        Unavailable before the first token, GenerationError after it. Closing the iterator aborts both legs.
        `client_id` and `received_s` are how the request is known outside and since when, for its timeline.
        """
        prefill, decode = self._choose(self.membership.instances)
        stream = self._open(prefill, decode, len(prompt_token_ids), sampling)
        self._open_timeline(stream, client_id, received_s, len(prompt_token_ids))
        self._submit(stream, prompt_token_ids, sampling, cache_salt)
        stream.prompted = prompted
        routed(stream)
        timeout_s = self._request_timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s if timeout_s else None
        is_first = True
        try:
            while not stream.is_over:
                async with asyncio.timeout_at(deadline_s):
                    item = await stream.queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is not None and stream.take(item):
                    if is_first:
                        self.timelines.first_token(stream.request_id)
                        is_first = False
                    yield item
        except TimeoutError:
            raise DeadlineExceeded(f"the request took longer than {timeout_s:g} s") from None
        finally:
            self._finish(stream)
            self.timelines.ended(stream.request_id, "" if stream.is_over else _why(sys.exception()))

    def _open_timeline(self, stream: Stream, client_id: str, received_s: float | None, num_prompt_tokens: int) -> None:
        prefill, decode = ((instance.conn, instance.name) for instance in (stream.prefill, stream.decode))
        self.timelines.routed(
            stream.request_id, stream.transfer_id, client_id, received_s, num_prompt_tokens, prefill, decode
        )

    def _open(self, prefill: Instance, decode: Instance, num_prompt_tokens: int, sampling: SamplingParams) -> Stream:
        request_id = f"{self._life}-{next(self._counter)}"
        attempt = 0
        num_tokens = num_prompt_tokens + sampling.num_sequences * min(sampling.max_tokens, 256)
        legs = {prefill.conn: prefill, decode.conn: decode}
        sequences = [Sequence() for _ in range(sampling.n)]
        stream = Stream(request_id, attempt, legs, num_tokens, prefill, decode, sequences, self._mailbox.send)
        self._streams[request_id] = stream
        return stream

    def _submit(self, stream: Stream, prompt_token_ids: list[int], sampling: SamplingParams, cache_salt: str) -> None:
        """Both legs out, each with the other's place."""
        for instance, peer in ((stream.prefill, stream.decode), (stream.decode, stream.prefill)):
            instance.num_outstanding += 1
            instance.outstanding_tokens += stream.num_tokens
            submit = wire.Submit(
                stream.request_id,
                stream.attempt,
                stream.transfer_id,
                instance.role,
                peer.key,
                prompt_token_ids,
                sampling,
                self._request_timeout_s,
                cache_salt,
            )
            self._mailbox.send(instance.conn, submit)

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
        for prompt in outputs.prompts:
            if (stream := self._stream_of(conn, prompt)) is not None:
                stream.put_prompt(prompt)
                stream.release(stream.sequences)
        for token in outputs.tokens:
            if (stream := self._stream_of(conn, token)) is not None:
                stream.put(token)
                if token.finish_reason is not None and stream.is_finished:
                    self._leg_ended(stream, conn)
        for ended in outputs.ended:
            self._on_leg_end(conn, ended)
        self.timelines.add(conn, outputs.events)

    def _stream_of(self, conn: str, output: TokenOutput | PromptOutput | LegEnd) -> Stream | None:
        """The stream that this output of this leg belongs to, if it is still wanted."""
        stream = self._streams.get(output.request_id)
        if stream is None or output.attempt != stream.attempt or conn not in stream.legs:
            return None
        if stream.legs[conn] is stream.prefill:
            stream.has_prefill_spoken = True
        return stream

    def _on_leg_end(self, conn: str, ended: LegEnd) -> None:
        if (stream := self._stream_of(conn, ended)) is None:
            return
        name = stream.legs[conn].name
        self._leg_ended(stream, conn)
        stream.release(stream.sequences)
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


def _why(error: BaseException | None) -> str:
    """Why a request ended before all its sequences had; no error of ours means that nobody reads any more."""
    return str(error) if isinstance(error, PdClusterError) else "the client left before the end"
