"""Large messages are handled in slices: in order within a leg, with other legs and tasks in between."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from pd_cluster import wire
from pd_cluster.cluster.routing.message_slices import MOST_OF_LEG, SLICE_NUM_TOKENS, MessageSlices
from pd_cluster.types import LegEnd, PromptOutput, TokenOutput
from tests.support.router_world import token

LARGE = 3 * SLICE_NUM_TOKENS + 1


def step(position: int, count: int = LARGE) -> wire.Outputs:
    """Returns a message with one token for each of `count` requests."""
    return wire.Outputs([token(f"r{at}", position) for at in range(count)])


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


Items = defaultdict[tuple[str, str], list[object]]


def note(items: Items, conn: str, outputs: wire.Outputs) -> None:
    told: list[PromptOutput | TokenOutput | LegEnd] = [*outputs.prompts, *outputs.tokens, *outputs.ended]
    for item in told:
        items[conn, item.request_id].append(item)


@pytest.mark.parametrize("seed", range(20))
async def test_every_leg_keeps_its_order(seed: int) -> None:
    """For any arrivals, each leg's prompt, tokens and end are delivered in the order sent, and once."""
    rng = random.Random(seed)
    seen, sent = Items(list), Items(list)
    heard: list[float] = []

    def handle(conn: str, outputs: wire.Outputs, heard_s: float) -> None:
        heard.append(heard_s)
        note(seen, conn, outputs)

    slices = MessageSlices(handle)
    over: set[tuple[str, str]] = set()  # ended legs, of which nothing may follow
    for position in range(rng.randrange(1, 12)):
        conn = rng.choice("ab")
        ids = [f"r{at}" for at in range(rng.randrange(LARGE)) if (conn, f"r{at}") not in over]
        tokens = [token(each, position) for each in ids for _ in range(rng.randrange(1, 3))]
        ended = [LegEnd(each, 0) for each in ids if rng.random() < 0.1]
        over |= {(conn, end.request_id) for end in ended}
        outputs = wire.Outputs(tokens, ended, [PromptOutput("new", 0, position)])
        note(sent, conn, outputs)
        slices.add(conn, outputs, float(position))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    await settle()
    assert seen == sent
    assert set(heard) <= set(map(float, range(12)))


async def test_others_do_not_wait_for_a_large_message() -> None:
    seen: list[tuple[str, int]] = []
    slices = MessageSlices(lambda conn, outputs, heard_s: seen.append((conn, len(outputs.tokens))))
    slices.add("large", step(0), 0.0)
    assert seen == [("large", SLICE_NUM_TOKENS)], "its first slice must be handled at once"
    slices.add("small", step(0, 1), 0.0)
    assert seen[1:] == [("small", 1)]
    slices.add("large", wire.Outputs([token(f"r{LARGE - 1}", 1)]), 0.0)
    assert len(seen) == 2, "it must come after its leg's waiting messages"
    await settle()
    assert sum(count for conn, count in seen if conn == "large") == LARGE + 1


async def test_who_has_fallen_behind_hands_over_all_that_waits() -> None:
    """If five steps wait, each leg's tokens are delivered together, instead of in five times as many slices."""
    seen: list[list[TokenOutput]] = []
    slices = MessageSlices(lambda conn, outputs, heard_s: seen.append(outputs.tokens))
    for position in range(5):
        slices.add("d", step(position), 0.0)
    await settle()
    later = [item for tokens in seen[1:] for item in tokens if item.request_id == f"r{LARGE - 1}"]
    (together,) = [tokens for tokens in seen if later[0] in tokens]
    assert [item.position for item in later] == [0, 1, 2, 3, 4]
    assert all(item in together for item in later)
    assert sum(map(len, seen)) == 5 * LARGE


async def test_one_leg_that_says_very_much_lets_others_in_between() -> None:
    seen: list[list[str]] = []
    slices = MessageSlices(lambda conn, outputs, heard_s: seen.append([item.request_id for item in outputs.tokens]))
    beams = [token("beams", position) for position in range(3 * MOST_OF_LEG)]
    slices.add("d", wire.Outputs([*beams, token("other", 0)]), 0.0)
    await settle()
    assert list(map(len, seen)) == [MOST_OF_LEG, MOST_OF_LEG + 1, MOST_OF_LEG]
    assert "other" in seen[1]


async def test_a_slice_that_fails_does_not_keep_the_others() -> None:
    seen: list[int] = []

    def handle(conn: str, outputs: wire.Outputs, heard_s: float) -> None:
        seen.append(len(outputs.tokens))
        if len(seen) == 2:
            raise ValueError("on purpose")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    MessageSlices(handle).add("a", step(0), 0.0)
    await settle()
    assert sum(seen) == LARGE


async def test_a_slice_was_heard_when_the_first_of_it_was() -> None:
    heard: list[float] = []
    slices = MessageSlices(lambda conn, outputs, heard_s: heard.append(heard_s))
    slices.add("d", step(0), 1.0)
    slices.add("d", step(1), 2.0)
    slices.add("e", wire.Outputs([token("other", 0)]), 3.0)
    await settle()
    assert heard[:3] == [1.0, 3.0, 1.0]
    assert heard[-1] in (1.0, 2.0)
