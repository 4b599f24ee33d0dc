"""Numbers do not depend on the number of threads, which may change between any two layers of a step."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pd_cluster.devices.core_affinity import CoreAffinity
from pd_cluster.devices.core_ledger import CoreLedger
from pd_cluster.devices.openmp_spinning import QUIET_S, WINDOW_S, Spinning
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.layers.ops import Heads
from pd_cluster.model.layers.packed_linear import PackedLinear
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.native.build import openmp_runtime
from pd_cluster.native.thread_binding import team_binding
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from tests.model.test_cpu_kernels import LAYER, CpuOps, make_batch, make_rope, ops
from tests.support.checkpoints import CONFIGS
from tests.support.engines import make_core, random_prompt, run
from tests.support.held import held, more_than

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
    """The weight is packed by one thread, as at a rank's start, and multiplied by several numbers of threads."""
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
    """Compares attention's results and its writes to the pool."""
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
    """Changes the number of threads randomly after every layer, as if other ranks began and ended steps."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, index=0, size=2, num_cores=8)
        self.rng = random.Random(6)
        self.seen: list[int] = []

    def num_threads(self) -> int:
        self.seen.append(self.rng.choice((1, *THREADS)))
        return self.seen[-1]


def tokens_of(core: EngineCore) -> dict[str, dict[int, list[TokenOutput]]]:
    """Returns tokens with logprobs for chunked and one-token prompts, greedy and sampled."""
    rng = random.Random(4)
    requests = []
    for at, length in enumerate((1, 20, 45, 90, 7)):
        sampling = Sampling(max_tokens=8, temperature=0.8 * (at % 2), seed=at, logprobs=3, prompt_logprobs=at % 3)
        requests.append(Request(f"r{at}", RequestSpec(random_prompt(rng, length), sampling), arrival_s=float(at)))
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
    if getattr(core.runner.model, "decoder", None) is None:  # a decoder checks only every LAYERS_AT_ONCE layers
        assert len(ledger.seen) > 2 * core.num_steps, "the threads were never changed within a step"
    assert set(ledger.seen) == {1, *THREADS}
    assert torch.get_num_threads() == ledger.own_threads, "the rest of a step must use the rank's own threads"
    ledger.close()


# ---- where they run


def allowed_in_this_process() -> list[frozenset[int]]:
    """Returns the allowed cores of each thread of this process, from the kernel."""
    found: list[frozenset[int]] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.append(frozenset(os.sched_getaffinity(int(task.name))))
    return found


@pytest.fixture
def all_cores() -> Iterator[frozenset[int]]:
    """Yields all cores; unbinds the test's threads afterwards."""
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
    """Tokens are equal bit for bit with one or two threads on home cores, and more on all cores."""
    folder = checkpoint("llama", **WIDE)
    core = make_core(folder, device="cpu", num_blocks=64, max_num_batched_tokens=64)
    expected = tokens_of(core)
    placed: list[tuple[int, frozenset[int]]] = []

    def spread(num_threads: int, cores: frozenset[int]) -> list[int]:
        placed.append((num_threads, cores))
        return team_binding()(num_threads, cores)

    home_cores = frozenset({min(all_cores), max(all_cores) + 4000})  # the kernel ignores nonexistent cores
    home = CoreAffinity(home_cores, all_cores, all_cores, lambda thread: 0.0, spread)
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


# ---- in a user's own process, OpenMP's threads sleep while other programs want the cores


SCRIPT = Path(__file__).parents[1] / "support" / "neighbours_script.py"
NUM_SPINNING = 2


class World:
    """A clock, and the time for which each thread has waited for a core."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0
        self.spinning = Spinning(openmp_runtime(), NUM_SPINNING, lambda thread: self.waited_s, lambda: self.now_s)

    def window(self, waits: float, seconds: float = WINDOW_S) -> bool:
        """Lets `seconds` pass, of which threads waited for the share `waits`; returns whether they sleep now."""
        self.now_s += seconds
        self.waited_s += waits * seconds
        self.spinning.tick()
        return self.spinning.is_quiet


def test_threads_sleep_while_others_want_the_cores() -> None:
    before = held()
    world = World()
    assert world.spinning.is_quiet, "loading must be as fast beside busy programs"
    assert not world.window(waits=0.0)
    assert more_than(before) == Counter()
    assert world.window(waits=0.5)
    assert world.window(waits=0.0), "threads must not sleep for a short wait"
    assert world.window(waits=0.5, seconds=QUIET_S)
    assert world.window(waits=0.15, seconds=QUIET_S), "the cores must still count as busy"
    assert not world.window(waits=0.0, seconds=QUIET_S)
    world.window(waits=0.5)
    world.spinning.close()
    world.spinning.close()
    assert not world.window(waits=0.5)
    assert more_than(before) == Counter()


def test_more_threads_than_cores() -> None:
    """libgomp spins less once it has more threads than cores, so idle threads are added until it has."""
    before = len(os.listdir("/proc/self/task"))
    world = World()
    try:
        added = len(os.listdir("/proc/self/task")) - before  # one of them is Python's
        assert NUM_SPINNING + added - 1 > (os.cpu_count() or 1)
    finally:
        world.spinning.close()


@pytest.mark.parametrize("own", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_users_own_policy_stays(own: str) -> None:
    assert Spinning.here(NUM_SPINNING, {own: "1"}) is None
    assert Spinning.here(1, {}) is None
    spinning = Spinning.here(NUM_SPINNING, {})
    assert spinning is not None
    spinning.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_a_busy_program_on_each_core(checkpoint: Callable[..., Path]) -> None:
    """Prints tokens/s alone and beside the programs, alternating between libgomp's default and sleeping threads."""
    spins = {"GOMP_SPINCOUNT": "300000"}  # libgomp's default, given by the user
    rates: dict[str, list[dict[str, float]]] = {"spins": [], "sleeps": []}
    for _ in range(3):
        for name, own in (("spins", spins), ("sleeps", {})):
            env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")} | own
            command = [sys.executable, str(SCRIPT), str(checkpoint("llama"))]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=180)
            rates[name].append(json.loads(done.stdout))
            print(name, rates[name][-1])
    best = {name: {at: max(each[at] for each in found) for at in found[0]} for name, found in rates.items()}
    print(best)
    assert best["sleeps"]["busy"] > 2 * best["spins"]["busy"]
    assert best["sleeps"]["alone"] > 0.7 * best["spins"]["alone"]
