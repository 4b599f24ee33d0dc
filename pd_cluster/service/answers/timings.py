"""When the tokens of an answer came, in the fields that vLLM shows to the client of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from pd_cluster.cluster.routing.timeline import Timelines
from pd_cluster.service.generation import Generation

MS = 1000.0


class RequestTimings(Struct):
    time_to_first_token_ms: float
    generation_time_ms: Annotated[float, Meta(description="From the first token until the last.")]
    queue_time_ms: Annotated[float | None, Meta(description="Until a prefill instance had room; null: not reported.")]
    mean_itl_ms: Annotated[float | None, Meta(description="Between two tokens; null if there is one.")]
    tokens_per_second: Annotated[float | None, Meta(description="After the first token.")]


def timings_of(generations: Sequence[Generation], timelines: Timelines) -> RequestTimings | None:
    """Returns times in milliseconds; None for more than one answer, whose tokens would be mixed.

    `tokens_per_second` is the rate after the first token. A time that was not measured is null.
    """
    stream = generations[0].stream
    if len(generations) > 1 or stream is None or len(stream.sequences) > 1 or not stream.first_s:
        return None
    timeline = timelines.find(stream.request_id)
    admitted_s = timeline.admitted_s(stream.first_s) if timeline is not None else None
    generation_s, num_more = stream.sequences[0].last_s - stream.first_s, stream.sequences[0].num_taken - 1
    first_s = stream.first_s - stream.received_s
    waited_s = None if admitted_s is None else min(max(0.0, admitted_s - stream.received_s), first_s)
    return RequestTimings(
        time_to_first_token_ms=MS * first_s,
        generation_time_ms=MS * generation_s,
        queue_time_ms=None if waited_s is None else MS * waited_s,
        mean_itl_ms=MS * generation_s / num_more if num_more > 0 else None,
        tokens_per_second=num_more / generation_s if num_more > 0 and generation_s else None,
    )
