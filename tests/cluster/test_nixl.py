"""KV cache over NIXL between real processes: exact, and safe when the other end dies or pauses during a transfer.

Needs the extra nixl. Uses UCX's TCP, where a read needs both processes.
"""

from __future__ import annotations

import queue
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster import wire
from pd_cluster.transport.link_events import Drained, LinkFailed
from tests.cluster.test_death import PROMPT, Streaming
from tests.model.test_cuda_transport import Lane, same
from tests.support.cluster import LiveCluster, in_parallel
from tests.support.engines import assert_same, random_prompt
from tests.support.kv_exporter import Ship
from tests.support.nixl import needs_nixl

pytestmark = [pytest.mark.slow, needs_nixl]

Checkpoints = Callable[..., Path]
NUM_SHIPPED = 48  # blocks of 128 KiB, in one payload
PATTERN = 3.0
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


class HeldLane(Lane):
    """A lane with D in this process and P in another; frames can be held back."""

    def __init__(self) -> None:
        self.is_held = False
        self.held: queue.SimpleQueue[wire.KVFrame] = queue.SimpleQueue()
        super().__init__("cpu", "nixl", "nixl", transfer_timeout_s=1.0)

    def put(self, frame: wire.KVFrame) -> None:
        if self.is_held:
            self.held.put(frame)
        else:
            super().put(frame)

    def begin_while_stopped(self, transfer_id: str, into: list[int]) -> None:
        """Lets P announce everything, stops P, then lets D begin to read."""
        self.is_held = True
        self.exporter.tell(Ship(transfer_id, list(range(NUM_SHIPPED)), by_layer=False))
        frames = [self.held.get(timeout=WAIT_S) for _ in range(2)]
        self.exporter.process.send_signal(signal.SIGSTOP)
        self.begin(transfer_id, into)
        for frame in frames:
            self.receive.put(frame)

    def await_event(self, kind: type) -> object:
        while not isinstance(event := self.events.get(timeout=WAIT_S), kind):
            pass
        return event

    def holds(self, into: list[int], value: float) -> bool:
        return bool((self.pool.data[into] == value).all())

    def assert_unchanged(self, *of_owners: list[int]) -> None:
        """Asserts that no byte arrives late during one second."""
        for _ in range(10):
            time.sleep(0.1)
            assert all(self.holds(into, PATTERN) for into in of_owners)


@pytest.fixture
def lane() -> Iterator[HeldLane]:
    made = HeldLane()
    yield made
    made.exporter.process.send_signal(signal.SIGCONT)
    made.close()


def test_blocks_arrive_bit_for_bit(lane: HeldLane) -> None:
    rng = random.Random(1)
    for at, (count, by_layer) in enumerate([(1, True), (2, False), (37, True), (64, False)]):
        ids, into = rng.sample(range(200), count), rng.sample(range(512), count)
        lane.begin(f"exact{at}", into)
        lane.exporter.tell(Ship(f"exact{at}", ids, by_layer=by_layer))
        lane.await_landed()
        assert same(lane.pool, into, lane.expected[ids])


def test_a_peer_that_stands_still_keeps_its_blocks_until_it_has_written_them(lane: HeldLane) -> None:
    """Even past every deadline, blocks are released only after the late bytes, and do not change afterwards."""
    into, others = list(range(100, 100 + NUM_SHIPPED)), list(range(300, 400))
    lane.pool.data[into] = PATTERN
    lane.begin_while_stopped("late", into)
    lane.receive.forget("late")
    lane.await_event(LinkFailed)  # after --transfer-timeout
    lane.pool.data[others] = PATTERN
    time.sleep(1.0)  # gives pending reads time to write
    assert lane.events.empty(), "blocks were released during a read"
    assert lane.holds(into, PATTERN)
    lane.exporter.process.send_signal(signal.SIGCONT)
    assert lane.await_event(Drained) == Drained("late")
    assert same(lane.pool, into, lane.expected[:NUM_SHIPPED]), "no byte arrived late, so the test proves nothing"
    lane.pool.data[into] = PATTERN  # the next owner
    lane.assert_unchanged(into, others)


