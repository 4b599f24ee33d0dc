"""Every field of a request reaches all its sequences, whatever happens to a sequence meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from pd_cluster import types, wire
from pd_cluster.engine.legs.legs import request_of
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import ALL
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes
from pd_cluster.numerics import Numerics
from pd_cluster.types import (
    OWN,
    Image,
    LegEnd,
    Request,
    RequestSpec,
    Resumed,
    RopePositions,
    Sampling,
    Span,
    TokenOutput,
)
from tests.support.router_world import PROMPT, World, rest_of, token
from tests.support.toy_model import ToyRunner

SCOPE = PrefixScope("model", Numerics())
# For each type, a value that is no field's default.
ODD = {int: 7, float: 7.0, str: "odd", tuple: (Span(0, 2, b"odd"),), type(None): RopePositions(((0, 2, 4, 6, 8),), 4)}
NOT_GIVEN = msgspec.NODEFAULT


def odd_fields() -> dict[str, Any]:
    """Returns each field with a default, with another value. A field of a new type needs a value in ODD.

    Excludes `pooling`, which has no sequences; test_pooling.py tests its attempts.
    """
    given = [
        each for each in msgspec.structs.fields(RequestSpec) if each.default != NOT_GIVEN and each.name != "pooling"
    ]
    odd = {each.name: not each.default if type(each.default) is bool else ODD[type(each.default)] for each in given}
    return odd | {"images": (Image(2, 2, b"odd"),), "prediction": (7,)}


def submit_of(order: RequestSpec) -> wire.Submit:
    """Returns the message as decoded by a worker."""
    sent = wire.Submit("r", 0, "t", "hybrid", "", order, 0.0)
    body = wire.decode(wire.seal("s", 1, 2, wire.encode_body(sent))).body
    assert isinstance(body, wire.Submit)
    return body


async def test_every_attempt_is_told_the_whole_order() -> None:
    world = World()
    order = RequestSpec(PROMPT, Sampling(max_tokens=4), **odd_fields())
    serving, first, rid = await world.begin(order.sampling, **odd_fields())
    world.lose("prefill-0")  # before the first token
    while len(world.mailbox.of(wire.Submit)) < 4:
        await asyncio.sleep(0)
    (prefill, _), (decode, _) = world.mailbox.of(wire.Submit)[2:]
    world.outputs(prefill, token(rid, 0, 5, attempt=1), ended=LegEnd(rid, 1))
    world.outputs(decode, TokenOutput(rid, 1, 0, 2, 7, earlier=(6,)))
    assert (await first).token_id == 5
    rest = asyncio.ensure_future(rest_of(serving))
    world.lose(decode.removeprefix("to-"))  # during the stream
    while len(world.mailbox.of(wire.Submit)) < 5:
        await asyncio.sleep(0)
    orders = [(body.leg, body.order) for _, body in world.mailbox.of(wire.Submit)]
    assert [own for leg, own in orders if leg != "decode"] == [order] * 3
    assert [own for leg, own in orders if leg == "decode"] == [order.without_pixels()] * 2
    assert order.without_pixels() != order, "a leg that continues alone must get them again"
    assert world.mailbox.of(wire.Submit)[-1][1].resumed
    rest.cancel()
    await asyncio.gather(rest, return_exceptions=True)
    await serving.aclose()


@pytest.mark.parametrize("num_swap_blocks", [0, 20])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(n=3, max_tokens=20), Sampling(n=2, beam_width=3, temperature=0.0, max_tokens=20)],
    ids=["n", "beams"],
)
def test_every_sequence_of_an_engine_has_the_whole_order(sampling: Sampling, num_swap_blocks: int) -> None:
    orders = [RequestSpec([at, 5, 6, 7, 8], sampling, **odd_fields()) for at in (1, 2)]
    scheduler = StepScheduler([LayerGroup(BlockPool(12), ALL, BlockPool(num_swap_blocks))], StepSizes(4, 8, 16), SCOPE)
    core = EngineCore(ToyRunner(12, 4, num_swap_blocks), scheduler)
    wanted = {}
    for at, order in enumerate(orders):
        request = request_of(msgspec.structs.replace(submit_of(order), request_id=f"r{at}"), "client", float(at))
        wanted[request.request_id] = order
        scheduler.add(request)
    seen = set()
    while scheduler.requests:
        core.step()
        for request in scheduler.requests.values():
            assert request.order == wanted[request.request_id]
            seen.add(request.key)
    assert len(seen) == 6
    assert scheduler.num_preemptions > 0


def test_a_resumed_sequence_has_the_whole_order() -> None:
    order = RequestSpec([1, 2], Sampling(n=2), **odd_fields())
    request = types.resume(request_of(submit_of(order), "client", 3.0), Resumed(1, [9]))
    assert (request.order, request.index, request.output_token_ids, request.arrival_s) == (order, 1, [9], 3.0)


def test_siblings_share_what_is_the_requests_and_nothing_that_changes_with_one_of_them() -> None:
    """Each new field must be added to this list, or be marked as a sequence's own."""
    order = RequestSpec([1, 2], Sampling(n=2))
    parent = Request("r", order, attempt=2, arrival_s=3.0, leg="decode", transfer_id="t", peer="p", client="c")
    parent.kv_precision, parent.num_cached_tokens = "int8", 1
    parent.prompt_logprobs.append(None)
    child = types.sibling(parent, index=1)
    own = {each.name for each in fields(Request) if each.metadata == OWN}
    of_order = {each.name for each in fields(Request) if not each.init}
    shared = {"request_id", "order", "attempt", "arrival_s", "leg", "transfer_id", "peer", "client"}
    shared |= {"kv_precision", "num_cached_tokens", "is_pull", "prompt_logprobs"}
    assert {each.name for each in fields(Request)} == own | of_order | shared
    for name in shared | of_order:
        assert getattr(child, name) == getattr(parent, name), name
    for name in own:
        value = getattr(child, name)
        assert not isinstance(value, list | set | dict) or value is not getattr(parent, name), name
    fresh = Request("r", order)
    assert {name: getattr(child, name) for name in own} == {**{n: getattr(fresh, n) for n in own}, "index": 1}


