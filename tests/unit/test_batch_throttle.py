"""Batch requests begin all at once if there are no others; otherwise they get a fifth of the prefill time."""

from __future__ import annotations

import random

from pd_cluster.service.files.batch_throttle import PAUSE, QUIET_S, BatchThrottle, ClusterCapacity

FREE = ClusterCapacity(num_prefills=1, num_places=256, is_free=True)


def test_alone_they_take_what_there_is() -> None:
    throttle = BatchThrottle(most=8)
    for at in range(8):
        assert throttle.may_begin(at, FREE)
        throttle.begins()
        throttle.sent(str(at), at)
        throttle.has_token(str(at), at + 0.5)
    assert not throttle.may_begin(9.0, FREE), "expected as many as are allowed"
    throttle.ends()
    assert throttle.may_begin(9.0, FREE)
    assert not throttle.may_begin(9.0, FREE._replace(is_free=False))


def test_alone_no_more_prompts_are_sent_than_prefill_instances_begin_soon() -> None:
    throttle = BatchThrottle(most=64)
    for _ in range(2):
        assert throttle.may_begin(0.0, FREE)
        throttle.begins()
    assert not throttle.may_begin(0.0, FREE)
    assert throttle.may_begin(0.0, FREE._replace(num_prefills=2))
    throttle.ends()  # ended without a first token: it was refused
    throttle.ends()
    assert throttle.may_begin(0.0, FREE)


def test_beside_others_prompts_take_a_fifth_of_the_time() -> None:
    rng, throttle, now_s, busy_s = random.Random(1), BatchThrottle(most=64), 0.0, 0.0
    throttle.interactive_begins(0.0)
    for at in range(2000):
        while not throttle.may_begin(now_s, FREE):
            now_s += 0.001
        throttle.begins()
        throttle.sent(str(at), now_s)
        assert not throttle.may_begin(now_s, FREE), "expected one at a time"
        took_s = rng.uniform(0.01, 0.1)
        busy_s, now_s = busy_s + took_s, now_s + took_s
        throttle.has_token(str(at), now_s)
        throttle.has_token(str(at), now_s + 9)  # its end has no further effect
        throttle.ends()
    assert busy_s <= now_s / (1 + PAUSE) * 1.01


def test_beside_others_they_have_a_quarter_of_the_places() -> None:
    throttle, now_s = BatchThrottle(most=64), 0.0
    throttle.interactive_begins(0.0)
    capacity = FREE._replace(num_places=16)
    for at in range(4):
        assert throttle.may_begin(now_s, capacity)
        throttle.begins()
        throttle.sent(str(at), now_s)
        throttle.has_token(str(at), now_s + 1.0)
        now_s += 10
    assert not throttle.may_begin(now_s, capacity)


def test_others_count_for_a_while_after_their_end() -> None:
    throttle = BatchThrottle(most=64)
    throttle.interactive_begins(0.0)
    throttle.interactive_ends(7.0)
    assert throttle.is_beside_others(7.0 + QUIET_S - 0.1)
    assert not throttle.is_beside_others(7.0 + QUIET_S)
