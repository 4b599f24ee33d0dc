"""Token buckets against exact fractions, and their shared memory when processes are killed."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from pd_cluster.cluster.tenancy.token_buckets import MINUTE_NS, MOST_A_MINUTE, Bucket, KeyBuckets, go_duration
from pd_cluster.errors import Unavailable
from pd_cluster.extras.key_file.shared_rate_limits import QUICK_TRIES, SharedRateLimits, tag_of

SLOT, TAG = 3, tag_of("ab" * 32)
DEADLINE_S = 30.0


class Exact:
    """A reference bucket in exact fractions of a token."""

    def __init__(self, limit: int) -> None:
        self.limit = self.level = Fraction(limit)

    def wait(self, elapsed_ns: int) -> None:
        self.level = min(self.limit, self.level + self.limit * elapsed_ns / MINUTE_NS)

    def put_back(self, number: int) -> None:
        self.level = min(self.limit, self.level + number)


@pytest.mark.parametrize("seed", range(5))
def test_buckets_hold_what_exact_ones_hold(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.choice([1, 7, 60, 1000, MOST_A_MINUTE])
    bucket, exact = Bucket.full(limit), Exact(limit)
    num_refused = 0
    for _ in range(1000):
        elapsed_ns = rng.choice([0, 1, 999, rng.randrange(10**9), rng.randrange(2 * MINUTE_NS)])
        bucket = bucket.after(elapsed_ns)
        exact.wait(elapsed_ns)
        number = rng.randrange(limit + 1)
        if rng.random() < 0.3:
            bucket = bucket.less(-number)
            exact.put_back(number)
        elif wait_ns := bucket.wait_ns(number):
            num_refused += 1
            assert exact.level < number
            assert bucket.after(wait_ns).wait_ns(number) == 0, "after the reported time it must be available"
            assert bucket.after(wait_ns - 1).wait_ns(number) == 1, "it must not be available earlier"
        else:
            assert exact.level >= number
            bucket = bucket.less(number)
            exact.level -= number
        assert Fraction(bucket.units, MINUTE_NS) == exact.level
        assert bucket.units < 1 << 63
    assert num_refused > 25


def test_no_limit_lets_everything_in() -> None:
    none = Bucket.full(0)
    assert (none.wait_ns(10**12), none.less(5), none.after(5), none.reset_ns) == (0, none, none, 0)
    assert none.limited(60) == Bucket.full(60), "a new limit must begin with a minute's worth"
    used = Bucket.full(100).less(70)
    assert used.limited(1000).remaining == used.limited(50).remaining == 30, "a changed limit must keep what is left"
    assert used.limited(20).remaining == 20


def test_durations_are_as_go_writes_them() -> None:
    for nanoseconds, text in (
        *((0, "0s"), (1, "1ms"), (17 * 10**6, "17ms"), (10**9, "1s"), (1_200_000_000, "1.2s")),
        *((59_999_999_999, "1m0s"), (360 * 10**9, "6m0s"), (61_001 * 10**6, "1m1.001s")),
    ):
        assert go_duration(nanoseconds) == text


# ---- the memory


def left(found: tuple[bool, KeyBuckets] | None) -> tuple[bool, int, int]:
    assert found is not None
    return found[0], found[1].requests.remaining, found[1].tokens.remaining


def test_a_record_is_its_keys_alone() -> None:
    memory = SharedRateLimits.create(lambda: 0)
    memory.set_limits(SLOT, TAG, 10, 100)
    memory.set_limits(SLOT + 1, TAG, 5, 0)
    assert left(memory.take(SLOT, TAG, 1, 60)) == (True, 9, 40)
    assert left(memory.take(SLOT, TAG, 1, 60)) == (False, 9, 40), "it must take all or nothing"
    assert left(memory.take(SLOT + 1, TAG, 1, 10**9)) == (True, 4, 0)
    memory.set_limits(SLOT, TAG, 20, 100)
    assert left(memory.take(SLOT, TAG)) == (True, 9, 40), "a key that stays must keep what is left"
    other = tag_of("cd" * 32)
    assert memory.take(SLOT, other, 1) is None
    memory.set_limits(SLOT, other, 7, 8)
    assert memory.give_back(SLOT, TAG, 5) is None, "the previous owner's use must not count for the next"
    assert left(memory.take(SLOT, other)) == (True, 7, 8)
    memory.clear(SLOT)
    assert memory.take(SLOT, other) is None
    fcntl.lockf(memory.fd, fcntl.LOCK_EX, 1, SLOT + 1)  # the kernel's lock, which does not exclude its own process
    assert left(memory.take(SLOT + 1, TAG)) == (True, 4, 0)


CHILD = """
import fcntl, sys, time
from pd_cluster.extras.key_file.shared_rate_limits import SharedRateLimits
fd, slot, tag, what = (int(each) for each in sys.argv[1:])
memory = SharedRateLimits(fd, lambda: 0)  # nothing is refilled
if what < 0:  # takes tokens and dies with the lock
    print(memory.take(slot, tag, 0, -what)[0], flush=True)
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, slot)
    print("locked", flush=True)
    sys.stdin.read()
