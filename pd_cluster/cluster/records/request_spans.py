"""Describes the parts of a request as spans of a trace: its wait, its attempts, and in each attempt prefill, handover
and decode.

queue
    attempt 0 ─ prefill (at P) · handover (P to D) · decode (at D)
    attempt 1 ─ generate                                             after a replay, both at one instance

The spans are made from a timeline once the request has ended. If a part's end was not reported, because its process was
killed, the part ends with its attempt. Knows nothing of trace ids, of exporters or of the request's own span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pd_cluster.cluster.records.request_stats import Outcome
from pd_cluster.cluster.records.request_timeline import Timeline

Value = str | int | float | bool | Sequence[str]
ENDS = ("finished", "failed")


class Names:
    """Names of all span attributes. Those of `gen_ai` are OpenTelemetry's semantic conventions, which may still
    change.
    """

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    RESPONSE_MODEL = "gen_ai.response.model"
    RESPONSE_ID = "gen_ai.response.id"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    TIME_TO_FIRST = "gen_ai.response.time_to_first_chunk"
    METHOD = "http.request.method"
    PATH = "url.path"
    STATUS = "http.response.status_code"
    ERROR = "error.type"
    INSTANCE = "pd_cluster.instance"
    SENDER = "pd_cluster.handover.from"
    ATTEMPT = "pd_cluster.attempt"
    TRANSFER_ID = "pd_cluster.transfer_id"
    NUM_TOKENS = "pd_cluster.num_tokens"
    NUM_CACHED = "pd_cluster.num_cached_tokens"
    NUM_BYTES = "pd_cluster.num_bytes"
    UNREPORTED = "pd_cluster.end_unreported"
    ENDED = "pd_cluster.ended"


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Times are by the timeline's clock. `error`: why the span failed, or "". `parts`: spans within this one."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    events: list[tuple[float, str, dict[str, int]]] = field(default_factory=list)
    parts: list[TraceSpan] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Leg:
    """The events of one attempt that one worker reported, in order."""

    instance: str
    events: list[tuple[float, str, dict[str, int]]]

    def first(self, *whats: str) -> float | None:
        return next((at_s for at_s, what, _ in self.events if what in whats), None)

    def total(self, what: str, number: str) -> int:
        return sum(numbers.get(number, 0) for _, each, numbers in self.events if each == what)


def usage_of(timelines: Sequence[tuple[Timeline, Outcome]]) -> dict[str, Value]:
    """Returns the attributes of a request's own span; each of its prompts has a timeline."""
    outcomes = [outcome for _, outcome in timelines]
    cached = [each.num_cached_tokens for each in outcomes if each.num_cached_tokens is not None]
    firsts_s = [each.first_token_s - each.received_s for each in outcomes if each.first_token_s]
    found: dict[str, Value] = {
        Names.INPUT_TOKENS: sum(each.num_prompt_tokens for each in outcomes),
        Names.OUTPUT_TOKENS: sum(sum(each.num_output_tokens) for each in outcomes),
        Names.FINISH_REASONS: [reason for each in outcomes for reason in each.reasons],
    }
    if cached:
        found[Names.CACHED_TOKENS] = sum(cached)
    if firsts_s:
        found[Names.TIME_TO_FIRST] = min(firsts_s)
    return found


def is_reported(timeline: Timeline) -> bool:
    """Whether all workers of the last attempt have reported its end; killed ones never do."""
    last = [(clock.conn, event.what) for clock, event in timeline.others if event.transfer_id == timeline.ids[-1]]
    begun, ended = {conn for conn, _ in last}, {conn for conn, what in last if what in ENDS}
    return bool(begun) and begun == ended


def has_failed(outcome: Outcome) -> bool:
    """Whether the request ended with an error; a client that leaves is not an error."""
    return "error" in outcome.reasons


def spans_of(timeline: Timeline, outcome: Outcome | None = None) -> list[TraceSpan]:
    """Returns the spans below the request's own, in order of time. Without an outcome, the timeline's error counts."""
    routed_s = next(at_s for at_s, what in timeline.own if what == "routed")
    ended_s = timeline.ended_s if timeline.ended_s is not None else routed_s
    starts_s = [routed_s, *(at_s for at_s, what in timeline.own if what == "replayed")]
    is_fault = outcome is None or has_failed(outcome)
    errors = [*timeline.reasons, timeline.error if is_fault else ""]
    transfer_ids = timeline.ids[-len(starts_s) :]
    found = [TraceSpan("queue", timeline.received_s, routed_s)]
    for at, (transfer_id, start_s) in enumerate(zip(transfer_ids, starts_s, strict=True)):
        end_s = starts_s[at + 1] if at + 1 < len(starts_s) else ended_s
        names: dict[str, Value] = {Names.ATTEMPT: at, Names.TRANSFER_ID: transfer_id}
        if at + 1 == len(starts_s) and timeline.error and not is_fault:
            names[Names.ENDED] = timeline.error
        legs = list(_legs(timeline, transfer_id))
        parts = [_within(part, start_s, end_s) for part in _parts(legs, end_s)]
        if not errors[at]:  # a part without an end is then no error: an answer can be complete before its handover
            parts = [replace(part, error="") if Names.UNREPORTED in part.attributes else part for part in parts]
        parts.sort(key=lambda part: part.start_s)
        found.append(TraceSpan("attempt", start_s, end_s, names, errors[at], parts=parts))
    return found


