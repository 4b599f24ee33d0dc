"""`--kv-shared-cache` with a real server: tokens are exact, salts separate, foreign blocks ignored, waits short."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.kv.block_seal import Seal
from pd_cluster.kv.disk_store import DiskStore
from pd_cluster.kv.shared_store import FAILURES, Breaker, SharedStore
from pd_cluster.kv.tier_commands import LowerKind
from pd_cluster.kv.tier_thread import Store
from tests.model.test_kv_tiers import BLOCK, NUM_FULL, ask_all, prompts_of
from tests.support.engines import assert_same
from tests.support.key_value_server import KeyValueServer
from tests.support.tiers import SECRET, WAIT_S, TieredEngine

pytestmark = pytest.mark.slow  # the server may have to be downloaded


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyValueServer]:
    with KeyValueServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def start(checkpoint: Callable[..., Path], server: KeyValueServer) -> Iterator[Callable[..., TieredEngine]]:
    server.client.flushall()
    running: list[TieredEngine] = []

    def make(url: str = server.url, secrets: tuple[bytes, ...] = (SECRET,)) -> TieredEngine:
        stores: Callable[[Seal], dict[LowerKind, Store]] = lambda seal: {"shared": SharedStore(url, seal)}  # noqa: E731
        running.append(TieredEngine(checkpoint("llama"), stores, secrets=secrets))
        return running[-1]

    yield make
    for engine in running:
        engine.close()


def fetched(engine: TieredEngine) -> int:
    return engine.lower["shared"].counts.num_fetched


def test_what_one_instance_has_computed_another_loads(
    start: Callable[..., TieredEngine], checkpoint: Callable[..., Path]
) -> None:
    prompts, one, other = prompts_of(1), start(), start()
    first = ask_all(one, prompts)
    assert [other.ask(prompt) for prompt in prompts] == first
    for prompt, tokens in zip(prompts, first, strict=True):
        assert_same(checkpoint("llama"), prompt, tokens, 4)
    assert fetched(other) >= 2 * NUM_FULL
    assert other.core.scheduler.num_tier_hit_tokens == fetched(other) * BLOCK


def test_a_reset_empties_the_store_only_if_it_is_to(start: Callable[..., TieredEngine], server: KeyValueServer) -> None:
    """A reset removes the blocks of every instance, but nothing of other programs."""
    engine, other, prompts = start(), start(), prompts_of(9)
    tokens = ask_all(engine, prompts)
    server.client.set("other", b"stays")
    before = set(server.client.keys())
    assert len(before) > NUM_FULL
    engine.tiers.cache_reset(is_external=False)
    ask_all(engine, prompts_of(10))
    assert before < set(server.client.keys())
    other.tiers.cache_reset(is_external=True)
    stop_s = time.monotonic() + WAIT_S
    while server.client.keys() != [b"other"]:
        assert time.monotonic() < stop_s, server.client.dbsize()
        time.sleep(0.02)
    assert [engine.ask(prompt) for prompt in prompts] == tokens


def test_the_store_is_told_nothing_of_prompts_and_salts_meet_nowhere(
    start: Callable[..., TieredEngine], server: KeyValueServer
) -> None:
    prompts, one, other = prompts_of(2), start(), start()
    ask_all(one, prompts, "one tenant")
    names = server.client.keys("*")
    request_hashes = {content.hex() for content in one.blocks.follow()}
    assert names
    assert not any(each in name.decode() for name in names for each in request_hashes)
    for salt in ("", "another"):
        other.ask(prompts[0], salt=salt)
    assert fetched(other) == 0
    other.ask(prompts[0], salt="one tenant")
    assert fetched(other) == NUM_FULL


@pytest.mark.parametrize("spoil", ["swap", "cut", "flip", "empty", "type"])
def test_a_poisoned_value_is_never_used(
    start: Callable[..., TieredEngine], server: KeyValueServer, checkpoint: Callable[..., Path], spoil: str
) -> None:
    prompts, one, other = prompts_of(3), start(), start()
    ask_all(one, prompts)
    names = sorted(server.client.keys("*"))
    values = [server.client.get(name) for name in names]
    for at, name in enumerate(names):
        value = bytearray(values[at])
        if spoil == "type":
            server.client.delete(name)
            server.client.lpush(name, "a list")
            continue
        value[len(value) // 2] ^= spoil == "flip"
        value = value[:-1] if spoil == "cut" else bytearray() if spoil == "empty" else value
        server.client.set(name, values[at - 1] if spoil == "swap" else bytes(value))
    for prompt in prompts:
        assert_same(checkpoint("llama"), prompt, other.ask(prompt), 4)
    assert fetched(other) == 0
    if spoil != "type":
        assert sum(other.lower["shared"].counts.num_bad.values()) > 0


def test_a_secret_is_replaced_while_both_are_accepted(start: Callable[..., TieredEngine]) -> None:
    prompts, one = prompts_of(4), start()
    ask_all(one, prompts)
    new = b"the next secret, of 32 bytes or more"
    stranger, other = start(secrets=(new,)), start(secrets=(new, SECRET))
    stranger.ask(prompts[0])
    assert fetched(stranger) == 0
    other.ask(prompts[0])
    assert fetched(other) == NUM_FULL


def test_a_store_that_stands_still_costs_a_bounded_wait_and_then_none(
    start: Callable[..., TieredEngine], server: KeyValueServer, checkpoint: Callable[..., Path]
) -> None:
    prompts, engine = prompts_of(5), start()
    engine.ask(prompts[0])
    engine.settle()
    store = engine.stores["shared"]
    assert isinstance(store, SharedStore)
    server.process.send_signal(signal.SIGSTOP)
    try:
        for prompt in prompts:
            assert_same(checkpoint("llama"), prompt, engine.ask(prompt), 4)
        engine.settle()
        assert store._breaker.is_open
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_nobody_there_is_a_miss(start: Callable[..., TieredEngine], checkpoint: Callable[..., Path]) -> None:
    prompts, engine = prompts_of(6), start("redis://127.0.0.1:9")
    for prompt in prompts:
        assert_same(checkpoint("llama"), prompt, engine.ask(prompt), 4)
    engine.settle()
    assert engine.lower["shared"].counts.num_written == 0


def test_the_breaker_tries_again_and_waits_longer_each_time() -> None:
    now_s = [0.0]
    breaker = Breaker(lambda: now_s[0])
    assert [breaker.failed() for _ in range(FAILURES)] == [*[False] * (FAILURES - 1), True]
    assert breaker.is_open
    now_s[0] += 1.0
    assert not breaker.is_open, "one attempt is due"
    assert breaker.failed()
    now_s[0] += 1.0
    assert breaker.is_open, "the second wait is twice as long"
    now_s[0] += 1.0
    breaker.succeeded()
    assert not breaker.failed()


def test_disk_and_store_work_together(checkpoint: Callable[..., Path], server: KeyValueServer, tmp_path: Path) -> None:
    """An instance with a disk tier reads from the store what its disk lacks."""
    server.client.flushall()

    def stores(name: str) -> Callable[[Seal], dict[LowerKind, Store]]:
        return lambda seal: {"disk": DiskStore(tmp_path / name, "p", seal), "shared": SharedStore(server.url, seal)}

    prompts = prompts_of(7)
    one = TieredEngine(checkpoint("llama"), stores("one"))
    first = ask_all(one, prompts)
    one.close()
    again, other = (TieredEngine(checkpoint("llama"), stores(name)) for name in ("one", "other"))
    assert [again.ask(prompt) for prompt in prompts] == first
    assert again.lower["disk"].counts.num_fetched > 0
    assert [other.ask(prompt) for prompt in prompts] == first
    assert other.lower["disk"].counts.num_fetched == 0
    assert fetched(other) > 0
    for engine in (again, other):
        engine.settle()
        engine.close()
