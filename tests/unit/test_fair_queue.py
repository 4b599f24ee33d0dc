"""Clients get equal shares of a cluster's tokens, whatever each of them sends."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pd_cluster.cluster.queueing.fair_queue import MAX_CLIENTS, RECENT_S, FairQueue, QueueEntry


def anybody(entry: QueueEntry) -> bool:
    return True


class World:
    """A queue whose requests use the expected number of tokens unless `takes` says otherwise."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.now_s = 0.0
        self.served: Counter[str] = Counter()

    def send(self, name: str, num_tokens: int = 10, num_sequences: int = 1, priority: int = 0) -> QueueEntry:
        entry = QueueEntry(self.queue.client(name, self.now_s), num_tokens, num_sequences, priority)
        self.queue.join(entry)
        return entry

    def serve(self, takes: int | None = None) -> QueueEntry | None:
        entry = self.queue.next(anybody)
        if entry is not None:
            self.queue.begin(entry)
            num_tokens = entry.num_tokens if takes is None else takes
            self.queue.end(entry, num_tokens)
            self.served[entry.client.name] += num_tokens
        return entry

    def order(self) -> list[str]:
        found = []
        while (entry := self.serve()) is not None:
            found.append(entry.client.name)
        return found


def test_one_client_is_served_as_it_sends() -> None:
    world = World()
    entries = [world.send("a", num_tokens) for num_tokens in (5, 500, 1)]
    assert [world.serve() for _ in range(4)] == [*entries, None]


def test_what_a_request_took_counts_and_not_what_it_might_have() -> None:
    world = World()
    for _ in range(1000):
        world.send("short", 100)
        world.send("long", 100)
    for _ in range(300):
        entry = world.queue.next(anybody)
        assert entry is not None
        world.serve(takes=25 if entry.client.name == "short" else 100)
    assert abs(world.served["short"] - world.served["long"]) <= 200
    guest = world.send("guest", 10)
    assert world.serve() is guest, "a client with few requests must not wait for one with many"


@pytest.mark.parametrize("is_arriving", [False, True])
def test_nobody_saves_up_turns(is_arriving: bool) -> None:
    """A client that was idle, or whose request is still arriving, gains no extra turns."""
    world = World()
    world.queue.client("away", 0.0).num_arriving_tokens += is_arriving
    for _ in range(100):
        world.send("here")
    for _ in range(50):
        world.serve()
    for _ in range(20):
        world.send("away")
    order = world.order()
    assert order[:6].count("away") in (3, 4)
    assert order.index("here") <= 1


def test_shares_are_even_among_any_number_of_clients() -> None:
    draw, world = random.Random(0), World()
    names = [f"client-{at}" for at in range(20)]
    for name in names:
        for _ in range(200):
            world.send(name, draw.randint(1, 50))
    while sum(world.served.values()) < 20 * 500:
        world.serve()
    assert max(world.served.values()) - min(world.served.values()) <= 100


def test_priorities_come_before_shares() -> None:
    world = World()
    world.send("a", priority=1)
    world.send("b", priority=0)
    world.send("b", priority=-1)
    assert [entry.priority for entry in iter(world.serve, None) if entry is not None] == [-1, 0, 1]


def test_who_gives_up_is_forgotten() -> None:
    world = World()
    first, second, third = (world.send("a") for _ in range(3))
    world.queue.leave(first)
    world.queue.leave(first)
    assert (world.queue.num_waiting, world.queue.num_tokens) == (2, 20)
    world.queue.leave(third)
    assert [world.serve(), world.serve()] == [second, None]
    assert (world.queue.num_waiting, world.queue.num_tokens) == (0, 0)


def test_one_that_may_not_begin_does_not_hold_up_others() -> None:
    world = World()
    world.send("a")
    b = world.send("b")
    assert world.queue.next(lambda entry: entry.client.name != "a") is b
    assert world.queue.next(lambda entry: False) is None


def test_what_comes_before_a_new_request() -> None:
    world = World()
    queue = world.queue
    for _ in range(10):
        world.send("hog", 100)
    hog, guest = queue.client("hog", 0.0), queue.client("guest", 0.0)
    assert queue.tokens_before(hog) == 1000
    queue.begin(queue.next(anybody) or world.send("nobody"))  # now the hog's counter is ahead of all others
    assert queue.tokens_before(guest) == 0
    guest.num_arriving_tokens += 150
    assert queue.tokens_before(guest) == 150 + 150  # the guest's own; the hog's 50 up to 150, and one request
    assert queue.tokens_before(hog) == 900 + 150
    guest.num_arriving_tokens = 0
    for at in range(100):
        world.send(f"client-{at}", 10)
    assert queue.tokens_before(queue.client("last", 0.0)) == 1000, "expected one request of each"


def test_a_share_is_of_those_who_are_here_or_were_lately() -> None:
    world = World()
    world.send("guest")
    world.serve()
    hog = world.send("hog", num_sequences=100)
    world.queue.begin(hog)
    assert world.queue.sharing(world.now_s) == (2, 100)
    assert world.queue.sharing(world.now_s + RECENT_S + 1) == (1, 100)


def test_clients_that_are_gone_take_no_memory() -> None:
    world = World()
    stays = world.send("stays")
    for at in range(3 * MAX_CLIENTS):
        world.send(f"client-{at}")
        world.queue.leave(world.queue.client(f"client-{at}", 0.0).waiting[0][2])
    assert len(world.queue.clients) <= MAX_CLIENTS
    world.now_s = RECENT_S + 1
    world.queue.client("new", world.now_s)
    assert {*world.queue.clients} == {"stays", "new"}
    assert world.serve() is stays


def test_a_part_of_a_full_room_is_everybodys() -> None:
    world = World()
    for _ in range(90):
        world.send("hog", 10)
    for _ in range(2):
        world.send("guest", 10)
    more = [
        world.queue.has_more_than_share(world.queue.client(name, 0.0), 92, 10_000) for name in ("hog", "guest", "new")
    ]
    assert more == [True, False, False]
    assert world.queue.has_more_than_share(world.queue.client("hog", 0.0), 10_000, 1800), "expected turns by tokens"
    assert not world.queue.has_more_than_share(world.queue.client("hog", 0.0), 10_000, 1801)


def test_requests_that_may_never_come_do_not_come_before_those_of_others() -> None:
    world = World()
    world.send("busy", 100)
    world.queue.client("slow", 0.0).num_arriving_tokens += 8_000_000
    assert world.queue.tokens_before(world.queue.client("guest", 0.0)) == 100
    for _ in range(10):
        world.serve()
        world.send("busy", 100)
    assert world.queue.tokens_before(world.queue.client("guest", 0.0)) <= 100


def test_a_new_client_does_not_pay_for_what_another_was_expected_to_take() -> None:
    world = World()
    begun = [world.send("hog", 2000) for _ in range(100)]
    for entry in begun:
        world.queue.begin(entry)
    for _ in range(100):
        world.send("hog")
    for entry in begun:
        world.queue.end(entry, 10)
    world.send("new")
    assert "new" in world.order()[:2]
