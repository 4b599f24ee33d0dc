"""Makes a timeline's chart: rows of bars on an axis of milliseconds. Knows nothing of how it is drawn.

Each row shows a kind of work, as bars between two events of one process. A long decode is cut off, so that the part
before it remains visible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pd_cluster.result_tables import human_nbytes

Event = dict[str, Any]
WORDS = {
    "num_tokens": "{} tokens",
    "num_cached": "{} cached",
    "first_token": "from token {} on",
    "num_drafted": "{} drafted",
    "num_accepted": "{} accepted",
}
LONG_DECODE = 3  # multiple of the duration before the decode; a longer decode is cut off
LEAD = 1.3  # the shown duration of a cut chart, as a multiple of the duration before the decode


@dataclass(frozen=True, slots=True)
class Bar:
    start_ms: float
    stop_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """`note`: details that the bars do not show, such as the total duration and amounts."""

    name: str
    bars: list[Bar]
    note: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the whole request."""

    at_ms: float
    name: str


@dataclass(frozen=True, slots=True)
class Chart:
    rows: list[Row]
    marks: list[Mark]
    end_ms: float
    shown_ms: float  # `end_ms`, or the time at which a long decode is cut off


def chart_of(timeline: dict[str, Any]) -> Chart:
    """Makes a chart from the body of `/requests/{id}/timeline`. Rows without events have no bars."""
    events: list[Event] = timeline["events"]
    p = [event for event in events if event["who"] == timeline["prefill"]]
    d = [event for event in events if event["who"] == timeline["decode"]]
    s = [event for event in events if event["who"] == "scheduler"]
    end_ms = max([event["at_ms"] for event in events], default=0.0)
    decode = _span("decode", d, "decode start", "finished", end_ms, _num_tokens)
    rows = [
        _span("scheduler queue", s, "received", "routed", end_ms),
        _span("prefill queue", p, "submitted", "admitted", end_ms),
        _repeated("compute chunks", p, "chunk", _prompt_tokens),
        _span("offer to credit", p, "offered", "credited", end_ms),
        _repeated("KV groups sent", p, "sent", _nbytes),
        _repeated("KV groups landed", d, "landed", _nbytes),
        _span("confirm", d, "landing complete", "confirmed", end_ms),
        decode,
    ]
    marks = [Mark(e["at_ms"], "first token") for e in s if e["what"] == "first token"]
    marks += [Mark(e["at_ms"], "failed") for e in events if e["what"] == "failed"][:1]
    return Chart(rows, marks, end_ms, _shown_ms(decode, end_ms))


def details_of(event: Event) -> str:
    """Describes an event's numbers in words that fit a table's cell."""
    numbers = dict(event["numbers"])
    parts = []
    for what, first, number in (("tokens", "start", "stop"), ("layers", "first_layer", "num_layers")):
        if first in numbers and number in numbers:
            start, stop = numbers.pop(first), numbers.pop(number)
            parts.append(f"{what} {start}-{(stop if number == 'stop' else start + stop) - 1}")
    if (nbytes := numbers.pop("nbytes", None)) is not None:
        parts.append(human_nbytes(nbytes))
    if (took_us := numbers.pop("took_us", None)) is not None:
        parts.append(f"took {took_us / 1000:.1f} ms")
    return ", ".join(parts + [WORDS.get(name, f"{name} {{}}").format(number) for name, number in numbers.items()])


def _shown_ms(decode: Row, end_ms: float) -> float:
    before_ms = decode.bars[0].start_ms if decode.bars else end_ms
    return LEAD * before_ms if end_ms - before_ms > LONG_DECODE * before_ms > 0 else end_ms


def _span(
    name: str,
    events: list[Event],
    start: str,
    stop: str,
    end_ms: float,
    also: Callable[[list[Event]], str] = lambda found: "",
) -> Row:
    """Returns a bar from the first `start` to the first `stop`, or to the last known event if `stop` is missing."""
    start_ms = next((e["at_ms"] for e in events if e["what"] == start), None)
    if start_ms is None:
        return Row(name, [], "")
    stops = [e for e in events if e["what"] == stop]
    stop_ms = max(start_ms, stops[0]["at_ms"]) if stops else max(start_ms, end_ms)
    length = f"{stop_ms - start_ms:,.1f} ms" if stops else f"{stop_ms - start_ms:,.1f} ms, not over"
    return Row(name, [Bar(start_ms, stop_ms)], ", ".join(filter(None, [length, also(stops)])))


def _repeated(name: str, events: list[Event], what: str, also: Callable[[list[Event]], str]) -> Row:
    """Returns a bar for each event; an event without a duration has length 0."""
    found = [e for e in events if e["what"] == what]
    bars = [Bar(e["at_ms"] - e["numbers"].get("took_us", 0) / 1000, e["at_ms"]) for e in found]
    return Row(name, bars, f"{also(found)} in {len(found)}" if found else "")


def _nbytes(found: list[Event]) -> str:
    return human_nbytes(sum(e["numbers"].get("nbytes", 0) for e in found))


def _prompt_tokens(found: list[Event]) -> str:
    return f"{sum(e['numbers'].get('stop', 0) - e['numbers'].get('start', 0) for e in found):,} tokens"


def _num_tokens(found: list[Event]) -> str:
    """Describes the tokens of an answer, and the draft tokens that were verified for it."""
    if not found:
        return ""
    numbers = found[0]["numbers"]
    drafted = numbers.get("num_drafted", 0)
    drafts = f", {numbers.get('num_accepted', 0):,} of {drafted:,} drafted accepted" if drafted else ""
    return f"{numbers.get('num_tokens', 0):,} tokens{drafts}"