def test_requests_of_different_variants_share_no_blocks() -> None:
    scheduler = StepScheduler([LayerGroup(BlockPool(40))], StepSizes(4, 8, 64), SCOPE)
    core = EngineCore(ToyRunner(40, 4), scheduler)
    cached = []
    for at, variant in enumerate(["", "a", "b", "a", ""]):
        order = RequestSpec([5] * 13, Sampling(max_tokens=1), variant=variant)
        request = Request(f"r{at}", order)
        scheduler.add(request)
        core.step()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 12, 12]
    roots = {SCOPE.root(RequestSpec([1], Sampling(), salt, variant)) for salt in ("", "a") for variant in ("", "a")}
    assert len(roots) == 4


def test_blocks_are_shared_up_to_the_first_span_of_another_content() -> None:
    """A span begins in the third of five blocks of 4 tokens, and ends in the fourth."""
    tokens = list(range(20))

    def hashes(*spans: Span) -> list[bytes]:
        return chain_hashes(b"root", tokens, 4, spans=spans)

    plain, cat, dog = hashes(), hashes(Span(10, 14, b"cat")), hashes(Span(10, 14, b"dog"))
    for one, other in ((plain, cat), (cat, dog), (plain, dog), (cat, hashes(Span(11, 14, b"cat")))):
        assert one[:2] == other[:2]
        assert not {*one[2:]} & {*other[2:]}
    assert cat == hashes(Span(10, 14, b"cat"))
    assert cat == [*cat[:3], *chain_hashes(cat[2], tokens[12:], 4, 12, (Span(10, 14, b"cat"),))]
    swapped = hashes(Span(8, 10, b"dog"), Span(10, 12, b"cat"))
    assert hashes(Span(8, 10, b"cat"), Span(10, 12, b"dog"))[2:] != swapped[2:]


def test_requests_of_different_contents_share_no_blocks_behind_them() -> None:
    """Engine and router share only blocks before the first different span or rotary position."""
    spans = [{"spans": (Span(9, 11, content),)} for content in (b"cat", b"dog", b"cat")]
    rows = [(tuple(i + gap * (i >= 9) for i in range(17)), gap) for gap in (3, 4, 3)]
    positions = [{"rope_positions": RopePositions((row,), gap)} for row, gap in rows]
    for contents in (spans, positions):
        scheduler = StepScheduler([LayerGroup(BlockPool(32))], StepSizes(4, 4, 64), SCOPE)
        found = []
        for at, own in enumerate(contents):
            order = RequestSpec([5] * 17, Sampling(max_tokens=1), **own)  # type: ignore[arg-type]
            request = Request(f"r{at}", order, arrival_s=float(at))
            scheduler.add(request)
            scheduler.computed(scheduler.plan())
            found.append(request.num_cached_tokens)
            scheduler.finish(request)
        assert found == [0, 8, 16]


def test_blocks_are_shared_as_long_as_their_rotary_positions_are_equal() -> None:
    """Positions equal to the tokens' indices, in one row or in three, share blocks with requests without positions."""
    tokens, indices = list(range(20)), tuple(range(12))

    def hashes(*rows: tuple[int, ...], delta: int = 0) -> list[bytes]:
        return chain_hashes(b"root", tokens, 4, rope_positions=RopePositions(rows, delta))

    plain = chain_hashes(b"root", tokens, 4)
    assert hashes(indices) == hashes(indices, indices, indices) == plain
    gap, later = (*indices[:6], *range(16, 22)), (*indices[:6], *range(17, 23))
    for one, other in ((hashes(gap), plain), (hashes(gap), hashes(later)), (hashes(gap, indices, indices), plain)):
        assert one[:1] == other[:1]
        assert not {*one[1:]} & {*other[1:]}
    assert hashes(gap, delta=9) != hashes(gap, delta=10)  # tokens after the prompt
    assert hashes(gap, delta=9)[:3] == hashes(gap, gap, gap, delta=10)[:3]
    assert hashes(indices, delta=1)[3:] != plain[3:]
    continued = chain_hashes(hashes(gap)[1], tokens[8:], 4, 8, (), RopePositions((gap,)))
    assert hashes(gap)[2:] == continued
