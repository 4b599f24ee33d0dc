"""Drafts by a target's head (EAGLE-3, MTP) equal those of the head alone, and never change an answer."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs
from tokenizers import Tokenizer

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.draft.draft_head import DraftHead
from pd_cluster.model.draft.draft_pairs import HeadPairs, PairChunk, draft_pairs, write_pairs
from pd_cluster.model.inputs.forward_batch import AuxiliaryStates, batch_of
from pd_cluster.model.inputs.step_input import step_input
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import Request, RequestSpec, Sampling, Status
from tests.model.test_draft_model import DRAWN, FORKS, GREEDY, ROOM, AnySize, plain, token_ids, traffic
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3_heads import make_eagle3_head
from tests.support.engines import MAX_STEPS, make_core, random_prompt, run
from tests.support.mtp import add_mtp_layer
from tests.support.pictures import make_vision, picture, shown

NEAR = 1e-4
HEAD = SHIPPED_MODEL.with_name("tiny-chat-eagle3")
QUESTIONS = ("Count from 3 to 12", "Tell me a joke about rain.", "Hello!", "Count from 20 to 30")
TAPS: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
pytestmark = pytest.mark.usefixtures("one_thread")


class Headed(NamedTuple):
    target: Path
    speculation: Speculation

    def core(self, **settings: Any) -> EngineCore:
        core = make_core(self.target, speculation=self.speculation, **{**ROOM, **settings})
        core.drafting.size = AnySize(5)
        return core


@pytest.fixture(scope="module", params=["eagle3", "glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """Returns a random model with an EAGLE-3 head, or with an MTP layer of its model type."""
    if request.param == "eagle3":
        target = make_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)
        folder = make_eagle3_head(tmp_path_factory.mktemp("head"), target, draft_vocab_size=100, **TAPS)
        return Headed(target, Speculation(methods=("eagle3",), model=str(folder), draft_sample_method="greedy"))
    target = add_mtp_layer(make_checkpoint(tmp_path_factory.mktemp("target"), request.param))
    return Headed(target, Speculation(methods=("mtp",), draft_sample_method="greedy"))


def assert_own(runner: ModelRunner, known: list[int], drafts: list[int]) -> None:
    """Asserts that drafts after these tokens equal the head's with all pairs computed at once, in a separate pool.

    If two tokens are equally likely, either is accepted.
    """
    head, layout = runner.head, runner.pool.layout
    assert head is not None
    with KVPool(layout, layout.num_blocks_for(len(known) + len(drafts))) as pool, torch.inference_mode():
        pairs = pairs_of(runner, head, known, pool)
        for at, draft in enumerate(drafts):
            output = draft_pairs(head, pool, [pairs], at == 0, runner.vocab_size)
            assert output.logits[0].max() - output.logits[0, draft] < NEAR, (len(known), at)
            pairs = PairChunk(pairs.request, len(known) + at, [draft], output.states)


def pairs_of(runner: ModelRunner, head: DraftHead, known: list[int], pool: KVPool) -> PairChunk:
    """Computes all tokens except the last with the model, in an otherwise empty pool."""
    request = Request("alone", RequestSpec(known, Sampling()), tables=[list(range(pool.num_blocks))])
    batch = batch_of(step_input([(request, len(known) - 1)], pool.layout.block_size), pool)
    batch.taps = AuxiliaryStates(head.taps)
    runner.model(batch)
    return PairChunk(request, 1, known[1:], torch.cat(batch.taps.states, dim=1))


def assert_whole(core: EngineCore, known: list[int]) -> None:
    """Asserts that these tokens' cached blocks equal, in the head's layer, pairs computed all at once."""
    runner, probe = core.runner, Request("probe", RequestSpec(known, Sampling()))
    assert isinstance(runner, ModelRunner)
    assert runner.head is not None
    layout, head = runner.pool.layout, runner.head
    (num_cached,) = core.scheduler.land(probe, len(known))
    assert num_cached >= len(known) - layout.block_size
    with KVPool(layout, layout.num_blocks_for(len(known))) as pool, torch.inference_mode():
        write_pairs(head, pool, [pairs_of(runner, head, known, pool)])
        planes = (each.memory.planes(layout.num_layers - 1) for each in (runner.pool, pool))
        for found, expected in zip(*planes, strict=True):
            wrong = found[probe.tables[0]].flatten(0, 1) - expected[: pool.num_blocks].flatten(0, 1)
            assert wrong[1:num_cached].abs().max() < NEAR
    core.scheduler.finish(probe)


def run_and_compare(core: EngineCore, requests: list[Request]) -> int:
    """Runs requests; returns the number of drafts, after asserting that all are the head's own."""
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
            assert_own(core.runner, known, drafts)
            num_drafts += len(drafts)
        core.run(plan)
        core.scheduler.check()
    raise AssertionError("the engine does not end")


