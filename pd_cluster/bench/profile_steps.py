"""Requests the steps of `pd-cluster profile`, alone and together, and computes the slowdown from their times."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from statistics import median

from pd_cluster.bench.profile_messages import EngineReady, Steps, TimedStep
from pd_cluster.bench.profiled_engine_process import ProfiledEngine
from pd_cluster.costs.cost_fit import Sample
from pd_cluster.costs.linear_costs import NeighbourCost, StepWork
from pd_cluster.host import num_cores
from pd_cluster.result_tables import progress

CONTEXTS = (32, 256, 1024, 4096)
PROMPTS = (16, 32, 64, 128, 256, 512, 1024)
LONG_PROMPTS = (1, 2, 4)  # lengths of long prompts, as multiples of the largest step
MIXED = ((1, 64), (4, 128), (16, 256))  # decoding sequences, and tokens of a prompt in the same step
NUM_SETTLING = 2  # first steps of sequences, not counted because they fill caches
NUM_STEPS = 6  # the number of steps that are counted
SPARE_TOKENS = 32  # the longest context leaves room for this many decoded tokens
MOST_HELD = 0.8  # maximum share of the blocks that sequences hold
MOST_SHARE = 0.15  # maximum share of the time for one prompt
FAIR_SHARE = 2  # a kind may take this multiple of its share of the remaining time: quick kinds need less than theirs
NUM_WARM = 10  # uncounted steps at the start, of decode and of prompts each
BESIDE_ROWS = (1, 4, 16)
MOST_BESIDE = 0.2  # maximum duration of a prompt's step, as a share of the time for one number of rows, so several fit

Key = tuple[Steps, int, int, int]
StepSamples = dict[Key, Sample]  # key of the requested and actual work -> the work and its median time


def steps_of(ready: EngineReady) -> list[Steps]:
    """Returns the steps to measure that fit the engine: alternately decode steps and prompts, from small to large."""
    longest, budget = ready.max_model_len - SPARE_TOKENS, ready.max_num_batched_tokens
    most_tokens = MOST_HELD * ready.num_blocks * ready.block_size
    rows = sorted({*(1 << power for power in range(16) if 1 << power < ready.max_num_seqs), ready.max_num_seqs})
    contexts = [context for context in CONTEXTS if context <= longest] or [max(1, longest // 2)]
    held = ready.block_size + SPARE_TOKENS
    decode = [(num, context) for num in rows for context in contexts if num * (context + held) <= most_tokens]
    lengths = sorted({*(each for each in PROMPTS if each <= budget), *(times * budget for times in LONG_PROMPTS)})
    prompts = [length for length in lengths if 1 < length <= min(longest, most_tokens)]
    mixed = [(num, length) for num, length in MIXED if num + length <= budget and num < ready.max_num_seqs]
    kinds = (
        [Steps(num_rows=num, num_context=context, num_steps=NUM_SETTLING + NUM_STEPS) for num, context in decode],
        [Steps(num_prompt_tokens=length, num_steps=2) for length in prompts],
        [
            Steps(num_rows=num, num_context=contexts[0], num_prompt_tokens=length, num_steps=NUM_SETTLING + 2)
            for num, length in mixed
        ],
    )
    return [each for together in zip_longest(*kinds) for each in together if each is not None]


async def warm_up(engines: Sequence[ProfiledEngine]) -> None:
    """Runs the uncounted warm-up steps."""
    for engine in engines:
        longest = min(engine.ready.max_num_batched_tokens, engine.ready.max_model_len - SPARE_TOKENS, 64)
        await engine.run(Steps(num_rows=1, num_context=1, num_steps=NUM_WARM))
        await engine.run(Steps(num_prompt_tokens=longest, num_steps=NUM_WARM))


async def measure_alone(engine: ProfiledEngine, seconds: float) -> StepSamples:
    """Measures all kinds of steps repeatedly until the time is used up. Leaves out kinds that take too long."""
    asked = steps_of(engine.ready)
    found: defaultdict[Key, list[TimedStep]] = defaultdict(list)
    ends_s, token_s = time.monotonic() + seconds, 0.0
    with progress("steps alone", len(asked), "kinds") as advance:
        for at, each in enumerate(asked):
            left_s = max(0.0, ends_s - time.monotonic())
            if each.num_prompt_tokens * token_s <= min(left_s, MOST_SHARE * seconds):
                token_s = await _measure(engine, each, FAIR_SHARE * left_s / (len(asked) - at), found) or token_s
            advance()
    again = [each for each in asked if any(key[0] == each for key in found)]
    while time.monotonic() < ends_s:
        for each in again:
            if (left_s := ends_s - time.monotonic()) > 0:
                await _measure(engine, each, min(left_s, MOST_SHARE * seconds), found)
    return {key: _sample(steps) for key, steps in found.items()}


async def _measure(
    engine: ProfiledEngine, asked: Steps, seconds: float, found: defaultdict[Key, list[TimedStep]]
) -> float:
    """Adds the steps to the samples; returns the time per prompt token."""
    limited = Steps(**{name: getattr(asked, name) for name in Steps.__struct_fields__} | {"seconds": seconds})
    steps = counted(asked, await engine.run(limited))
    for step in steps:
        found[key_of(asked, step.work)].append(step)
    num_tokens = sum(step.work.num_prompt_tokens for step in steps)
    return sum(step.took_s for step in steps) / num_tokens if num_tokens and not asked.num_rows else 0.0


def counted(asked: Steps, steps: Sequence[TimedStep]) -> Sequence[TimedStep]:
    return steps[NUM_SETTLING if asked.num_rows and len(steps) > NUM_SETTLING else 0 :]


def key_of(asked: Steps, work: StepWork) -> Key:
    """Returns equal keys for steps of equal cost. Growth of contexts by decoded tokens does not change the key."""
    return asked, work.num_rows, work.num_prompt_tokens, work.num_prompt_pairs


def _sample(steps: Sequence[TimedStep]) -> Sample:
    contexts = median(step.work.num_context_tokens for step in steps)
    return steps[0].work._replace(num_context_tokens=round(contexts)), median(step.took_s for step in steps)


async def measure_beside(
    prefill: ProfiledEngine, decode: ProfiledEngine, alone: StepSamples, seconds: float
) -> tuple[NeighbourCost, dict[str, float]]:
    """Runs prompts at one engine and decode steps at the other; returns both slowdown factors.

    The second result has the spread: the mean of |factor of a step - median factor| / median factor.
    """
    prompt = _prompt_within(alone, MOST_BESIDE * seconds / len(BESIDE_ROWS))
    kinds = {key[0] for key in alone if not key[0].num_prompt_tokens}
    by_rows = [[each for each in kinds if each.num_rows == num] for num in BESIDE_ROWS]
    asked = [max(each, key=_middle(256, "num_context")) for each in by_rows if each]
    slower: list[float] = []
    prompts_slower: list[float] = []
    for each in asked:
        part_s = seconds / len(asked)
        many = 1 << 20
        prompts, steps = await asyncio.gather(
            prefill.run(Steps(num_prompt_tokens=prompt.num_prompt_tokens, num_steps=many, seconds=part_s)),
            decode.run(
                Steps(
                    num_rows=each.num_rows,
                    num_context=each.num_context,
                    num_steps=_fitting(decode.ready, each),
                    seconds=part_s,
                )
            ),
        )
        slower += _ratios(alone, each, _during(counted(each, steps), prompts))
        prompts_slower += _ratios(alone, prompt, _during(prompts, steps))
    factors = {"decode_beside_prefill": slower, "prefill_beside_decode": prompts_slower}
    means = {name: min(100.0, max(0.1, median(values))) for name, values in factors.items() if values}
    spreads = {
        name: sum(abs(value - means[name]) for value in values) / len(values) / means[name]
        for name, values in factors.items()
        if values
    }
    return NeighbourCost(**means, num_cores=num_cores()), spreads


def _prompt_within(alone: StepSamples, most_s: float) -> Steps:
    """Returns the prompt whose step is nearest to 512 tokens among those within the time limit; otherwise the quickest
    one.
    """
    took_s = {key[0]: sample[1] for key, sample in alone.items() if key[0].num_prompt_tokens and not key[0].num_rows}
    quick = [asked for asked in took_s if took_s[asked] <= most_s]
    return max(quick, key=_middle(512)) if quick else min(took_s, key=lambda asked: took_s[asked])


def _middle(wanted: int, name: str = "num_prompt_tokens") -> Callable[[Steps], int]:
    """Returns a key whose largest value is the one nearest to `wanted`."""
    return lambda asked: -abs(getattr(asked, name) - wanted)


def _fitting(ready: EngineReady, asked: Steps) -> int:
    """Returns the number of steps that these sequences can take."""
    capacity = MOST_HELD * ready.num_blocks * ready.block_size / asked.num_rows - asked.num_context
    return max(1, min(ready.max_model_len - asked.num_context - 2, int(capacity)))


def _during(steps: Sequence[TimedStep], others: Sequence[TimedStep]) -> Iterator[TimedStep]:
    """Yields the steps that lie within the other engine's steps."""
    if others:
        began_s, ended_s = others[0].began_s, others[-1].began_s + others[-1].took_s
        yield from (each for each in steps if each.began_s >= began_s and each.began_s + each.took_s <= ended_s)


def _ratios(alone: StepSamples, asked: Steps, steps: Iterator[TimedStep]) -> list[float]:
    keyed = ((alone.get(key_of(asked, step.work)), step.took_s) for step in steps)
    return [took_s / sample[1] for sample, took_s in keyed if sample is not None]
