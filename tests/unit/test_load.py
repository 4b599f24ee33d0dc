"""A worker's report of leases and leaked blocks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.imports import Imports
from pd_cluster.engine.handover.shipping import ShipGroup, ShipLimits, ShipSizes
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.worker.worker_load import num_leaked_blocks
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import STATE, within
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Leg, Request, RequestSpec, Sampling, TokenOutput


def request_of(leg: Leg, name: str = "r") -> Request:
    return Request(name, RequestSpec([1] * 8, Sampling(max_tokens=4)), leg=leg, transfer_id=name, peer="peer")


def test_blocks_that_no_request_holds_are_told() -> None:
    scheduler = StepScheduler([LayerGroup(BlockPool(16))], StepSizes(4, 4, 64))
    request, sibling = request_of("hybrid"), request_of("hybrid", "s")
    scheduler.add(request)
    scheduler.computed(scheduler.plan())
    assert (scheduler.blocks.num_held, num_leaked_blocks(scheduler)) == (2, 0)
    scheduler.requests[sibling.key] = sibling
    sibling.tables[0] = request.tables[0][:1]
    scheduler.blocks.share(sibling.tables[0])
    assert num_leaked_blocks(scheduler) == 0
    scheduler.blocks.take(3)
    assert num_leaked_blocks(scheduler) == 2  # shared blocks may reduce the count, but never increase it
    for each in (request, sibling):
        scheduler.running[:] = [r for r in scheduler.running if r is not each]
        scheduler.holdings.give_back(each)
        del scheduler.requests[each.key]
    assert num_leaked_blocks(scheduler) == 3


def test_leaked_blocks_of_all_groups_are_told() -> None:
    """Leaks in all groups count; table entries that a window has passed hold no block."""
    groups = [LayerGroup(BlockPool(16)), LayerGroup(BlockPool(16), within(4)), LayerGroup(BlockPool(4), STATE)]
    scheduler = StepScheduler(groups, StepSizes(4, 4, 64))
    scheduler.add(request_of("hybrid"))
    scheduler.computed(scheduler.plan())
    assert ([each.blocks.num_held for each in groups], num_leaked_blocks(scheduler)) == ([2, 1, 1], 0)
    for at, each in enumerate(groups):
        each.blocks.take(1)
        assert num_leaked_blocks(scheduler) == at + 1


class Exporting:
    def __init__(self) -> None:
        self.now_s = 0.0
        ports = Mock()
        ports.link_to.return_value = "c"
        ports.progress_s.return_value = 0.0
        ports.limits.return_value = ShipLimits(4, 1 << 20, 2)
        self.ended: list[str | None] = []
        scheduler = StepScheduler([LayerGroup(BlockPool(8))], StepSizes(4, 4, 16))
        outcomes = Mock(export_ended=lambda request, error: self.ended.append(error))
        terms = TransferTerms(lambda: self.now_s, Timeouts())
        self.exports = Exports(ports, outcomes, terms, ShipSizes((ShipGroup(4, 32),)))
        self.request = request_of("prefill")
        scheduler.add(self.request)
        plan = scheduler.plan()
        self.exports.admitted(self.request)
        scheduler.computed(plan)

    def counts(self) -> tuple[int, int, int, int]:
        exports = self.exports
        return exports.num_handed_over, exports.num_failed, exports.num_expired_credits, exports.num_expired_holds

    def hand_over(self) -> None:
        self.exports.on_credit("c", wire.Credit("r", [0]))
        self.exports.computed(self.request, [TokenOutput("r", 0, 0, 0, 5)])


def test_a_transfer_that_is_confirmed_counts_as_handed_over_and_an_aborted_one_is_no_failure() -> None:
    world, aborted = Exporting(), Exporting()
    world.hand_over()
    assert world.exports.held.take("c", "r")
    world.exports.on_handed_over("c", "r")
    assert (world.ended, world.counts()) == ([None], (1, 0, 0, 0))
    aborted.exports.abort(aborted.request)
    assert (aborted.ended, aborted.counts()) == ([], (0, 0, 0, 0))


@pytest.mark.parametrize(("is_credited", "counts"), [(False, (0, 1, 1, 0)), (True, (0, 1, 0, 1))])
def test_an_expired_lease_counts_by_what_it_waited_for(is_credited: bool, counts: tuple[int, ...]) -> None:
    world = Exporting()
    if is_credited:
        world.hand_over()
    world.now_s = 1000.0
    world.exports.expire()
    assert len(world.ended) == 1
    assert world.counts() == counts


def test_a_landing_that_stands_still_counts_as_expired() -> None:
    now_s, ports = [0.0], Mock()
    ports.progress_s.return_value = 0.0
    scheduler = StepScheduler([LayerGroup(BlockPool(8))], StepSizes(4, 4, 16))
    outcomes = Mock()
    imports = Imports(scheduler, ports, outcomes, TransferTerms(lambda: now_s[0], Timeouts()), 4, 100)
    imports.submit(request_of("decode"))
    imports.on_offer("c", wire.Offer("r", 8))
    imports.credit()
    imports.expire()
    assert imports.num_expired == 0
    now_s[0] = 1000.0
    imports.expire()
    imports.expire()  # it drains now, and must not be given up twice
    assert (imports.num_expired, outcomes.import_ended.call_count) == (1, 1)


def test_what_waits_for_its_prompt_is_told_from_what_waits_for_memory() -> None:
    imports = Imports(
        StepScheduler([LayerGroup(BlockPool(8))], StepSizes(4, 4, 16)),
        Mock(),
        Mock(),
        TransferTerms(lambda: 0.0, Timeouts()),
        4,
        100,
    )
    imports.submit(request_of("decode"))
    imports.submit(request_of("decode", "s"))
    assert (imports.num_queued, imports.num_expected) == (2, 2)
    imports.on_offer("c", wire.Offer("r", 8))
    assert (imports.num_queued, imports.num_expected) == (2, 1)
