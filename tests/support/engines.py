"""Makes engines in the test's own process and runs them until all requests end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from tests.support.checkpoints import margin, prefers, reference_greedy, reference_greedy_together

MAX_STEPS = 5000
DEVICE = os.environ.get("PD_CLUSTER_TEST_DEVICE", "auto")


def make_core(folder: Path, **settings: object) -> EngineCore:
    """Makes an engine on the device that PD_CLUSTER_TEST_DEVICE names, with a pool that does not fill a GPU."""
    settings.setdefault("device", DEVICE)
    if DEVICE == "cuda" and "num_blocks" not in settings:
        settings.setdefault("kv_cache_memory_gib", 0.25)
    return build_core(EngineConfig(model=str(folder), **settings))[0]  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _made(folder: Path, settings: tuple[tuple[str, Any], ...]) -> EngineCore:
    return make_core(folder, **dict(settings))


def shared_core(folder: Path, **settings: Any) -> EngineCore:
    """Returns a shared engine for tests that do not change it; its prefix cache holds other tests' prompts."""
    return _made(folder, tuple(sorted(settings.items())))


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


def generate(core: EngineCore, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    """Generates for all prompts at once; returns the outputs in order. Asserts that every block is released."""
    requests = [Request(f"r{i}", RequestSpec(prompt, sampling), arrival_s=float(i)) for i, prompt in enumerate(prompts)]
    for request in requests:
        core.scheduler.add(request)
    for _ in range(MAX_STEPS):
        if not core.scheduler.requests:
            break
        core.step()
        core.scheduler.check()
    assert not core.scheduler.requests, "the engine did not finish"
    assert_all_released(core)
    return [request.output_token_ids for request in requests]


def assert_all_released(core: EngineCore) -> None:
    """Asserts that no request holds a block in any group of layers, in memory or swapped out."""
    assert not any(each.blocks.num_held + each.swap.num_held for each in core.scheduler.groups)


def together(core: EngineCore, orders: Iterable[RequestSpec]) -> list[list[int]]:
    """Runs all requests at once; returns the tokens of each request's first sequence, in order."""
    requests = [Request(f"r{i}", order, arrival_s=float(i)) for i, order in enumerate(orders)]
    run(core, requests)
    return [request.output_token_ids for request in requests]


def run(core: EngineCore, requests: list[Request]) -> dict[str, dict[int, list[TokenOutput]]]:
    """Runs all requests at once; returns their tokens by sequence. Asserts that every block is released."""
    tokens: dict[str, dict[int, list[TokenOutput]]] = {request.request_id: {} for request in requests}
    for request in requests:
        core.scheduler.add(request)
    for _ in range(MAX_STEPS):
        if not core.scheduler.requests:
            break
        for _, token in core.step().sampled:
            tokens[token.request_id].setdefault(token.index, []).append(token)
        core.scheduler.check()
    assert not core.scheduler.requests, "the engine did not finish"
    assert_all_released(core)
    return tokens


def assert_same(folder: Path, prompt: list[int], output: list[int], max_tokens: int) -> None:
    """Asserts the reference's tokens, except where its two best logits differ by less than 1e-4 (invariant 1)."""
    expected = reference_greedy(folder, prompt, max_tokens)
    if output == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip([*output, -1], [*expected, -1], strict=False)) if a != b)
    distance = margin(folder, prompt, expected[:at])
    assert distance < 1e-4, (
        f"prompt of {len(prompt)} tokens differs at output {at} where the margin is {distance:.2e}: "
        f"{output[at : at + 4]} instead of {expected[at : at + 4]}"
    )


def assert_all_same(
    folder: Path, prompts: list[list[int]], outputs: list[list[int]], max_tokens: int | list[int]
) -> None:
    """Like `assert_same`, for many prompts: compares with one forward pass, then generate() for all, then for each
    alone.

    `max_tokens`: one limit for all prompts, or one for each.
    """
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    if prefers(folder, prompts, outputs, limits):
        return
    together = reference_greedy_together(folder, prompts, max(limits))
    for prompt, output, expected, limit in zip(prompts, outputs, together, limits, strict=True):
        if output != expected[:limit]:
            assert_same(folder, prompt, output, limit)
