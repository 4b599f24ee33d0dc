"""Sizes of the KV pool and the swap space, and moves of blocks between them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_cluster import host
from pd_cluster.devices import device as devices
from pd_cluster.devices.device import Device, MemoryInfo, available_nbytes, pinned_nbytes
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.memory import Move
from pd_cluster.kv.pool import KVPool
from pd_cluster.kv.swap import SwapSpace, swap_words
from pd_cluster.model import sizing
from pd_cluster.settings.engine import EngineConfig

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")
GIB = 1 << 30
CPU = Device("cpu")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="m", block_size=4, **settings)


def num_blocks(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(8 * GIB, 16 * GIB, "this host"))
    monkeypatch.setattr(host, "own_nbytes", lambda: 0)
    return sizing.num_pool_blocks(config(**settings), LAYOUT, 1000, CPU)


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
    """One by itself, by what is free; those of all ranks together, by the limit. Others may still load as much."""
    for settings in ({"kv_cache_memory_gib": 9.0}, {"kv_cache_memory_gib": 5.0, "num_local_ranks": 4}):
        with pytest.raises(ConfigError, match=r"GiB.*8\.00 GiB of the 16\.00 GiB of this host\. Ask for less"):
            num_blocks(monkeypatch, **settings)
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(GIB, 2 * GIB, "the control group /x"))
    monkeypatch.setattr(host, "own_nbytes", lambda: GIB // 2)
    ours = sizing.num_pool_blocks(config(num_local_ranks=2), LAYOUT, 1000, CPU)
    assert ours * LAYOUT.block_nbytes <= GIB // 8
    with pytest.raises(ConfigError, match=r"^1\.00 GiB of .* free, for 3 ranks.*cannot hold one request"):
        sizing.num_pool_blocks(config(num_local_ranks=3), LAYOUT, 1000, CPU)


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
        ({"preemption_mode": "swap", "swap_space_gib": 0.0}, "--preemption-mode swap: needs room to swap to"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        config(**settings)


def test_swap_space_is_there_in_mode_swap_only() -> None:
    assert sizing.num_swap_blocks(config(swap_space_gib=1.0), LAYOUT) == 0
    blocks = sizing.num_swap_blocks(config(swap_space_gib=1.0, preemption_mode="swap", num_local_ranks=2), LAYOUT)
    assert blocks == GIB // 2 // LAYOUT.block_nbytes
    assert 1 << 20 < available_nbytes(CPU) < 1 << 50


def test_pinned_memory_is_told_beside_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds a pinned block up to a power of two: 5 GiB take 8."""
    stats = {"allocated_bytes.current": 8 * GIB, "active_bytes.current": 5 * GIB}
    monkeypatch.setattr(devices, "_module", lambda device: SimpleNamespace(host_memory_stats=lambda: stats))
    assert pinned_nbytes(Device("cuda")) == 8 * GIB
    assert swap_words(5 * GIB, 8 * GIB) == "swap space: 5.00 GiB of blocks, 8.00 GiB of host memory pinned for them"
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


# ---- of an accelerator


def cuda_blocks(monkeypatch: pytest.MonkeyPatch, free: float, peak: float = 20.0, **settings: Any) -> int:
    """GiB of an 80 GiB GPU, of which 16 are this process's weights; the largest step takes what is more of `peak`."""
    monkeypatch.setattr(sizing, "memory", lambda device: MemoryInfo(int(free * GIB), 80 * GIB))
    monkeypatch.setattr(sizing, "reserved_nbytes", lambda device: 16 * GIB)
    return sizing.num_pool_blocks(config(**settings), LAYOUT, 64, Device("cuda"), int(peak * GIB))


def test_a_gpu_has_what_its_share_leaves_after_weights_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that others use gives what nobody has."""
    of_a_gib = GIB / LAYOUT.block_nbytes
    for free, given, left in (
        (63.0, {}, 72 - 20 - 1),
        (63.0, {"gpu_memory_utilization": 0.5}, 40 - 20 - 1),
        (30.0, {}, 30 - 4 - 1),
    ):
        assert cuda_blocks(monkeypatch, free=free, **given) == pytest.approx(left * of_a_gib, rel=1e-3)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.2, of which weights and steps take 20\.0 GiB"):
        cuda_blocks(monkeypatch, free=63.0, gpu_memory_utilization=0.2)
