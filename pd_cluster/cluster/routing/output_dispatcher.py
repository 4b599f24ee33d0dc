"""Delivers workers' outputs to their streams."""

from __future__ import annotations

from pd_cluster import wire
from pd_cluster.cluster.records.request_timeline import Timelines
from pd_cluster.cluster.routing.first_token_hold import hold_s
from pd_cluster.cluster.routing.leg_dispatch import LegDispatch
from pd_cluster.cluster.routing.message_slices import MessageSlices
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.cluster.streams.stream_table import StreamTable
from pd_cluster.errors import GenerationError, RequestError
from pd_cluster.types import LegEnd, PooledOutput, PromptOutput, TokenOutput


class OutputDispatcher:
    """Listens to `streams`. `holds_first`: first tokens wait for decode; see first_token_hold.py."""

    def __init__(self, streams: StreamTable, dispatch: LegDispatch, timelines: Timelines, holds_first: bool) -> None:
        self._streams, self._dispatch, self._timelines, self._holds_first = streams, dispatch, timelines, holds_first
        self._slices = MessageSlices(self._handle)
        streams.on_opened.append(self._on_opened)

    def _on_opened(self, stream: RequestStream) -> None:
        """When a stream resumes, drops the outputs that waited for its earlier reader."""
        if stream.kept is not None and stream.kept.place is not None:
            self._slices.forget(stream.request_id)

    def add_at_once(self, conn: str, outputs: wire.Outputs) -> None:
        """Handles outputs without slicing them; for processes whose event loop has no other work."""
        self._handle(conn, outputs, self._timelines.now_s())

    def add(self, conn: str, outputs: wire.Outputs, heard_s: float | None = None) -> None:
        """Handles outputs; `heard_s`: when they were read, by the timelines' clock; None: just now."""
        self._slices.add(conn, outputs, self._timelines.now_s() if heard_s is None else heard_s)

    def _handle(self, conn: str, outputs: wire.Outputs, heard_s: float) -> None:
        for prompt in outputs.prompts:
            if (stream := self._stream_of(conn, prompt)) is not None:
                stream.put_prompt(prompt)
                stream.release(stream.sequences)
        for token in outputs.tokens:
            if (stream := self._stream_of(conn, token)) is not None:
                if not token.position:
                    self._first_came(stream, conn, token)
                stream.put(token)
                if not stream.heard_s:
                    stream.heard_s = heard_s
                if token.finish_reason is not None and stream.is_finished:
                    self._dispatch.ended(stream, conn)
                elif len(stream.inbox) > stream.max_unread:
                    self._streams.give_up(stream)
        for pooled in outputs.pooled:
            if (stream := self._stream_of(conn, pooled)) is not None:
                stream.put_pooled(pooled)
                self._dispatch.ended(stream, conn)
        for ended in outputs.ended:
            self._on_leg_end(conn, ended)
        self._timelines.add(conn, outputs.events)

    def _first_came(self, stream: RequestStream, conn: str, token: TokenOutput) -> None:
        """Holds prefill's first token for decode, and ends the hold when decode reports the token itself."""
        if stream.legs[conn] is stream.decode:
            stream.let_go()
        elif self._holds_first and (wait_s := hold_s(stream, conn, token)):
            stream.hold(wait_s)

    def _stream_of(self, conn: str, output: TokenOutput | PromptOutput | PooledOutput | LegEnd) -> RequestStream | None:
        """Returns the stream of this output; None if the stream has ended or no longer has this leg."""
        stream = self._streams.find(output.request_id)
        if stream is None or output.attempt != stream.attempt or conn not in stream.legs:
            return None
        if stream.legs[conn] is stream.prefill and not stream.has_prompt_outputs:
            stream.has_prompt_outputs = True
            if not isinstance(output, PromptOutput):
                stream.release(stream.sequences)  # decode's tokens, which waited for the prompt's outputs
        return stream

    def _on_leg_end(self, conn: str, ended: LegEnd) -> None:
        if (stream := self._stream_of(conn, ended)) is None:
            later = self._streams.find(ended.request_id) if ended.is_taken else None
            # the stream is already looking for another instance, or has one
            if later is not None and later.attempt > ended.attempt:
                self._streams.take_over(later, "go on")
            return
        name = stream.legs[conn].name
        self._dispatch.ended(stream, conn)
        stream.release(stream.sequences)
        if ended.error is not None:
            error = GenerationError(f"{name}: {ended.error}")
            if ended.is_taken:
                self._streams.take_over(stream, "leave")
            elif ended.is_refusal:
                stream.inbox.put(RequestError(ended.error))
            elif ended.is_full:
                stream.num_moves += 1
                self._streams.retreat(stream, error, "full")
            elif ended.is_fault:
                stream.ask.avoid.add((stream.prefill.key, stream.decode.key))
                self._streams.retreat(stream, error, "fault")
            else:
                stream.inbox.put(error)