def test_a_peer_that_dies_in_mid_transfer_gives_its_blocks_back(lane: HeldLane) -> None:
    into = list(range(100, 100 + NUM_SHIPPED))
    lane.begin_while_stopped("dead", into)
    lane.receive.forget("dead")
    lane.exporter.process.kill()
    assert lane.await_event(Drained) == Drained("dead")
    lane.pool.data[into] = PATTERN
    lane.assert_unchanged(into)


# ---- whole clusters


def test_exact_through_equal_and_unequal_pools(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Equal pools are read in place; for another block size or half of the heads, payloads are packed first."""
    model = checkpoint("llama")
    unlike = {"decode-1": ["--block-size=8"], "decode-2": ["--kv-wire-dtype=auto"]}
    arguments = ["--num-blocks=256", "--kv-transport=nixl"]
    sizes = {"decode-2": 2}
    with LiveCluster(tmp_path, model, 1, 3, arguments, member_arguments=unlike, tp_sizes=sizes) as cluster:
        rng = random.Random(1)
        prompts = [random_prompt(rng, length) for length in (1, 7, 8, 9, 16, 23, 25, 40, 64, 100)]

        def job(prompt: list[int]) -> Callable[[], None]:
            return lambda: assert_same(model, prompt, cluster.complete(prompt, 10), 10)

        for _ in range(2):  # the second time with cached prefixes on both sides
            errors = in_parallel([job([*prompt, 5]) for prompt in prompts], concurrency=4)
            assert not errors, errors[0]
            prompts = [[*prompt, 5, 6, 7] for prompt in prompts]
        assert {str(each) for each in cluster.instance("prefill-0")["links"].values()} == {"up (nixl)"}
        assert all(cluster.instance(f"decode-{at}")["kv_received_nbytes"] for at in range(3))
        cluster.assert_home()


@pytest.mark.parametrize("pause", [False, True], ids=["kill -9", "SIGSTOP"])
def test_prefill_fails_under_load(checkpoint: Checkpoints, tmp_path: Path, pause: bool) -> None:
    """Streams continue with the same tokens; all blocks are released, including those of interrupted transfers."""
    model = checkpoint("llama", max_position_embeddings=8192)
    arguments = ["--num-blocks=1024", "--kv-transport=nixl", "--dead-after=1", "--transfer-timeout=3"]
    with LiveCluster(tmp_path, model, 2, 1, arguments) as cluster:
        rng = random.Random(2)
        prompts = [random_prompt(rng, 1500) for _ in range(12)]
        expected = [cluster.complete(prompt, 4) for prompt in prompts]
        prompts = [[prompt[0] + 1, *prompt[1:]] for prompt in prompts]
        stream = Streaming(cluster.url, 400)
        own = stream.some()
        found: list[list[int]] = [[] for _ in prompts]

        def job(at: int) -> Callable[[], None]:
            return lambda: found[at].extend(cluster.complete(prompts[at], 4))

        def fail() -> None:
            cluster.kill_rank("prefill-0", signal.SIGSTOP if pause else signal.SIGKILL)
            if pause:
                time.sleep(5.0)  # longer than every deadline
                cluster.kill_rank("prefill-0", signal.SIGCONT)

        errors = in_parallel([*[job(at) for at in range(6)], fail, *[job(at) for at in range(6, 12)]], concurrency=6)
        assert not errors, errors[0]
        rest = stream.to_the_end()
        assert own + (rest[0] if rest else []) == cluster.complete(PROMPT, 400, ignore_eos=True)
        assert len(expected) == len(found)
        for prompt, tokens in zip(prompts, found, strict=True):
            assert_same(model, prompt, tokens, 4)
        cluster.assert_home()
        assert not cluster.instance("decode-0")["num_quarantined_blocks"]