RECOMPUTES: dict[str, Any] = {"num_blocks": 40, "enable_prefix_caching": False}
SWAPS: dict[str, Any] = {"num_blocks": 40, "preemption_mode": "swap", "swap_space_gib": 0.01}


@pytest.mark.parametrize(
    "settings", [SWAPS, *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, RECOMPUTES))]
)
def test_drafts_are_those_of_the_head_by_itself(headed: Headed, settings: dict[str, Any]) -> None:
    expected = plain(headed.target, traffic(2, (GREEDY, DRAWN, FORKS)))
    alone = plain(headed.target, traffic(2, (GREEDY, DRAWN)))
    core = headed.core(**settings)
    for _ in range(2):  # the second time from the prefix cache
        requests = traffic(2, (GREEDY, DRAWN))
        assert run_and_compare(core, requests) > 150
        assert {r.request_id: {0: r.output_token_ids} for r in requests} == alone
    assert (core.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
    assert token_ids(run(core, traffic(2, (GREEDY, DRAWN, FORKS)))) == expected


def test_a_prompt_that_was_computed_elsewhere(headed: Headed) -> None:
    """The prompt's blocks arrive with the head's layer; from the second local step on, drafts use all of the prompt."""
    sources, requests, whole = traffic(4), traffic(4), dict[int, torch.Tensor]()
    expected = plain(headed.target, traffic(4))
    prefill = headed.core(max_num_batched_tokens=33, max_num_seqs=8)  # the last chunk of 67 tokens is one of them
    decode = headed.core(enable_prefix_caching=False)
    for source, request in zip(sources, requests, strict=True):
        source.leg, request.leg = "prefill", "decode"
        prefill.scheduler.add(source)
        while source.status is not Status.EXPORTING:
            prefill.step()
        decode.scheduler.land(request, len(source.prompt_token_ids))
        for theirs, own in zip(source.tables[0], request.tables[0], strict=True):
            decode.runner.pool.flat()[own] = prefill.runner.pool.flat()[theirs]
        num_whole = len(source.prompt_token_ids) // ROOM["block_size"]
        whole |= {own: decode.runner.pool.flat()[own].clone() for own in request.tables[0][:num_whole]}
        prefill.scheduler.finish(source)
        request.output_token_ids += source.output_token_ids
        decode.scheduler.landed(request)
    decode.step()
    for block, content in whole.items():
        assert decode.runner.pool.flat()[block].equal(content), "recomputed tokens must only be read"
    assert run_and_compare(decode, []) > 100
    assert {r.request_id: {0: r.output_token_ids} for r in requests} == expected


def test_blocks_that_became_full_without_drafts(headed: Headed) -> None:
    """A conversation continues from cached blocks decoded by a request without drafts."""
    core, first = headed.core(), traffic(5, (GREEDY,))
    for request in first:
        request.order = structs.replace(request.order, may_draft=False)
    run(core, first)
    prompts = [[*each.prompt_token_ids, *each.output_token_ids, 3, 5] for each in first]
    requests = [Request(f"s{at}", RequestSpec(prompt, GREEDY)) for at, prompt in enumerate(prompts)]
    assert run_and_compare(core, requests) > 100
    assert all(
        each.num_cached_tokens > len(before.prompt_token_ids) for each, before in zip(requests, first, strict=True)
    )


def test_blocks_of_tokens_without_pairs(headed: Headed) -> None:
    """A prompt adapter's sequence has no pairs, so each block that it begins is cleared in the head's layer."""
    core = headed.core(enable_prefix_caching=False)
    pool, size = core.runner.pool, ROOM["block_size"]
    own = pool.layout.num_model_layers
    for layer in range(pool.layout.num_layers):
        for plane in pool.memory.planes(layer):
            plane.fill_(9.0)
    without = Request("without", RequestSpec([3] * (2 * size + 1), Sampling(max_tokens=size + 2, ignore_eos=True)))
    without.num_virtual_tokens = 1
    core.scheduler.add(without)
    while len(without.output_token_ids) < size + 1:
        core.step()
        for block in without.tables[0][: -(-without.num_computed_tokens // size)]:
            assert all(not plane[block].any() for plane in pool.memory.planes(own))
            assert all((plane[block][0] != 9.0).all() for plane in pool.memory.planes(own - 1))
    assert not core.drafting.totals.num_draft_tokens


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=60, temperature=0.0), Sampling(max_tokens=60, seed=3)])
def test_the_shipped_head_is_often_right(sampling: Sampling) -> None:
    """Answers equal those without drafts; with one draft per step, at least 60 % are right."""
    speculation = Speculation(methods=("eagle3",), model=str(HEAD), num_speculative_tokens=1)
    tokenizer = Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json"))
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(text.format(question)).ids for question in QUESTIONS]
    answers = []
    for drafts in (False, True):
        core = make_core(SHIPPED_MODEL, speculation=speculation, max_model_len=512)
        core.drafting.size = AnySize(5, least=1)
        orders = [RequestSpec(prompt, sampling, may_draft=drafts) for prompt in prompts]
        requests = [Request(f"r{at}", order) for at, order in enumerate(orders)]
        answers.append(token_ids(run(core, requests)))
    assert answers[0] == answers[1]
    told = core.drafting.totals.counts()
    assert told.num_tokens > 60
    assert told.num_accepted >= 0.6 * told.num_tokens


