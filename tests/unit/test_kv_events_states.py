"""KV events of a model with states: only blocks before a kept state are published; checked with random traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pd_cluster.engine.scheduling import block_holdings
from pd_cluster.engine.stages.kv_event_publisher import KVEvents
from pd_cluster.engine.step.commit import StepResult
from pd_cluster.kv import prefix_index
from pd_cluster.kv.kv_event_log import number_of
from pd_cluster.kv.prefix_index import chain_hashes
from pd_cluster.kv.reached_blocks import ReachedBlocks
from tests.support.kv_event_readers import Mirror, ToMirror
from tests.support.random_traffic import Traffic


class Chains:
    """Records the parent of each hashed content, to walk back from a kept state."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}

    def hash(self, parent: bytes, *rest: Any) -> list[bytes]:
        found = chain_hashes(parent, *rest)
        self.parents |= zip(found, [parent, *found], strict=False)
        return found

    def before(self, content: bytes) -> Iterator[bytes]:
        """Yields a content and its predecessors."""
        while content in self.parents:
            yield content
            content = self.parents[content]


class PublishedTraffic(Traffic):
    """Sometimes publishes, sometimes forgets everything; compares with a search of all chains."""

    def __init__(self, seed: int, chains: Chains) -> None:
        super().__init__(seed, kinds=("all state", "all window state"))
        self.mirror, self.chains = Mirror(), chains
        publisher: Any = ToMirror(self.mirror)
        self.events = KVEvents(self.scheduler.known, self.scheduler.block_size, publisher)
        self.num_reached = self.num_unreached = 0

    def note(self, result: StepResult) -> None:
        super().note(result)
        if self.rng.random() < 0.1:  # a block may be taken between the two calls
            changes = self.scheduler.known.changes()
            self.scheduler.groups[0].blocks.release(self.scheduler.groups[0].blocks.take(1) if self.has_room else [])
            self.events.blocks_changed(changes)
        if self.rng.random() < 0.02:
            self.scheduler.forget()
        if self.rng.random() < 0.4:
            self.compare()

    @property
    def has_room(self) -> bool:
        return self.scheduler.groups[0].blocks.num_available > 0

    def compare(self) -> None:
        self.events.blocks_changed(self.scheduler.known.changes())
        tokens, states = self.scheduler.groups[0].blocks, self.scheduler.groups[-1].blocks
        kept, parents = [each for each in self.chains.parents if each in states], self.chains.parents
        reached = {content for each in kept for content in self.chains.before(each) if content in tokens}
        assert self.mirror.hashes("GPU") == {number_of(content) for content in reached}
        self.num_reached += len(reached)
        self.num_unreached += sum(content in tokens for content in parents) - len(reached)
        for content in reached:
            parent, ids = self.mirror.blocks["GPU"][number_of(content)]
            assert parent == (number_of(parents[content]) if parents[content] in parents else None)
            assert len(ids) == self.scheduler.block_size


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Chains:
    found = Chains()
    for module in (block_holdings, prefix_index):
        monkeypatch.setattr(module, "chain_hashes", found.hash)
    return found


def explore(chains: Chains) -> None:
    num_reached = num_unreached = 0
    for seed in range(4):
        traffic = PublishedTraffic(seed, chains)
        traffic.run(20)
        traffic.compare()
        num_reached, num_unreached = num_reached + traffic.num_reached, num_unreached + traffic.num_unreached
        chains.parents.clear()
    assert min(num_reached, num_unreached) > 100


def test_events_add_up_to_the_blocks_before_kept_states(chains: Chains) -> None:
    explore(chains)


def test_events_of_all_blocks_are_noticed(chains: Chains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReachedBlocks, "_is_reached", lambda self, content: True)
    with pytest.raises(AssertionError):
        explore(chains)
