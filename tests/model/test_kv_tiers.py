"""Tiers below host memory on a real engine: tokens and bits from each of them, restarts, spoilt files, full disks."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.checkpoints.weight_files import SAMPLE_NBYTES
from pd_cluster.kv.disk_store import DiskStore
from pd_cluster.kv.seal import Seal
from pd_cluster.kv.tier_orders import LowerKind
from pd_cluster.kv.tier_thread import Store
from tests.support.engines import assert_same, random_prompt
from tests.support.tiers import SECRET, TieredEngine

Checkpoints = Callable[..., Path]
NUM_PROMPTS, LENGTH, BLOCK = 5, 60, 8
NUM_FULL = (LENGTH - 1) // BLOCK  # blocks of a prompt that others can use


def on_disk(folder: Path) -> Callable[[Seal], dict[LowerKind, Store]]:
    return lambda seal: {"disk": DiskStore(folder / "cache", "prefill-0/rank-0", seal)}


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, LENGTH) for _ in range(NUM_PROMPTS)]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


@pytest.fixture
def engines(checkpoint: Checkpoints, tmp_path: Path) -> Iterator[Callable[..., TieredEngine]]:
    """Starts engines one after the other on one folder: the one before ends first, then `between` is called."""
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
    head = random_prompt(rng, 2 * BLOCK)  # it never leaves the device, and is on disk once it has served twice
    prompts = [[*head, *random_prompt(rng, LENGTH - len(head))] for _ in range(10)]
    first = [engine.ask(prompt) for prompt in prompts]
    engine.settle()
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
    engine.ask(prompt)  # what has served twice is on disk
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
    for prompt in prompts:
        engine.ask(prompt, salt="one tenant")
    engine.settle()
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
    """Files change under a running engine, so that its index still names them."""
    prompts, engine = prompts_of(3), engines()
    for prompt in prompts:
        engine.ask(prompt)
    engine.settle()
    engine = engines()
    files = files_of(tmp_path)
    bodies = [path.read_bytes() for path in files]
    for at, path in enumerate(files):
        body = bytearray(bodies[at])
        if spoil == "cut":
            path.write_bytes(body[:-1])
        elif spoil == "flip":
            body[len(body) // 2] ^= 1
            path.write_bytes(body)
        elif spoil == "header":
            body[5] ^= 1
            path.write_bytes(body)
        elif spoil == "swap":
            path.write_bytes(bodies[at - 1])
        elif spoil == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
            if spoil == "link":
                path.symlink_to("/dev/zero")
            elif spoil == "pipe":
                os.mkfifo(path)
    for prompt in prompts:
        assert_same(checkpoint("llama"), prompt, engine.ask(prompt), 4)
    engine.settle()
    counts = engine.lower["disk"].counts
    assert counts.num_fetched == 0
    assert counts.num_failed > 0
    if spoil not in ("gone", "link"):
        assert sum(counts.num_bad.values()) > 0


def test_what_is_not_whole_or_not_ours_goes_at_the_start(engines: Callable[..., TieredEngine], tmp_path: Path) -> None:
    """As kill -9 in mid-write leaves it: an unfinished file, a torn one; and files that others have put there."""
    engine = engines()
    for prompt in prompts_of(4):
        engine.ask(prompt)
    engine.settle()
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
    for prompt in prompts:
        engine.ask(prompt)
    engine.settle()
    new = b"the next secret, of 32 bytes or more"
    engine = engines(secrets=(new, SECRET))
    engine.ask(prompts[0])
    assert engine.lower["disk"].counts.num_fetched == NUM_FULL
    engine = engines(secrets=(b"a secret that has sealed nothing here",))
    assert len(engine.lower["disk"]) == 0
    assert not files_of(tmp_path), "what nobody can read any more makes room"


def test_the_least_recently_used_files_make_room(engines: Callable[..., TieredEngine], tmp_path: Path) -> None:
    engine = engines(capacity=10)
    for prompt in prompts_of(6):
        engine.ask(prompt)
    engine.settle()
    assert 0 < len(engine.lower["disk"]) <= 10
    engine.runner.close_tiers()  # what is discarded is discarded
    assert len(files_of(tmp_path)) == len(engine.lower["disk"])


@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_links_in_the_place_of_folders_lead_nowhere(
    engines: Callable[..., TieredEngine], tmp_path: Path, when: str
) -> None:
    """Nothing is written, read or removed behind them."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    victim = elsewhere / ("f" * 96)
    victim.write_text("stays")
    engine = engines()
    for prompt in prompts_of(11):
        engine.ask(prompt)
    engine.settle()
    place = files_of(tmp_path)[0].parent.parent

    def link() -> None:
        for shard in (f"{number:02x}" for number in range(256)):
            shutil.rmtree(place / shard, ignore_errors=True)
            (place / shard).symlink_to(elsewhere)

    if when == "before":
        engine = engines(link)
    else:
        link()
    for prompt in prompts_of(12) + prompts_of(11):
        engine.ask(prompt)
    engine.settle()
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
    first = [engine.ask(prompt) for prompt in prompts]
    engine.settle()
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
    engine.runner.sleep(1)  # with writes on their way: they are dropped, or whole
    engine.runner.sleep(0)
    engine.settle()
    before = len(engine.lower["disk"])
    for prompt in prompts:
        engine.ask(prompt)
    engine.settle()
    assert len(engine.lower["disk"]) >= before
    assert sum(engine.lower["disk"].counts.num_bad.values()) == 0
    engine.blocks.forget()
    engine.tiers.clear()
    engine.runner.close_tiers()
    assert len(engine.lower["disk"]) == 0
    assert not files_of(tmp_path)