else:
    print("there", flush=True)
    sys.stdin.readline()
    print(sum(memory.take(slot, tag, 1, 1)[0] for _ in range(what)), flush=True)
"""


def child(memory: SharedRateLimits, what: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, *map(str, (memory.fd, SLOT, TAG, what))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, pass_fds=[memory.fd], stdin=pipe, stdout=pipe, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_together_get_what_the_limit_says_and_not_one_more() -> None:
    memory = SharedRateLimits.create(lambda: 0)
    memory.set_limits(SLOT, TAG, 1000, 900)
    processes = [child(memory, 700) for _ in range(3)]
    try:
        assert [said(process) for process in processes] == ["there"] * 3
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        assert sum(int(said(process)) for process in processes) == 900
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
    assert left(memory.take(SLOT, TAG)) == (True, 100, 0)


def test_a_killed_process_leaves_no_lock_and_what_it_took_for_a_minute() -> None:
    now_ns = 0
    memory = SharedRateLimits.create(lambda: now_ns)
    memory.set_limits(SLOT, TAG, 0, 1000)
    impatient = SharedRateLimits(os.dup(memory.fd), lambda: 0, lock_timeout_s=0.05)
    process = child(memory, -1000)
    try:
        assert (said(process), said(process)) == ("True", "locked")
        with pytest.raises(Unavailable, match="has locked this key"):
            impatient.take(SLOT, TAG, 1)
        impatient.set_limits(SLOT + 1, TAG, 1, 1)  # other keys must not wait
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    found = memory.take(SLOT, TAG, 0, 1000)
    assert found is not None
    assert not found[0], "used tokens must not return at once"
    now_ns = MINUTE_NS
    assert left(memory.take(SLOT, TAG, 0, 1000)) == (True, 0, 0), "they must return after a minute"


def test_a_stopped_process_holds_up_one_request_of_a_key_and_not_each(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedRateLimits.create(lambda: 0)
    memory.set_limits(SLOT, TAG, 10, 10)
    impatient = SharedRateLimits(memory.fd, lambda: 0, lock_timeout_s=0.05)
    num_tries = 0

    def held(*_: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", held)
        with pytest.raises(Unavailable):
            impatient.take(SLOT, TAG, 1)
        num_tries, impatient._lock_timeout_s = 0, DEADLINE_S
        with pytest.raises(Unavailable):
            impatient.take(SLOT, TAG, 1)
        assert num_tries == QUICK_TRIES + 1
    assert left(impatient.take(SLOT, TAG, 1)) == (True, 9, 10)
    assert not impatient._stuck, "after it is available, the next wait must be as long as the first"


class Dying:
    """A record whose writer dies, so that only some writes happen."""

    def __init__(self, words: Any, num_writes: int) -> None:
        self._words = words
        self._num_writes = num_writes

    def __getitem__(self, at: int) -> int:
        number: int = self._words[at]
        return number

    def __setitem__(self, at: int, value: int) -> None:
        if not self._num_writes:
            raise SystemExit
        self._num_writes -= 1
        self._words[at] = value


@pytest.mark.parametrize("num_writes", range(4))
def test_a_death_between_two_words_gives_the_key_nothing(num_writes: int) -> None:
    now_ns = 0
    memory = SharedRateLimits.create(lambda: now_ns)
    memory.set_limits(SLOT, TAG, 1000, 1000)
    assert left(memory.take(SLOT, TAG, 500, 500)) == (True, 500, 500)
    now_ns = MINUTE_NS // 10
    dying = SharedRateLimits(memory.fd, lambda: now_ns)
    dying._words = Dying(dying._words, num_writes)  # type: ignore[assignment]
    if num_writes < 3:
        with pytest.raises(SystemExit):
            dying.take(SLOT, TAG, 100, 100)
    else:
        dying.take(SLOT, TAG, 100, 100)
    _, requests, tokens = left(memory.take(SLOT, TAG))
    if num_writes in (0, 3):
        assert requests == tokens == (500 if num_writes else 600)
    else:
        assert max(requests, tokens) <= 500, "tokens that time has added must not be lost"
