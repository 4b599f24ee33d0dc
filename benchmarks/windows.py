"""`python -m benchmarks engine --parts windows`: counts simultaneous requests in the same memory, with and without a
group of their own for layers with windows.

Uses the engine's sizes and scheduler, without a model, and admits prompts until no more fit. There are two layers of
gpt_oss: one sees all tokens, the other a window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from benchmarks.figures import begin, finish, result
from pd_cluster.devices.device import CPU
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.model.language_model.cache_declaration import LayerCache, layouts_of
from pd_cluster.model.planning.group_pool_sizing import GroupNeeds, group_sizes
from pd_cluster.model.planning.pool_sizing import num_pool_blocks
from pd_cluster.result_tables import Report, Result
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling

NAME = "windows"
NUM_HEADS, HEAD_DIM, WINDOW, BLOCK_SIZE = 8, 64, 128, 16
MEMORY_GIB, MAX_NUM_SEQS, STEP_TOKENS, LENGTH = 1.0, 64, 2048, 4096
LEAST_RATIO = 1.8


def run(json: str) -> None:
    begin(json)
    started_s = time.monotonic()
    config = EngineConfig(model="", kv_cache_memory_gib=MEMORY_GIB, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    report = Report(f"python -m benchmarks engine --parts {NAME}", [*_results(config)])
    finish(report, f"{MEMORY_GIB:g} GiB, requests of {LENGTH} tokens, {time.monotonic() - started_s:.0f} s", json)


def _results(config: EngineConfig) -> Iterator[Result]:
    caches = [LayerCache(NUM_HEADS, keys_and_values(HEAD_DIM), window) for window in (WINDOW, 0)]
    counts = [num_at_once(config, caches, LENGTH, STEP_TOKENS, splits) for splits in (False, True)]
    for name, count in zip(("one table for all layers", "windows in a group of their own"), counts, strict=True):
        yield result(f"requests at once, {name}", [count], "requests", "higher")
    yield result("requests at once, windows apart ÷ one table", [counts[1] / counts[0]], "x", "higher", LEAST_RATIO)


def num_at_once(config: EngineConfig, caches: Sequence[LayerCache], length: int, step_tokens: int, splits: bool) -> int:
    """Counts the requests of `length` tokens that an engine with these settings runs at a time, before one has to wait.

    `splits`: whether layers with a window are a separate group. Raises ConfigError.
    """
    layouts = layouts_of(caches, config.block_size or BLOCK_SIZE, "float32", split_windows=splits)
    scheduler = _scheduler(config, layouts, length, step_tokens)
    for at in range(config.max_num_seqs):
        scheduler.add(Request(f"r{at}", RequestSpec([0] * length, Sampling()), arrival_s=float(at)))
    while (plan := scheduler.plan()).chunks:
        assert not plan.preempted
        scheduler.computed(plan)
    scheduler.check()
    return len(scheduler.running)


def _scheduler(config: EngineConfig, layouts: Sequence[KVLayout], length: int, step_tokens: int) -> StepScheduler:
    if len(layouts) > 1:
        counts = group_sizes(GroupNeeds(config, layouts, length + BLOCK_SIZE, step_tokens)).nums_blocks
    else:
        counts = (num_pool_blocks(config, layouts[0], length + BLOCK_SIZE, CPU),)
    groups = [LayerGroup(BlockPool(count), layout.holds) for layout, count in zip(layouts, counts, strict=True)]
    return StepScheduler(groups, StepSizes(layouts[0].block_size, config.max_num_seqs, step_tokens))
