"""Tiers below host memory with a real engine: exact tokens and bits from each, restarts, corrupt files, full disks."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pd_cluster.checkpoints.weight_files import SAMPLE_NBYTES
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.kv.block_seal import Seal
from pd_cluster.kv.disk_store import DiskStore
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.prefix_index import chain_hashes
from pd_cluster.kv.tier_commands import LowerKind
from pd_cluster.kv.tier_thread import Store
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.engines import assert_same, generate, make_core, random_prompt, run
from tests.support.tiers import SECRET, TieredEngine

Checkpoints = Callable[..., Path]
NUM_PROMPTS, LENGTH, BLOCK = 5, 60, 8
NUM_FULL = (LENGTH - 1) // BLOCK  # blocks of a prompt that others can use


def on_disk(folder: Path) -> Callable[[Seal], dict[LowerKind, Store]]:
    return lambda seal: {"disk": DiskStore(folder / "cache", "prefill-0/rank-0", seal)}


def ask_all(engine: TieredEngine, prompts: list[list[int]], salt: str = "") -> list[list[int]]:
    """Returns the answers once no tier has pending writes."""
    found = [engine.ask(prompt, salt=salt) for prompt in prompts]
    engine.settle()
    return found


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, LENGTH) for _ in range(NUM_PROMPTS)]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


@pytest.fixture
def engines(checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., TieredEngine]]:
    """Starts engines in turn on one folder: ends the previous engine, then calls `between`."""
    running: list[TieredEngine] = []

    def start(between: Callable[[], None] = lambda: None, **more: object) -> TieredEngine:
        while running:
            running.pop().close()
        between()
        running.append(TieredEngine(checkpoint("llama"), on_disk(tmp_path), **more))  # type: ignore[arg-type]
        return running[0]

    yield start
    for engine in running:
        engine.close()


def test_a_restarted_engine_loads_what_was_on_disk_and_is_exact(
    engines: Callable[..., TieredEngine], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    rng, engine = random.Random(1), engines()
    head = random_prompt(rng, 2 * BLOCK)  # stays on the device, and is on disk after its second use
    prompts = [[*head, *random_prompt(rng, LENGTH - len(head))] for _ in range(10)]
    first = ask_all(engine, prompts)
    had = len(engine.lower["disk"])
    assert had >= 2 + 7 * (NUM_FULL - 2)  # the last ones are still on the device
    assert {path.stat().st_mode & 0o777 for path in files_of(tmp_path)} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").rglob("*") if path.is_dir()} == {0o700}
    engine = engines()
    assert len(engine.lower["disk"]) == had, "the index is read again"
    assert [engine.ask(prompt) for prompt in prompts] == first
    for prompt, tokens in zip(prompts, first, strict=True):
        assert_same(checkpoint("llama"), prompt, tokens, 4)
    fetched = engine.lower["disk"].counts.num_fetched
    assert fetched >= 0.9 * had
    assert engine.core.scheduler.num_tier_hit_tokens >= fetched * BLOCK > 0
    assert sum(engine.lower["disk"].counts.num_bad.values()) == 0


def test_other_weights_have_other_blocks_although_no_sample_of_them_differs(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model)
    engine, prompt = TieredEngine(model, on_disk(tmp_path)), prompts_of(9)[0]
    engine.ask(prompt)
    engine.ask(prompt)  # after its second use it is on disk
    engine.settle()
    identity, had = engine.runner.model_identity, len(engine.lower["disk"])
    engine.close()
    file = model / "model.safetensors"
    body = bytearray(file.read_bytes())
    assert len(body) > 6 * SAMPLE_NBYTES
    at = len(body) // 2 + 2 * SAMPLE_NBYTES
    body[at : at + 4] = bytes(4)
    file.write_bytes(body)
    os.utime(file, ns=(0, 0))
    engine = TieredEngine(model, on_disk(tmp_path))
    assert engine.runner.model_identity == identity
    assert had > 0
    assert len(engine.lower["disk"]) == 0
    engine.close()


def test_no_descriptors_are_no_reason_to_remove_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, content, real = DiskStore(tmp_path / "cache", "p", Seal([SECRET], b"", 8)), b"c" * 32, os.open
    assert store.put(content, memoryview(b"12345678"))

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pd_cluster.kv.disk_store.os.open", refuse)
    with pytest.raises(OSError, match="Too many"):
        store.get(content, memoryview(bytearray(8)))
    monkeypatch.setattr("pd_cluster.kv.disk_store.os.open", real)
    assert store.get(content, memoryview(into := bytearray(8)))
    assert into == b"12345678"
    store.close()


def test_salts_share_nothing_on_disk(engines: Callable[..., TieredEngine]) -> None:
    prompts, engine = prompts_of(2), engines()
    ask_all(engine, prompts, "one tenant")
    engine = engines()
    for salt in ("", "another"):
        engine.ask(prompts[0], salt=salt)
    assert engine.lower["disk"].counts.num_fetched == 0
    engine.ask(prompts[0], salt="one tenant")
    assert engine.lower["disk"].counts.num_fetched == NUM_FULL


@pytest.mark.parametrize("spoil", ["cut", "flip", "swap", "empty", "link", "gone", "header", "pipe"])
def test_a_spoilt_file_is_never_used(
    engines: Callable[..., TieredEngine], checkpoint: Checkpoints, tmp_path: Path, spoil: str
) -> None:
    """Files are corrupted under a running engine, whose index still lists them."""
    prompts, engine = prompts_of(3), engines()
    ask_all(engine, prompts)
    engine = engines()
    files = files_of(tmp_path)
    bodies = [path.read_bytes() for path in files]
    for at, (path, body) in enumerate(zip(files, bodies, strict=True)):
        if spoil in ("gone", "link", "pipe"):
            path.unlink()
        if spoil == "link":
            path.symlink_to("/dev/zero")
        elif spoil == "pipe":
            os.mkfifo(path)
        elif spoil != "gone":
            middle = len(body) // 2
            flipped = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
            header = body[:5] + bytes([body[5] ^ 1]) + body[6:]
            spoilt = {"cut": body[:-1], "flip": flipped, "header": header, "swap": bodies[at - 1], "empty": b""}
            path.write_bytes(spoilt[spoil])
    for prompt in prompts:
        assert_same(checkpoint("llama"), prompt, engine.ask(prompt), 4)
    engine.settle()
    counts = engine.lower["disk"].counts
    assert counts.num_fetched == 0
    assert counts.num_failed > 0
    if spoil not in ("gone", "link"):
        assert sum(counts.num_bad.values()) > 0


def test_what_is_not_whole_or_not_ours_goes_at_the_start(engines: Callable[..., TieredEngine], tmp_path: Path) -> None:
    """At its start, an engine removes unfinished, torn and foreign block files, but not a user's own files."""
    engine = engines()
    ask_all(engine, prompts_of(4))
    whole, files = len(engine.lower["disk"]), files_of(tmp_path)
    foreign, kept = files[2].with_name("f" * 96), files[2].with_name("a file of the user's")

    def spoil() -> None:
        shutil.copy(files[0], files[0].with_name(files[0].name + ".tmp"))
        files[1].write_bytes(files[1].read_bytes()[:100])
        shutil.copy(files[2], foreign)
        kept.write_text("stays")

    engine = engines(spoil)
    assert len(engine.lower["disk"]) == whole - 1
    assert not foreign.exists()
    assert not files[0].with_name(files[0].name + ".tmp").exists()
    assert kept.exists()


