"""A runner whose construction fails anywhere leaves no pool; a released one has neither pool nor weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU, Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.errors import Closed, ConfigError, ModelError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.expert_plan import share_of
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner import load_runner
from pd_cluster.settings.engine_config import EngineConfig

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize("step", ["SwapSpace", "_load_adapters", "prove", "capture_graphs", "ModelRunner"])
def test_a_failure_leaves_no_pool(step: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KVPool] = []

    def pool_of(*given: object) -> KVPool:
        made.append(KVPool(*given))  # type: ignore[arg-type]
        return made[0]

    def fail(*_: object) -> None:
        assert hasattr(made[0], "memory")
        raise ModelError("no")

    monkeypatch.setattr(load_runner, "KVPool", pool_of)
    monkeypatch.setattr(load_runner, step, fail)
    with pytest.raises(ModelError, match="no"):
        load_runner.load_runner(EngineConfig(model=str(checkpoint("llama")), num_blocks=8, max_model_len=64))
    assert not hasattr(made[0], "memory"), "the pool must be closed"


def test_after_letting_go_there_is_neither_pool_nor_model(checkpoint: Checkpoints) -> None:
    runner = load_runner.load_runner(EngineConfig(model=str(checkpoint("llama")), num_blocks=8, max_model_len=64))
    pool = runner.pool
    runner.let_go()
    assert not hasattr(pool, "memory")
    for name in ("pool", "swap", "model"):
        with pytest.raises(Closed):
            getattr(runner, name)
    assert runner.tower is None
    runner.let_go()  # has no further effect


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_instances_exchange_rows_wherever_torch_has_groups(
    kind: DeviceKind, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts may be divided over one instance's ranks on any device. A unit's steps are not launched ahead."""
    config = EngineConfig(model=str(checkpoint("mixtral")), data_parallel_size=2, max_num_batched_tokens=64)
    unit: Any = object()
    alone: Any = SimpleNamespace(rank=0, size=1)
    pair: Any = SimpleNamespace(rank=1, size=2)
    found = Checkpoint.of(config)
    backend = Device(kind).dist_backend.upper()
    monkeypatch.setattr("pd_cluster.devices.device.process_group", lambda device: None)
    with pytest.raises(ConfigError, match=f"--data-parallel-size 2: .* torch has no {backend} for {kind}:0 here"):
        share_of(config, found, alone, Device(kind), unit)
    monkeypatch.setattr("pd_cluster.devices.device.process_group", lambda device: object)
    assert not LoadPlan.of(config, SingleRank(), Device(kind), unit).goes_ahead
    assert LoadPlan.of(structs.replace(config, data_parallel_size=1), SingleRank(), Device(kind)).goes_ahead
    on_host = share_of(config, found, alone, CPU, unit)
    assert on_host is not None
    assert on_host.exchange is unit
    config = EngineConfig(model=config.model, tensor_parallel_size=2, enable_expert_parallel=True)
    share = share_of(config, found, pair, Device(kind), None)
    assert share is not None
    assert (share.rank, share.size, share.exchange) == (1, 2, None)