def test_blocks_that_sequences_share(headed: Headed) -> None:
    """Covers forks after a last chunk of one token, and beams, which take over each other's tokens and blocks."""
    beams = Sampling(max_tokens=20, temperature=0.0, beam_width=3, n=3)
    core, rng = headed.core(max_num_batched_tokens=18, max_num_seqs=8), random.Random(3)
    kinds = ((19, FORKS), (37, FORKS), (5, beams), (23, beams))
    orders = {f"r{at}": RequestSpec(random_prompt(rng, length), own) for at, (length, own) in enumerate(kinds)}
    for request_id, outputs in token_ids(run(core, [Request(*each) for each in orders.items()])).items():
        for output in outputs.values():
            assert_whole(core, orders[request_id].prompt_token_ids + output[:-1])


def test_a_sequence_begins_again_from_cached_blocks(headed: Headed) -> None:
    core, requests = headed.core(block_size=2, num_blocks=160), traffic(1)
    assert run_and_compare(core, requests) > 150
    assert core.scheduler.num_preemptions > 0


def test_text_before_a_picture_is_shared_with_texts(tmp_path: Path) -> None:
    target = make_vision(tmp_path / "target", "qwen2_vl", num_hidden_layers=4)
    layer = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    folder = make_eagle3_head(tmp_path / "head", target, draft_vocab_size=100, layer=layer, **TAPS)
    core = Headed(target, Speculation(methods=("eagle3",), model=str(folder), draft_sample_method="greedy")).core()
    order = shown(1, [20, 7], [picture(1)]).order(target, GREEDY)
    run(core, [Request("picture", order)])
    text = Request("text", RequestSpec([*order.prompt_token_ids[: order.spans[0].start], 5], GREEDY))
    assert run_and_compare(core, [text]) > 20
    assert text.num_cached_tokens >= 16


def test_states_that_wait_do_not_keep_those_of_their_step() -> None:
    pairs, states = HeadPairs(16), np.zeros((95, 8), dtype=np.float32)
    one, prompt = Request("one", RequestSpec([1] * 4, GREEDY)), Request("prompt", RequestSpec([2] * 94, GREEDY))
    pairs.take([(one, 4)], {}, [], torch.zeros(4, 8))
    one.num_computed_tokens, one.output_token_ids = 4, [3, 4]
    pairs.take([(one, 1), (prompt, 94)], {}, [], torch.from_numpy(states))
    one.num_computed_tokens = 5
    assert pairs.waiting(one) is not None
    kept = weakref.ref(states)
    del states
    assert kept() is None


def test_another_head_in_its_place_after_a_sleep(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=4)
    folder = make_eagle3_head(tmp_path / "head", target, **TAPS)
    core = Headed(target, Speculation(methods=("eagle3",), model=str(folder))).core()
    core.runner.sleep(2)
    make_eagle3_head(folder, target, seed=1, **TAPS)
    with pytest.raises(ModelError, match="the draft head has changed during the sleep"):
        core.runner.sleep(0)