def test_a_secret_is_replaced_without_losing_what_the_old_one_sealed(
    engines: Callable[..., TieredEngine], tmp_path: Path
) -> None:
    prompts, engine = prompts_of(5), engines()
    ask_all(engine, prompts)
    new = b"the next secret, of 32 bytes or more"
    engine = engines(secrets=(new, SECRET))
    engine.ask(prompts[0])
    assert engine.lower["disk"].counts.num_fetched == NUM_FULL
    engine = engines(secrets=(b"a secret that has sealed nothing here",))
    assert len(engine.lower["disk"]) == 0
    assert not files_of(tmp_path), "unreadable blocks must be removed"


def test_the_least_recently_used_files_make_room(engines: Callable[..., TieredEngine], tmp_path: Path) -> None:
    engine = engines(capacity=10)
    ask_all(engine, prompts_of(6))
    assert 0 < len(engine.lower["disk"]) <= 10
    engine.runner.close_tiers()  # completes pending removals
    assert len(files_of(tmp_path)) == len(engine.lower["disk"])


@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_links_in_the_place_of_folders_lead_nowhere(
    engines: Callable[..., TieredEngine], tmp_path: Path, when: str
) -> None:
    """Links in place of folders are not followed: nothing behind them is written, read or removed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    victim = elsewhere / ("f" * 96)
    victim.write_text("stays")
    engine = engines()
    ask_all(engine, prompts_of(11))
    place = files_of(tmp_path)[0].parent.parent

    def link() -> None:
        for shard in (f"{number:02x}" for number in range(256)):
            shutil.rmtree(place / shard, ignore_errors=True)
            (place / shard).symlink_to(elsewhere)

    if when == "before":
        engine = engines(link)
    else:
        link()
    ask_all(engine, prompts_of(12) + prompts_of(11))
    assert list(elsewhere.iterdir()) == [victim]


def test_a_full_disk_is_a_miss(
    engines: Callable[..., TieredEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, written = os.write, [0]

    def write(file: int, data: bytes) -> int:
        written[0] += len(data)
        if written[0] > 40_000:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr("pd_cluster.kv.disk_store.os.write", write)
    prompts, engine = prompts_of(7), engines()
    first = ask_all(engine, prompts)
    assert engine.lower["disk"].counts.num_failed > 0
    assert [engine.ask(prompt) for prompt in prompts] == first
    engine.settle()
    told = [message for message in caplog.messages if "blocks cannot be written: No space left on device" in message]
    assert len(told) == 1


def test_a_reset_forgets_the_files_and_a_sleep_does_not(engines: Callable[..., TieredEngine], tmp_path: Path) -> None:
    prompts, engine = prompts_of(8), engines()
    for prompt in prompts:
        engine.ask(prompt)
    engine.blocks.forget()
    engine.runner.sleep(1)  # with pending writes, which are dropped or completed
    engine.runner.sleep(0)
    engine.settle()
    before = len(engine.lower["disk"])
    ask_all(engine, prompts)
    assert len(engine.lower["disk"]) >= before
    assert sum(engine.lower["disk"].counts.num_bad.values()) == 0
    engine.blocks.forget()
    engine.tiers.cache_reset(is_external=False)
    engine.runner.close_tiers()
    assert len(engine.lower["disk"]) == 0
    assert not files_of(tmp_path)


# ---- host memory alone


NUM_OF_HOST = 6


def make(folder: Path) -> tuple[EngineCore, HostTier]:
    """Makes an engine whose pool holds one or two prompts; loading always counts as faster than computing."""
    core = make_core(folder, num_blocks=16, block_size=8, max_model_len=128, kv_host_cache_gib=0.01)
    tier = core.scheduler.blocks.tier
    assert tier is not None
    tier.cost.is_worth_it = lambda: True  # type: ignore[method-assign]
    return core, tier


def test_evicted_prompts_are_loaded_and_exact(checkpoint: Checkpoints) -> None:
    """Loaded prompts are exact, and not found under other salts, after a cache reset, or without prefix caching."""
    model = checkpoint("llama")
    (core, tier), rng = make(model), random.Random(1)
    prompts = [random_prompt(rng, LENGTH) for _ in range(NUM_OF_HOST)]
    greedy = Sampling(max_tokens=6, temperature=0.0)
    first = [generate(core, [prompt], greedy)[0] for prompt in prompts]
    assert core.scheduler.num_tier_hit_tokens == 0
    run(core, [Request("r", RequestSpec(prompts[0], greedy, cache_salt="another tenant"))])
    assert core.scheduler.num_tier_hit_tokens == 0
    second = [generate(core, [prompt], greedy)[0] for prompt in prompts]
    assert second == first
    for prompt, tokens in zip(prompts, second, strict=True):
        assert_same(model, prompt, tokens, 6)
    hits = core.scheduler.num_tier_hit_tokens
    assert hits >= (NUM_OF_HOST - 2) * (LENGTH // 8 * 8)
    assert core.scheduler.num_prefix_hit_tokens >= hits
    assert len(tier)
    core.scheduler.blocks.forget()
    assert not len(tier)
    generate(core, prompts, greedy)
    assert core.scheduler.num_tier_hit_tokens == hits
    with pytest.raises(ConfigError, match="--kv-host-cache: needs the prefix cache"):
        EngineConfig(model="m", kv_host_cache_gib=1.0, enable_prefix_caching=False)


def test_a_loaded_block_has_the_bits_of_the_evicted_one(checkpoint: Checkpoints) -> None:
    (core, tier), rng = make(checkpoint("llama")), random.Random(2)
    blocks = core.scheduler.blocks
    prompts = [random_prompt(rng, LENGTH) for _ in range(4)]

    def contents(prompt: list[int]) -> torch.Tensor:
        request = Request("r", RequestSpec(prompt, Sampling(max_tokens=1)))
        run(core, [request])
        hashes = request.block_hashes[: LENGTH // 8 - 1]  # the last one's tokens are computed again
        return torch.cat([core.runner.pool.block(block) for block in blocks.find(hashes)])  # type: ignore[attr-defined]

    before = contents(prompts[0])
    for prompt in prompts[1:]:
        contents(prompt)
    loaded = tier.num_loaded
    assert torch.equal(contents(prompts[0]), before)
    assert tier.num_loaded > loaded


# ---- the tier alone


def tier_of(num_slots: int) -> tuple[HostTier, list[tuple[str, int, int]]]:
    tier, moves = HostTier(num_slots, 10, LoadCost(4)), []
    tier.begin(lambda *move: moves.append(move))
    return tier, moves


def test_the_least_recently_used_block_goes_and_pinned_ones_stay() -> None:
    tier, moves = tier_of(2)
    hashes = chain_hashes(b"", range(16), 4)
    for block, content in enumerate(hashes[:3]):
        tier.store(block, content)
    assert list(tier.contents) == hashes[:2], "both slots have moves of this step"
    assert moves == [("out", 0, 10), ("out", 1, 11)]
    tier.begin(lambda *move: moves.append(move))
    assert tier.pin([hashes[0]]) == [10]
    tier.store(7, hashes[3])
    assert list(tier.contents) == [hashes[0], hashes[3]]
    assert moves[2:] == [("out", 7, 11)]
    tier.load([10], [5])
    assert moves[3:] == [("in", 10, 5)]
    assert tier.changes() == {hashes[0], hashes[1], hashes[3]}
    tier.check()


def test_a_block_is_loaded_where_that_is_quicker() -> None:
    cost = LoadCost(block_size=16)
    assert cost.is_worth_it()
    cost.loaded(10, 1.0)  # 0.1 s a block
    cost.computed(100, 0.1)  # 0.016 s a block
    assert not cost.is_worth_it()
    for _ in range(300):
        cost.computed(100, 0.1)
    assert cost.is_worth_it(), "it must be measured again at some time"
    cost = LoadCost(block_size=16)
    cost.computed(100, 10.0)
    cost.loaded(10, 1.0)
    assert cost.is_worth_it()
