"""Submits, ends and aborts streams' legs at instances, and counts the load that they add there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import Members
from pd_cluster.cluster.placement.encoder_choice import choose_encoders
from pd_cluster.cluster.placement.pull_sources import PrefixPull, PullSources, are_linked
from pd_cluster.cluster.streams.request_stream import RequestStream, Send
from pd_cluster.cluster.streams.stream_records import RecordPlace
from pd_cluster.cluster.streams.stream_table import StreamEnd, StreamTable
from pd_cluster.types import Leg


class LegDispatch:
    """Listens to `streams`. `shares_workers`: other schedulers use the same instances."""

    def __init__(self, streams: StreamTable, send: Send, membership: Members, shares_workers: bool = False) -> None:
        self._streams, self._send, self._membership = streams, send, membership
        self._shares_workers = shares_workers
        streams.on_attempt_over.append(self._on_attempt_over)
        streams.on_ended.append(self._on_ended)

    def _on_attempt_over(self, stream: RequestStream) -> None:
        self._abort(stream)

    def _on_ended(self, stream: RequestStream, end: StreamEnd) -> None:
        if end.then == "leave":
            self._leave(stream)
        elif end.then == "abort":
            self._abort(stream)
        else:
            self._release(stream, end.then)

    def submit(self, stream: RequestStream, deadline_s: float) -> None:
        """Submits a prefill and a decode leg, each of which names the other's instance, or one leg that does both.

        `deadline_s`: seconds from now; 0: none.
        """
        prefill, decode = stream.prefill, stream.decode
        if decode.info is not None and not stream.resumed():
            stream.numerics = decode.info.numerics
        weights = decode.load.weights.held
        stream.note_weights(weights.name)
        stream.has_prompt_outputs = False
        legs: list[tuple[Instance, Leg, str]] = [(prefill, "prefill", decode.key), (decode, "decode", prefill.key)]
        if prefill is decode:
            legs = [(decode, "hybrid", "")]
        encoders = (
            choose_encoders(stream.order, prefill, self._membership.instances) if prefill.role == "prefill" else []
        )
        self._begin_encoding(stream, encoders)
        pull = self._pull(stream)
        if pull is not None and pull.hint.wakes:
            self._send(pull.source.conn, wire.Wake(prefill.key))
        for instance, leg, peer in legs:
            saved = pull if instance is prefill else None
            weight = self._count(stream, instance, leg, saved.num_saved if saved is not None else 0)
            submit = wire.Submit(
                stream.request_id,
                stream.attempt,
                stream.transfer_id,
                leg,
                peer,
                stream.order.without_pixels() if leg == "decode" else stream.order,
                deadline_s,
                stream.resumed(),
                max(1, weight),  # 0 would hide the leg from other processes
                self._shares_workers and not stream.resumed(),
                [each.key for each in encoders] if instance is prefill else [],
                stream.kept.of_next_attempt() if stream.kept is not None and leg != "prefill" else None,
                stream.owner,
                saved.hint if saved is not None else None,
                weights.epoch,
            )
            self._send(instance.conn, submit)

    def _pull(self, stream: RequestStream) -> PrefixPull | None:
        """Returns a pull of the prompt's prefix from a peer; None if computing the prefix is quicker."""
        prefill, instances = stream.prefill, self._membership.instances
        if prefill is stream.decode or stream.ask.is_pooling or not are_linked(instances, prefill):
            return None
        return PullSources(instances, stream.ask.prompt).to(prefill)

    def attach(self, stream: RequestStream, place: RecordPlace) -> None:
        """Attaches a resuming stream to its running leg."""
        self._count(stream, place.instance, "hybrid")
        found = place.found
        self._send(place.instance.conn, wire.Attach(found.digest, found.request_id, found.attempt))

    def _release(self, stream: RequestStream, then: Literal["go on", "stop", "forget"]) -> None:
        """Stops reading a kept stream. Aborts its other legs, unless the stream goes on without a reader."""
        if conn := stream.decode.conn:
            self._send(conn, wire.Release(stream.request_id, stream.attempt, then))
        self.ended(stream, stream.decode.conn)
        if then == "go on":
            self._leave(stream)
        else:
            self._abort(stream)

    def _leave(self, stream: RequestStream) -> None:
        """Forgets the legs that have not ended, without aborting them."""
        for conn in list(stream.legs):
            self.ended(stream, conn)

    def _count(self, stream: RequestStream, instance: Instance, leg: Leg, num_saved: int = 0) -> int:
        """Adds a leg to the stream and to its instance's load; returns its weight. `num_saved`: tokens of a pull."""
        stream.legs[instance.conn] = instance
        stream.weights[instance.conn] = weight = stream.ask.weight(instance, leg) - num_saved
        instance.num_outstanding += 1
        instance.outstanding_tokens += weight
        instance.num_sequences += stream.num_decoding(instance)
        if leg != "decode" and len(stream.order.prompt_token_ids) > instance.long_from:
            stream.long_legs.add(instance.conn)
            instance.num_long += 1
            instance.long_tokens += weight
        return weight

    def _abort(self, stream: RequestStream) -> None:
        """Aborts the legs that have not ended."""
        for conn in list(stream.legs):
            self._send(conn, wire.Abort(stream.request_id, stream.attempt))
            self.ended(stream, conn)

    def ended(self, stream: RequestStream, conn: str) -> None:
        instance = stream.legs.pop(conn, None)
        if instance is not None:
            instance.num_outstanding -= 1
            instance.outstanding_tokens -= (weight := stream.weights.pop(conn))
            if conn in stream.long_legs:
                stream.long_legs.remove(conn)
                instance.num_long -= 1
                instance.long_tokens -= weight
            instance.num_sequences -= stream.num_decoding(instance)
            if instance is stream.prefill:
                self._end_encoding(stream)
            self._streams.leg_ended()

    def _begin_encoding(self, stream: RequestStream, encoders: Sequence[Instance]) -> None:
        """Adds a prompt's images to the load of their encoders until the prompt's leg has ended."""
        self._end_encoding(stream)
        for encoder, span in zip(encoders, stream.order.spans, strict=False):  # `encoders` may be empty
            num_tokens = span.stop - span.start
            encoder.num_outstanding += 1
            encoder.outstanding_tokens += num_tokens
            stream.encoding.append((encoder, num_tokens))

    def _end_encoding(self, stream: RequestStream) -> None:
        for encoder, num_tokens in stream.encoding:
            encoder.num_outstanding -= 1
            encoder.outstanding_tokens -= num_tokens
        stream.encoding.clear()
