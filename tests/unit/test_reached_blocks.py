"""Schedulers hear of blocks up to a kept state, as a comparison with all prefixes of kept states shows."""

from __future__ import annotations

import random

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.state_checkpoints import KeepRule
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import STATE
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.kv.reached_blocks import ReachedBlocks
from pd_cluster.numerics import Numerics
from pd_cluster.types import Request, RequestSpec, Sampling, Tier


def random_chain(rng: random.Random) -> list[bytes]:
    """Returns the contents of a prompt's first blocks, each of which identifies its whole prefix."""
    text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 8)))
    return [text[: at + 1].encode() for at in range(len(text))]


def test_news_add_up_to_the_known_blocks_before_kept_states() -> None:
    most = 0
    for seed in range(40):
        rng, tokens, states = random.Random(seed), BlockPool(24), BlockPool(6)
        reached, clients, chains = ReachedBlocks(tokens, states), list[dict[bytes, Tier]](), dict[bytes, list[bytes]]()
        for step in range(300):
            if step in (20, 150):  # another scheduler connects
                clients.append(dict(reached.follow()))
            chain = random_chain(rng)
            if rng.random() < 0.5:
                (block,) = states.take(1)
                states.remember(block, chain[-1])
                chains[chain[-1]] = chain
                reached.kept(chain)
                states.release([block])
            else:
                blocks = tokens.take(len(chain))
                for block, content in zip(blocks, chain, strict=True):
                    tokens.remember(block, content)
                tokens.release(blocks)
            if rng.random() < 0.2:
                states.drop(rng.choice([*chains]) if chains else b"nothing")
            if rng.random() < 0.01:
                tokens.forget()
                states.forget()
            if rng.random() < 0.4:
                for content, tier in reached.changes().items():
                    for client in clients:
                        client.pop(content, None)
                        client |= {} if tier is None else {content: tier}
                before = {each for content, chain in chains.items() if content in states for each in chain}
                expected = {content: "device" for content in before if content in tokens}
                assert all(client == expected for client in clients), f"seed {seed}, step {step}"
                most = max(most, len(expected))
    assert most > 10


def scheduler_of(mode: str) -> StepScheduler:
    groups = [LayerGroup(BlockPool(32)), LayerGroup(BlockPool(8), STATE)]
    return StepScheduler(groups, StepSizes(4, 4, 64), PrefixScope("model", Numerics()), KeepRule(mode, 1024))  # type: ignore[arg-type]


def compute(scheduler: StepScheduler, name: str, prompt: list[int]) -> Request:
    """Computes a prompt, and ends the request after its first token."""
    request = Request(name, RequestSpec(prompt, Sampling(max_tokens=1)))
    scheduler.add(request)
    while not (ready := scheduler.computed(scheduler.plan())):
        pass
    assert ready == [request]
    scheduler.finish(request)
    scheduler.check()
    return request


def test_a_scheduler_tells_of_blocks_up_to_where_prompts_part_and_forgets_states_with_them() -> None:
    """The third prompt reuses the first two's common prefix; after a reset there is none, and nothing is reported."""
    scheduler, shared = scheduler_of("align"), [7] * 9
    assert scheduler.known.follow() == {}
    first = compute(scheduler, "a", [*shared, 1, 1, 1, 1, 1])
    assert scheduler.known.changes() == dict.fromkeys(first.block_hashes[:3], "device")
    second = compute(scheduler, "b", [*shared, 2, 2])
    assert (second.num_cached_tokens, second.block_hashes[:2]) == (0, first.block_hashes[:2])
    assert compute(scheduler, "c", [*shared, 3]).num_cached_tokens == 8
    scheduler.forget()
    assert scheduler.known.changes() == dict.fromkeys(first.block_hashes[:3])
    assert [each.blocks.num_cached for each in scheduler.groups] == [0, 0]
    assert compute(scheduler, "d", [*shared, 3]).num_cached_tokens == 0


def test_nothing_is_told_of_a_model_that_keeps_no_states() -> None:
    scheduler = scheduler_of("none")
    assert scheduler.known.follow() == {}
    compute(scheduler, "a", [1] * 12)
    assert scheduler.known.changes() == {}
