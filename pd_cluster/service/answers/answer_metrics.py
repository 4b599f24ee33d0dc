"""Reports the times of an answer's tokens, and the results of its drafts, to clients in vLLM's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from pd_cluster.cluster.records.request_timeline import Timelines
from pd_cluster.service.generation.prompt_generation import Generation

MS = 1000.0


class SpeculativeMetrics(Struct, omit_defaults=True):
    """`acceptance_histogram[j]`: the number of steps with j accepted draft tokens."""

    mean_acceptance_length: Annotated[
        float, Meta(description="Mean tokens per step with drafts, including the last token.")
    ]
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: Annotated[int, Meta(description="Steps with drafts.")]
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: Annotated[int, Meta(description="Maximum number of draft tokens per step.")]
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class AnswerMetrics(Struct, kw_only=True):
    """Times of tokens and results of drafts. Times are set with `include_metrics`."""

    time_to_first_token_ms: float | UnsetType = UNSET
    generation_time_ms: Annotated[float | UnsetType, Meta(description="From the first token to the last.")] = UNSET
    queue_time_ms: Annotated[
        float | UnsetType | None, Meta(description="Until a prefill instance had capacity; null: not reported.")
    ] = UNSET
    mean_itl_ms: Annotated[
        float | UnsetType | None, Meta(description="Mean time between two tokens; null for a single token.")
    ] = UNSET
    tokens_per_second: Annotated[float | UnsetType | None, Meta(description="The rate after the first token.")] = UNSET
    speculative_decoding: Annotated[
        SpeculativeMetrics | UnsetType, Meta(description="With --per-request-spec-decode-metrics.")
    ] = UNSET


def with_drafts(
    metrics: AnswerMetrics | None, generations: Sequence[Generation], num_spec_tokens: int, is_detailed: bool
) -> AnswerMetrics | None:
    """Adds the results of drafts to the metrics; None for more than one answer."""
    generation = generations[0]
    if not generation.order.reports_drafts:
        return metrics
    told = drafts_of(generation.sequences[0].draft_steps, num_spec_tokens, is_detailed)
    return replace(metrics or AnswerMetrics(), speculative_decoding=told)


def drafts_of(steps: Sequence[tuple[int, int]], num_spec_tokens: int, is_detailed: bool) -> SpeculativeMetrics:
    """Summarizes drafted and accepted tokens by step, as vLLM 0.32 does."""
    drafted, accepted = [number for number, _ in steps], [number for _, number in steps]
    histogram = [0] * (max([num_spec_tokens, *drafted]) + 1)
    for number in accepted:
        histogram[number] += 1
    num_drafted, num_accepted = sum(drafted), sum(accepted)
    return SpeculativeMetrics(
        mean_acceptance_length=1 + num_accepted / max(1, len(steps)),
        draft_acceptance_rate=num_accepted / max(1, num_drafted),
        acceptance_histogram=histogram,
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=num_spec_tokens,
        per_step_accepted=accepted if is_detailed else None,
        per_step_drafted=drafted if is_detailed else None,
    )


def timings_of(generations: Sequence[Generation], timelines: Timelines) -> AnswerMetrics | None:
    """Returns times in milliseconds; None if there are several answers, whose times would be mixed.

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
    return AnswerMetrics(
        time_to_first_token_ms=MS * first_s,
        generation_time_ms=MS * generation_s,
        queue_time_ms=None if waited_s is None else MS * waited_s,
        mean_itl_ms=MS * generation_s / num_more if num_more > 0 else None,
        tokens_per_second=num_more / generation_s if num_more > 0 and generation_s else None,
    )
