"""Numbers do not depend on the number of threads, which may change between any two layers of a step."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pd_cluster.devices.cores import CoreLedger
from pd_cluster.devices.home import Home
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.model.layers.linear import PackedLinear
from pd_cluster.model.layers.ops import Heads
from pd_cluster.model.runner import ModelRunner
from pd_cluster.native.place import team_binding
from pd_cluster.types import Order, Request, Sampling, TokenOutput
from tests.model.test_cpu_kernels import LAYER, CpuOps, make_batch, make_rope, ops
from tests.support.checkpoints import CONFIGS
from tests.support.engines import make_core, random_prompt, run

__all__ = ["ops"]  # a fixture

THREADS = (2, 3, 7)
SEQUENCES = [(1, 2000), (1, 0), (1, 300), (5, 63), (33, 0), (200, 77), (1, 15)]
WIDTHS = ((1, 1024), (200, 1025), (768, 768), (1000, 8192), (100_000, 256))

pytestmark = pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch has one thread")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same_with_all(compute: Callable[[], torch.Tensor]) -> None:
    torch.set_num_threads(1)
    expected = compute()
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        assert torch.get_num_threads() == num_threads
        assert torch.equal(compute(), expected), f"{num_threads} threads"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize(("outputs", "inputs"), WIDTHS)
def test_products(outputs: int, inputs: int) -> None:
    """The weight is packed by one thread, as it is at a rank's start."""
    torch.manual_seed(outputs)
    layer = PackedLinear(torch.randn(outputs, inputs), torch.randn(outputs))
    for num_rows in (1, 3, 4, 16, 33, 130):
        x = torch.randn(num_rows, inputs)
        assert_same_with_all(lambda x=x: layer(x))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_seqs"),
    [(4, 2, 64, 1), (24, 2, 128, 7), (7, 1, 80, 3), (3, 3, 16, 7)],
)
def test_attention(ops: CpuOps, num_heads: int, num_kv_heads: int, head_dim: int, num_seqs: int) -> None:
    """What it returns, and what it writes to the pool."""
    torch.manual_seed(head_dim)
    batch = make_batch(SEQUENCES[:num_seqs], num_kv_heads, head_dim, 16, random.Random(3))
    heads = Heads(LAYER, num_heads, num_kv_heads, head_dim, head_dim**-0.5, None, None)
    qkv = torch.randn(batch.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) * 2
    rope, before = make_rope(batch, head_dim), batch.pool.data.clone()

    def compute() -> torch.Tensor:
        batch.pool.data.copy_(before)
        attended = ops.attend(heads, qkv.clone(), rope, batch)
        return torch.cat((attended.flatten(), batch.pool.data.nan_to_num().flatten()))

    assert_same_with_all(compute)


