"""Drafts by a head of the target (EAGLE-3, MTP) are those of the head by itself, and never change an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from pd_cluster.engine.step.core import EngineCore
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.batch import Taps, batch_of, step_input
from pd_cluster.model.head_pairs import PairChunk, draft_pairs
from pd_cluster.model.runner import ModelRunner
from pd_cluster.settings.speculation import Method, Speculation
from pd_cluster.types import Order, Request, Sampling, Status
from tests.model.test_draft_model import DRAWN, FORKS, GREEDY, ROOM, AnySize, plain, token_ids, traffic
from tests.support.engines import MAX_STEPS, make_core, run

Checkpoints = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


def heads_core(target: Path, method: Method, head: Path | str = "", **settings: Any) -> EngineCore:
    speculation = Speculation(methods=(method,), model=str(head), draft_sample_method="greedy")
    core = make_core(target, speculation=speculation, **{**ROOM, **settings})
    core.drafting.size = AnySize(5)
    return core


def drafts_alone(runner: ModelRunner, known: list[int], num_drafts: int) -> list[int]:
    """Returns what the head says behind these tokens, with all of its pairs computed at once in a pool of their own."""
    head, layout = runner.head, runner.pool.layout
    assert head is not None
    with KVPool(layout, layout.num_blocks_for(len(known) + num_drafts)) as pool, torch.inference_mode():
        request = Request("alone", Order(known, Sampling()), block_table=list(range(pool.num_blocks)))
        batch = batch_of(step_input([(request, len(known) - 1)], layout.block_size), pool)
        batch.taps = Taps(head.taps)
        runner.model(batch)
        pairs = PairChunk(request, 1, known[1:], torch.cat(batch.taps.states, dim=1))
        found: list[int] = []
        while True:
            output = draft_pairs(head, pool, [pairs], not found, runner.vocab_size)
            found.append(int(output.logits[0].argmax()))
            if len(found) == num_drafts:
                return found
            pairs = PairChunk(request, len(known) + len(found) - 1, found[-1:], output.states)


def run_and_compare(core: EngineCore, requests: list[Request]) -> int:
    """Runs requests; returns the number of drafts, all of which are the head's own."""
    assert isinstance(core.runner, ModelRunner)
    for request in requests:
        core.scheduler.add(request)
    num_drafts = 0
    for _ in range(MAX_STEPS):
        if not core.scheduler.requests:
            return num_drafts
        plan = core.plan()
        for request, drafts in plan.drafts.items():
            known = request.token_ids(0, request.num_tokens)
            assert drafts == drafts_alone(core.runner, known, len(drafts)), (request.request_id, len(known))
            num_drafts += len(drafts)
        core.run(plan)
        core.scheduler.check()
    raise AssertionError("the engine does not end")


SWAPS: dict[str, Any] = {"num_blocks": 40, "preemption_mode": "swap", "swap_space_gib": 0.01}


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 40, "enable_prefix_caching": False}, SWAPS])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_drafts_are_those_of_the_head_by_itself(
    checkpoint: Checkpoints, method: Method, settings: dict[str, Any]
) -> None:
    target = checkpoint("llama")
    expected = plain(target, traffic(2, (GREEDY, DRAWN, FORKS)))
    core = heads_core(target, method, **settings)
    for _ in range(2):  # the second time from the prefix cache
        requests = traffic(2, (GREEDY, DRAWN))
        assert run_and_compare(core, requests) > 150
        assert {r.request_id: {0: r.output_token_ids} for r in requests} == plain(target, traffic(2, (GREEDY, DRAWN)))
    assert (core.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
    assert token_ids(run(core, traffic(2, (GREEDY, DRAWN, FORKS)))) == expected


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_prompt_that_was_computed_elsewhere(checkpoint: Checkpoints, method: Method) -> None:
    """Its blocks come with the head's layer; drafts follow from all of it, a step after the first one here."""
    target = checkpoint("llama")
    sources, requests, whole = traffic(4), traffic(4), dict[int, torch.Tensor]()
    expected = plain(target, traffic(4))
    prefill, decode = (heads_core(target, method, enable_prefix_caching=False) for _ in range(2))
    for source, request in zip(sources, requests, strict=True):
        source.leg, request.leg = "prefill", "decode"
        prefill.scheduler.add(source)
        while source.status is not Status.EXPORTING:
            prefill.step()
        decode.scheduler.land(request, len(source.prompt_token_ids))
        for theirs, own in zip(source.block_table, request.block_table, strict=True):
            decode.runner.pool.data[own] = prefill.runner.pool.data[theirs]
        num_whole = len(source.prompt_token_ids) // ROOM["block_size"]
        whole |= {own: decode.runner.pool.data[own].clone() for own in request.block_table[:num_whole]}
        prefill.scheduler.finish(source)
        request.output_token_ids += source.output_token_ids
        decode.scheduler.landed(request)
    decode.step()
    for block, content in whole.items():
        assert decode.runner.pool.data[block].equal(content), "tokens that are computed again are read only"
    assert run_and_compare(decode, []) > 100
    assert {r.request_id: {0: r.output_token_ids} for r in requests} == expected


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_blocks_that_became_full_without_drafts(checkpoint: Checkpoints, method: Method) -> None:
    """A conversation goes on from cached blocks, whose tokens were decoded by a request that wanted no drafts."""
    target = checkpoint("llama")
    core, first = heads_core(target, method), traffic(5, (GREEDY,))
    for request in first:
        request.order = structs.replace(request.order, may_draft=False)
    run(core, first)
    prompts = [[*each.prompt_token_ids, *each.output_token_ids, 3, 5] for each in first]
    requests = [Request(f"s{at}", Order(prompt, GREEDY)) for at, prompt in enumerate(prompts)]
    assert run_and_compare(core, requests) > 100
    assert all(
        each.num_cached_tokens > len(before.prompt_token_ids) for each, before in zip(requests, first, strict=True)
    )