def _legs(timeline: Timeline, transfer_id: str) -> Iterable[_Leg]:
    for conn, name in timeline.members.items():
        of_conn = [(clock.offset_s, e) for clock, e in timeline.others if clock.conn == conn]
        events = [(e.at_s + offset_s, e.what, e.numbers) for offset_s, e in of_conn if e.transfer_id == transfer_id]
        if events:
            yield _Leg(name, sorted(events, key=lambda event: event[0]))


def _parts(legs: list[_Leg], end_s: float) -> Iterable[TraceSpan]:
    receiver = next((leg for leg in legs if leg.first("landed", "landing complete", "decode start") is not None), None)
    for leg in legs:
        admitted_s, decode_s = leg.first("admitted"), leg.first("decode start")
        if leg.first("offered", "chunk", "decode start") is None and len(legs) == 1:
            numbers: dict[str, Value] = {Names.NUM_TOKENS: leg.total("finished", "num_tokens")}
            name = "generate" if numbers[Names.NUM_TOKENS] or leg.first("finished") is None else "prefill"
            yield _part(name, leg, _Times(leg.events[0][0], leg.first(*ENDS), end_s), numbers)
            continue
        if admitted_s is not None:
            done_s = leg.first("first token", *(() if decode_s is None else ("decode start",)), *ENDS)
            start_s = leg.first("submitted", "admitted") or admitted_s
            numbers = {
                Names.NUM_TOKENS: leg.total("admitted", "num_tokens"),
                Names.NUM_CACHED: leg.total("admitted", "num_cached"),
            }
            chunks = [event for event in leg.events if event[1] in ("admitted", "chunk")]
            yield _part("prefill", leg, _Times(start_s, done_s, end_s), numbers, chunks)
        if leg.first("offered") is not None and (
            leg is receiver or (receiver is None and leg.first("credited", "sent"))
        ):
            yield _handover(leg, legs, end_s)
        if decode_s is not None:
            numbers = {Names.NUM_TOKENS: leg.total("finished", "num_tokens")}
            yield _part("decode", leg, _Times(decode_s, leg.first(*ENDS), end_s), numbers)


def _handover(leg: _Leg, legs: list[_Leg], end_s: float) -> TraceSpan:
    """Returns the span from offer to confirmation, by the receiver's clock, or the sender's if the receiver reported
    nothing.
    """
    start_s = leg.first("offered")
    assert start_s is not None
    numbers: dict[str, Value] = {Names.NUM_BYTES: leg.total("landed", "nbytes") or leg.total("sent", "nbytes")}
    sender = next((each.instance for each in legs if each.first("admitted") is not None), "")
    if sender and sender != leg.instance:
        numbers[Names.SENDER] = sender
    events = [event for event in leg.events if event[1] in ("credited", "landing complete")]
    return _part("handover", leg, _Times(start_s, leg.first("confirmed", "failed"), end_s), numbers, events)


class _Times(NamedTuple):
    """When a part began and was done; `done_s` None: no end was reported. `end_s`: the end of its attempt."""

    start_s: float
    done_s: float | None
    end_s: float


def _part(
    name: str,
    leg: _Leg,
    times: _Times,
    numbers: dict[str, Value],
    events: list[tuple[float, str, dict[str, int]]] | None = None,
) -> TraceSpan:
    attributes: dict[str, Value] = {Names.INSTANCE: leg.instance, **numbers}
    error, failed_s, (start_s, done_s, end_s) = "", leg.first("failed"), times
    if done_s is None:
        attributes[Names.UNREPORTED] = True
        error = f"{leg.instance} did not report an end"
    elif failed_s is not None and failed_s <= done_s:
        error = f"{leg.instance} failed"
    return TraceSpan(name, start_s, end_s if done_s is None else done_s, attributes, error, events or [])


def _within(part: TraceSpan, start_s: float, end_s: float) -> TraceSpan:
    """Clips a part to its attempt, because clocks of two hosts agree only within a message's travel time."""
    begin_s = min(max(part.start_s, start_s), end_s)
    until_s = max(begin_s, min(part.end_s, end_s))
    events = [(min(max(at_s, begin_s), until_s), what, numbers) for at_s, what, numbers in part.events]
    return replace(part, start_s=begin_s, end_s=until_s, events=events)