class RandomLedger(CoreLedger):
    """Other ranks begin and end steps all the time: any number of threads, after every layer."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, index=0, size=2, num_cores=8)
        self.rng = random.Random(6)
        self.seen: list[int] = []

    def num_threads(self) -> int:
        self.seen.append(self.rng.choice((1, *THREADS)))
        return self.seen[-1]


def tokens_of(core: EngineCore) -> dict[str, dict[int, list[TokenOutput]]]:
    """Prompts in chunks and of one token, greedy and drawn, with log-probabilities: every bit that leaves an engine."""
    rng = random.Random(4)
    requests = []
    for at, length in enumerate((1, 20, 45, 90, 7)):
        sampling = Sampling(max_tokens=8, temperature=0.8 * (at % 2), seed=at, logprobs=3, prompt_logprobs=at % 3)
        requests.append(Request(f"r{at}", Order(random_prompt(rng, length), sampling), arrival_s=float(at)))
    return run(core, requests)


WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
MODELS: list[tuple[str, dict[str, int]]] = [*((name, {}) for name in CONFIGS), ("llama", WIDE)]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        pytest.param(*each, marks=() if each[0] in ("llama", "qwen2_moe", "gpt2") else pytest.mark.slow)
        for each in MODELS
    ],
)
def test_steps_whose_threads_change_at_every_layer(
    architecture: str, changes: dict[str, int], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint(architecture, **changes)
    core = make_core(folder, device="cpu", num_blocks=64, max_num_batched_tokens=64)
    expected = tokens_of(core)
    ledger = RandomLedger(tmp_path / "cores")
    ledger.open()
    core = make_core(folder, device="cpu", num_blocks=64, max_num_batched_tokens=64)
    assert isinstance(core.runner, ModelRunner)
    core.runner.threads.share(ledger)
    assert tokens_of(core) == expected
    assert len(ledger.seen) > 2 * core.num_steps, "the threads were never changed within a step"
    assert set(ledger.seen) == {1, *THREADS}
    assert torch.get_num_threads() == ledger.own_threads, "the rest of a step has the rank's own threads"
    ledger.close()


# ---- where they run


def allowed_in_this_process() -> list[frozenset[int]]:
    """The cores of each thread of this process, as the kernel has them."""
    found: list[frozenset[int]] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.append(frozenset(os.sched_getaffinity(int(task.name))))
    return found


@pytest.fixture
def all_cores() -> Iterator[frozenset[int]]:
    """The test's team may have been bound; it is not afterwards."""
    cores = frozenset(os.sched_getaffinity(0))
    yield cores
    team_binding()(max(THREADS), cores)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: all threads are on it")
def test_a_team_is_bound_whole_and_others_are_not(ops: CpuOps, all_cores: frozenset[int]) -> None:
    one, other = sorted(all_cores)[:2]
    idle = threading.Event()
    bystander = threading.Thread(target=idle.wait, args=(60.0,))
    bystander.start()
    try:
        for num_threads, cores in ((3, frozenset({one})), (2, frozenset({other})), (3, all_cores)):
            before = allowed_in_this_process().count(cores)
            threads = team_binding()(num_threads, cores)
            assert len(set(threads)) == num_threads
            assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {cores}
            assert threading.get_native_id() in threads
            assert allowed_in_this_process().count(cores) - before >= num_threads - 1
            assert bystander.native_id is not None
            assert os.sched_getaffinity(bystander.native_id) == all_cores
        with pytest.raises(OSError, match="Invalid argument"):
            team_binding()(2, frozenset({max(all_cores) + 4000}))
    finally:
        idle.set()
        bystander.join(60.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: a home is all of them")
def test_steps_that_move_between_their_home_and_all_cores(
    ops: CpuOps, all_cores: frozenset[int], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One and two threads at home, more of them on all cores: the same tokens to the bit."""
    folder = checkpoint("llama", **WIDE)
    core = make_core(folder, device="cpu", num_blocks=64, max_num_batched_tokens=64)
    expected = tokens_of(core)
    placed: list[tuple[int, frozenset[int]]] = []

    def spread(num_threads: int, cores: frozenset[int]) -> list[int]:
        placed.append((num_threads, cores))
        return team_binding()(num_threads, cores)

    home_cores = frozenset({min(all_cores), max(all_cores) + 4000})  # the kernel leaves out what it does not have
    home = Home(home_cores, all_cores, all_cores, lambda thread: 0.0, spread)
    ledger = RandomLedger(tmp_path / "cores")
    ledger.open()
    core = make_core(folder, device="cpu", num_blocks=64, max_num_batched_tokens=64)
    assert isinstance(core.runner, ModelRunner)
    core.runner.threads.share(ledger)
    core.runner.threads.settle(home)
    assert tokens_of(core) == expected
    assert {cores for _, cores in placed} == {home_cores, all_cores}
    assert {num_threads for num_threads, cores in placed if cores == home_cores} == {2}
    assert os.sched_getaffinity(0) == all_cores
    ledger.close()
