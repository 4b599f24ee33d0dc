"""Sizes of the KV pool and the swap space, and block moves between them."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_cluster import host
from pd_cluster.devices import device as devices
from pd_cluster.devices.device import Device, MemoryInfo, available_nbytes, pinned_nbytes
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS, KVPool
from pd_cluster.kv.pool_memory import Move
from pd_cluster.kv.swap_space import SwapSpace, swap_text
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning import group_pool_sizing, pool_sizing
from pd_cluster.model.planning.layer_group_limits import check_states, splits_windows
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.settings.speculation import Speculation
from pd_cluster.wire import Plane

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")
GIB = 1 << 30
CPU = Device("cpu")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="m", block_size=4, **settings)


def num_blocks(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(8 * GIB, 16 * GIB, "this host"))
    monkeypatch.setattr(host, "own_nbytes", lambda: 0)
    return pool_sizing.num_pool_blocks(config(**settings), LAYOUT, 1000, CPU)


def test_the_first_flag_of_three_that_is_given_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_gib = GIB // LAYOUT.block_nbytes
    assert num_blocks(monkeypatch, num_blocks=300, kv_cache_memory_gib=2.0, gpu_memory_utilization=0.5) == 300
    assert num_blocks(monkeypatch, kv_cache_memory_gib=2.0, gpu_memory_utilization=0.5) == 2 * of_a_gib
    assert num_blocks(monkeypatch, gpu_memory_utilization=0.5) == 4 * of_a_gib
    assert num_blocks(monkeypatch, gpu_memory_utilization=0.5, num_local_ranks=4) == of_a_gib
    assert num_blocks(monkeypatch, max_num_seqs=3) == 3 * 250
    assert num_blocks(monkeypatch, max_num_seqs=10**6) == of_a_gib
    assert num_blocks(monkeypatch, max_num_seqs=10**6, num_local_ranks=8) == of_a_gib // 2


def test_pools_that_do_not_fit_a_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool is checked against free memory, all ranks' pools against the limit: others may still load weights."""
    for settings in ({"kv_cache_memory_gib": 9.0}, {"kv_cache_memory_gib": 5.0, "num_local_ranks": 4}):
        with pytest.raises(ConfigError, match=r"GiB.*8\.00 GiB of the 16\.00 GiB of this host\. Ask for less"):
            num_blocks(monkeypatch, **settings)
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(GIB, 2 * GIB, "the control group /x"))
    monkeypatch.setattr(host, "own_nbytes", lambda: GIB // 2)
    ours = pool_sizing.num_pool_blocks(config(num_local_ranks=2), LAYOUT, 1000, CPU)
    assert ours * LAYOUT.block_nbytes <= GIB // 8
    with pytest.raises(ConfigError, match=r"^1\.00 GiB of .* free, for 3 ranks.*cannot hold one request"):
        pool_sizing.num_pool_blocks(config(num_local_ranks=3), LAYOUT, 1000, CPU)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"num_blocks": 249}, "--num-blocks 249"),
        ({"kv_cache_memory_gib": 0.00001}, "--kv-cache-memory 1e-05"),
        ({"gpu_memory_utilization": 0.000001}, "--gpu-memory-utilization 1e-06"),
    ],
)
def test_one_request_must_fit(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag}.*cannot hold one request of --max-model-len 1000 \(250 blocks\)"):
        num_blocks(monkeypatch, **settings)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5: must be in 0 to 1"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization nan: must be in 0 to 1"),
        ({"kv_cache_memory_gib": -1.0}, "--kv-cache-memory -1: must be a number of GiB"),
        ({"swap_space_gib": float("inf")}, "--swap-space inf: must be a number of GiB"),
        ({"preemption_mode": "shrink"}, "--preemption-mode 'shrink': expected recompute or swap"),
        ({"preemption_mode": "swap", "swap_space_gib": 0.0}, "--preemption-mode swap: needs memory to swap to"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        config(**settings)


def test_swap_space_is_there_in_mode_swap_only() -> None:
    assert pool_sizing.num_swap_blocks(config(swap_space_gib=1.0), LAYOUT) == 0
    blocks = pool_sizing.num_swap_blocks(config(swap_space_gib=1.0, preemption_mode="swap", num_local_ranks=2), LAYOUT)
    assert blocks == GIB // 2 // LAYOUT.block_nbytes
    assert 1 << 20 < available_nbytes(CPU) < 1 << 50


def test_pinned_memory_is_told_beside_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds pinned memory up to a power of two, so 5 GiB take 8; the log reports it."""
    stats = {"allocated_bytes.current": 8 * GIB, "active_bytes.current": 5 * GIB}
    monkeypatch.setattr(devices, "_module", lambda device: SimpleNamespace(host_memory_stats=lambda: stats))
    assert pinned_nbytes(Device("cuda")) == 8 * GIB
    assert swap_text(5 * GIB, 8 * GIB) == "swap space: 5.00 GiB of blocks, 8.00 GiB of host memory pinned for them"
    monkeypatch.setattr(devices, "_module", lambda device: SimpleNamespace())
    assert pinned_nbytes(Device("npu")) is None


@pytest.mark.parametrize("seed", range(8))
def test_moves_are_as_if_done_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    pool = KVPool(LAYOUT, 12)
    swap = SwapSpace(pool, 6)
    pool.data.copy_(torch.randn(pool.data.shape))
    expected = [block.clone() for block in pool.flat()]
    host: dict[int, torch.Tensor] = {}
    moves: list[tuple[Move, int, int]] = []
    for _ in range(30):
        source, target, place = rng.randrange(12), rng.randrange(12), rng.randrange(6)
        kind: Move = rng.choice(["copy", "out", "in"])
        if kind == "copy":
            moves.append((kind, source, target))
            expected[target] = expected[source].clone()
        elif kind == "out" and place not in host:
            moves.append((kind, source, place))
            host[place] = expected[source].clone()
        elif kind == "in" and place in host and ("in", target) not in {(k, t) for k, _, t in moves}:
            moves.append((kind, place, target))
            expected[target] = host.pop(place)
    swap.move(moves)
    for block, content in enumerate(expected):
        assert torch.equal(pool.flat()[block], content), block
    pool.close()


# ---- accelerators


def cuda_blocks(monkeypatch: pytest.MonkeyPatch, free: float, peak: float = 20.0, **settings: Any) -> int:
    """Returns the blocks for an 80 GiB GPU with 16 GiB of weights; `peak`: weights and largest step, in GiB."""
    monkeypatch.setattr(pool_sizing, "memory", lambda device: MemoryInfo(int(free * GIB), 80 * GIB))
    monkeypatch.setattr(pool_sizing, "reserved_nbytes", lambda device: 16 * GIB)
    return pool_sizing.num_pool_blocks(
        config(**settings), LAYOUT, 64, Device("cuda"), pool_sizing.MemoryBeside(int(peak * GIB))
    )


def test_a_gpu_has_what_its_share_leaves_after_weights_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """If other processes use the GPU, the pool gets what is free."""
    of_a_gib = GIB / LAYOUT.block_nbytes
    for free, given, left in (
        (63.0, {}, 72 - 20 - 1),
        (63.0, {"gpu_memory_utilization": 0.5}, 40 - 20 - 1),
        (30.0, {}, 30 - 4 - 1),
    ):
        assert cuda_blocks(monkeypatch, free=free, **given) == pytest.approx(left * of_a_gib, rel=1e-3)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.2, of which weights and steps take 20\.0 GiB"):
        cuda_blocks(monkeypatch, free=63.0, gpu_memory_utilization=0.2)


# ---- several groups of layers

ALL = KVLayout(2, 2, keys_and_values(8), 4, "float32", layers=(2, 4))
WINDOWS = KVLayout(3, 2, keys_and_values(8), 4, "float32", rule="window", window=10, layers=(0, 1, 3))
STATES = KVLayout(1, 4, (Plane("state", 1024),), 1, "float32", rule="state", layers=(5,))  # a state of 16 KiB
LENGTH, STEP = 1000, 40  # tokens of the longest request, and of a step


def groups(monkeypatch: pytest.MonkeyPatch, *layouts: KVLayout, **settings: Any) -> group_pool_sizing.GroupSizes:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(8 * GIB, 16 * GIB, "this host"))
    monkeypatch.setattr(host, "own_nbytes", lambda: 0)
    return group_pool_sizing.group_sizes(group_pool_sizing.GroupNeeds(config(**settings), layouts, LENGTH, STEP))


@pytest.mark.parametrize("layouts", [(ALL, WINDOWS), (ALL, STATES), (ALL, WINDOWS, STATES)])
def test_groups_share_the_memory_and_leave_little(
    monkeypatch: pytest.MonkeyPatch, layouts: tuple[KVLayout, ...]
) -> None:
    """Groups use at most the given bytes, hold the longest request, and give every sequence a full window."""
    rng, seen = random.Random(len(layouts)), set[str]()
    for _ in range(300):
        nbytes = rng.randrange(1 << 18, 1 << rng.choice((20, 26)))
        settings: dict[str, Any] = {"max_num_seqs": rng.choice((1, 30, 200, 256)), "kv_cache_memory_gib": nbytes / GIB}
        settings |= rng.choice(({}, {"mamba_cache_mode": "none"}, {"state_cache_gib": 1 / 1024}))
        try:
            found = groups(monkeypatch, *layouts, **settings)
        except ConfigError as error:
            seen.add(str(error).split()[0])
            continue
        taken = [count * each.block_nbytes for count, each in zip(found.nums_blocks, layouts, strict=True)]
        assert sum(taken) <= nbytes
        assert found.nums_blocks[0] >= 250
        assert found.max_num_seqs == settings["max_num_seqs"] or (found.max_num_seqs < 256 == settings["max_num_seqs"])
        left = nbytes - sum(taken)
        if WINDOWS in layouts:
            wanted = max(
                250, (found.max_num_seqs * 4 + 10) * 5 // 4
            )  # 4 blocks for 10 tokens at any offset; 10 blocks for a step
            assert found.nums_blocks[1] == min(wanted, found.nums_blocks[0])
        assert left < ALL.block_nbytes + WINDOWS.block_nbytes
        if STATES in layouts:
            seen.add("fewer" if found.max_num_seqs < settings["max_num_seqs"] else "all")
            assert found.nums_blocks[-1] == found.max_num_seqs + found.num_checkpoints
            explicit = {"mamba_cache_mode": 0, "state_cache_gib": 64}
            kept = next((explicit[name] for name in explicit if name in settings), nbytes // 4 // STATES.block_nbytes)
            assert found.num_checkpoints == kept
    assert seen == ({"all", "fewer", "--max-num-seqs"} if STATES in layouts else {"--kv-cache-memory"})


def test_groups_by_default_and_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = groups(monkeypatch, ALL, STATES)
    assert (found.max_num_seqs, found.num_checkpoints) == (256, GIB // 4 // STATES.block_nbytes)
    assert groups(monkeypatch, ALL, STATES, max_num_seqs=10).nums_blocks[0] == 10 * 250  # all that can be used
    large = replace(STATES, planes=(Plane("state", 1 << 24),))  # 256 MiB; half of the free memory holds 16
    found = groups(monkeypatch, ALL, large)
    assert (found.max_num_seqs, found.num_checkpoints) == (2, 1)
    found = groups(monkeypatch, ALL, large, max_num_seqs=8)  # the default share grows with the requested number
    assert (found.max_num_seqs, found.num_checkpoints) == (8, 2)
    found = groups(monkeypatch, ALL, WINDOWS, large, num_blocks=300, preemption_mode="swap", swap_space_gib=1.0)
    assert found.nums_blocks[:2] == (300, 250)
    assert (found.max_num_seqs, found.num_checkpoints) == (11, 4)
    swapped = [count * each.block_nbytes for count, each in zip(found.nums_swapped, (ALL, WINDOWS, large), strict=True)]
    assert sum(swapped) <= GIB
    assert found.nums_swapped[2] == 3
    for settings, error in (
        (
            {"max_num_seqs": 20},
            r"--max-num-seqs 20: room for \d+ states of 256\.00 MiB \(8\.00 GiB of .* KV caches\) in addition to",
        ),
        ({"state_cache_gib": 0.1}, r"--state-cache 0\.1: one state of this model takes 0\.25 GiB; give more"),
        ({"state_cache_gib": 9}, r"--state-cache 9: a KV pool of 9\.00 GiB; free: 8\.00 GiB"),
        ({"num_blocks": 10**8}, r"--num-blocks 100000000: a KV pool of \d+\.\d\d GiB; free: 8\.00 GiB"),
    ):
        with pytest.raises(ConfigError, match=f"^{error}"):
            groups(monkeypatch, ALL, large, **settings)
    without = groups(monkeypatch, ALL, large, enable_prefix_caching=False)
    assert without.num_checkpoints == 0


def test_groups_take_what_an_accelerator_has_left() -> None:
    """Host memory is not checked, because weights and steps are on the device."""
    left = (GIB, "--gpu-memory-utilization 0.9, of which weights and steps take 20.0 GiB")

    def found(**settings: Any) -> group_pool_sizing.GroupSizes:
        return group_pool_sizing.group_sizes(
            group_pool_sizing.GroupNeeds(config(**settings), (ALL, STATES), LENGTH, STEP, left)
        )

    whole, extra = found(), NUM_EXTRA_BLOCKS * (ALL.block_nbytes + STATES.block_nbytes)
    assert whole.max_num_seqs == 256
    assert whole.num_checkpoints == (GIB - extra) // 4 // STATES.block_nbytes
    taken = extra + sum(count * each.block_nbytes for count, each in zip(whole.nums_blocks, (ALL, STATES), strict=True))
    assert GIB - ALL.block_nbytes < taken <= GIB
    assert found(num_blocks=300).nums_blocks[0] == 300
    assert found(kv_cache_memory_gib=0.5).num_checkpoints == GIB // 8 // STATES.block_nbytes
    with pytest.raises(ConfigError, match=r"^--max-num-seqs 70000: room for \d+ states .*steps take 20\.0 GiB"):
        found(max_num_seqs=70_000)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kv_host_cache_gib": 1.5}, "--kv-host-cache 1.5: kimi keeps states, which lower tiers cannot hold"),
        ({"mamba_block_size": 1022}, "--mamba-block-size 1022: .* a multiple of --block-size 4"),
        ({"adapters": AdapterSettings(enable_prompt_adapter=True)}, "--enable-prompt-adapter: kimi keeps states"),
        ({"adapters": AdapterSettings(enable_lora=True)}, "--enable-lora: kimi keeps states"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager: kimi keeps states"),
        ({"speculation": Speculation(methods=("ngram",))}, "--speculative-config: ngram: kimi keeps states"),
    ],
)
def test_settings_that_states_do_not_go_with(settings: dict[str, Any], error: str) -> None:
    checkpoint: Any = SimpleNamespace(model_type="kimi", is_unproven=False)
    plan = LoadPlan(config(), checkpoint, SingleRank(), CPU, "float32", 4, (), LENGTH, STEP)
    check_states(plan, True)
    assert splits_windows(plan)
    assert not splits_windows(replace(plan, config=config(disable_hybrid_kv_cache_manager=True)))
    with pytest.raises(ConfigError, match=f"^{error}"):
        check_states(replace(plan, config=config(**settings)), True)
    check_states(replace(plan, config=config(mamba_block_size=1022, enable_prefix_caching=False)), True)
    on_gpu = replace(plan, device=Device("cuda"))
    check_states(on_gpu, True)
    with pytest.raises(ConfigError, match=r"^--device cuda: kimi keeps states, but"):
        check_states(on_gpu, False)
    with pytest.raises(ConfigError, match="--mamba-ssm-cache-dtype 'bfloat16': expected auto or float32"):
        config(mamba_ssm_cache_dtype="bfloat16")
