"""Corrects the costs of prompts by the steps in the timelines of a cluster that serves requests. Pure.

An engine that only runs steps has the host's cores to itself. Served prompts take longer, because the scheduler, the
client and the transfer use the same cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from pd_cluster.costs.cost_fit import Sample, mean_error
from pd_cluster.costs.linear_costs import Costs, StepWork, num_pairs_of

Timeline = Mapping[str, Any]  # the answer of /requests/{id}/timeline
LEAST_FACTOR, MOST_FACTOR = 0.1, 100.0


def served_steps(timelines: Iterable[Timeline]) -> list[Sample]:
    """Returns the steps of prefill instances. Chunks with equal `took_us` are of one step."""
    works: dict[int, StepWork] = {}
    for timeline in timelines:
        for event in timeline["events"]:
            if event["what"] != "chunk" or event["who"] != timeline["prefill"]:
                continue
            start, stop, took_us = (event["numbers"][name] for name in ("start", "stop", "took_us"))
            known, num_tokens = works.get(took_us, StepWork()), stop - start
            works[took_us] = known._replace(
                num_prompt_tokens=known.num_prompt_tokens + num_tokens,
                num_prompt_pairs=known.num_prompt_pairs + num_pairs_of(num_tokens, start),
            )
    return [(work, 1e-6 * took_us) for took_us, work in works.items()]


def with_served(costs: Costs, alone: Sequence[Sample], beside: Sequence[Sample]) -> Costs:
    """Returns costs whose prompts take as long as the served ones.

    `alone`: steps of one request at a time. `beside`: steps while other requests were decoded.
    """
    step, error, neighbour = costs.step, dict(costs.error), costs.neighbour
    factor = _median((took_s - step.step_s) / more_s for work, took_s, more_s in _long(costs, alone))
    if factor is not None:
        step = replace(step, prompt_token_s=step.prompt_token_s * factor, prompt_pair_s=step.prompt_pair_s * factor)
        error["served_prompts"] = mean_error(step, alone)
    costs = replace(costs, step=step)
    slower = [took_s / step.seconds(work) for work, took_s, _ in _long(costs, beside)]
    if (mean := _median(slower)) is not None:
        neighbour = replace(neighbour, prefill_beside_decode=mean)
        error["prefill_beside_decode"] = sum(abs(each - mean) for each in slower) / len(slower) / mean
    return replace(costs, neighbour=neighbour, error=error)


def _long(costs: Costs, samples: Iterable[Sample]) -> list[tuple[StepWork, float, float]]:
    """Returns each step with its time, and with the time that its prompts add to a step.

    Leaves out steps of few tokens, whose time says little about the time of a token.
    """
    step = costs.step
    timed = [(work, took_s, step.seconds(work) - step.step_s) for work, took_s in samples]
    return [each for each in timed if each[2] > step.step_s]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return min(MOST_FACTOR, max(LEAST_FACTOR, median(found))) if found else None
