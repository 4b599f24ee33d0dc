"""The choice of a rank's device, with a torch that reports the devices set by the test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pd_cluster.devices import device, device_streams
from pd_cluster.devices.device import CPU, Device, bind, check_name
from pd_cluster.errors import ConfigError


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    count = [2]
    monkeypatch.setattr(device, "num_cuda_devices", lambda: count[0])
    monkeypatch.setattr(device, "npu_files", list)
    return count


@pytest.fixture
def npus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulates a machine with the driver's files /dev/davinci0… and no GPU; the list sets torch-npu's device count."""
    count = [2]
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 0)
    monkeypatch.setattr(device, "npu_files", lambda: [f"/dev/davinci{i}" for i in range(count[0])])
    monkeypatch.setattr(device, "num_npu_devices", lambda: count[0])
    return count


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_container_that_sees_just_its_own_cards_counts_them_from_0(name: str, visible: list[int]) -> None:
    assert [bind(name, ["4", "5"], rank) for rank in (0, 1)] == [Device("cuda", 0), Device("cuda", 1)]


def test_cards_are_taken_by_number_or_counted_from_0(visible: list[int]) -> None:
    visible[0] = 8
    assert [bind("cuda", ["5", "4"], rank).index for rank in (0, 1)] == [4, 5]
    visible[0] = 12
    assert bind("cuda", ["10", "9"], 0).index == 9  # sorted as numbers
    assert bind("cpu", ["0"], 0) == CPU
    visible[0] = 0
    assert bind("auto", ["0"], 0) == CPU
    assert CPU.torch_name == "cpu"
    assert not CPU.is_accelerator
    visible[0] = 2
    with pytest.raises(ConfigError, match=r"rank 0 device_id 4, and 2 CUDA devices are visible.*correct its device_id"):
        bind("cuda", ["4"], 0)
    with pytest.raises(ConfigError, match="device_id a0: a CUDA device is named by its number"):
        bind("cuda", ["a0"], 0)
    visible[0] = 0
    with pytest.raises(ConfigError, match=r"--device cuda: torch finds no CUDA device here .*use --device cpu"):
        bind("cuda", ["0"], 0)


@pytest.mark.parametrize("name", ["auto", "npu"])
def test_npus_are_bound_by_the_same_rule(name: str, npus: list[int]) -> None:
    assert [bind(name, ["4", "5"], rank) for rank in (0, 1)] == [Device("npu", 0), Device("npu", 1)]
    npus[0] = 8
    assert [bind(name, ["5", "4"], rank).index for rank in (0, 1)] == [4, 5]
    assert bind("cpu", ["4"], 0) == CPU
    with pytest.raises(ConfigError, match=r"device_id 9, and 8 NPU devices are visible"):
        bind(name, ["9"], 0)
    with pytest.raises(ConfigError, match="device_id a0: an NPU is named by its number"):
        bind(name, ["a0"], 0)
    assert Device("npu", 3).torch_name == "npu:3"
    assert Device("npu", 3).dist_backend == "hccl"


def test_a_machine_with_npus_does_not_fall_back(npus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_npu_devices", lambda: 0)
    monkeypatch.setattr(device, "_npu_problem", lambda: "torch-npu is not installed")
    with pytest.raises(ConfigError, match=r"--device auto: torch finds no NPU .* \(torch-npu is not installed"):
        bind("auto", ["0"], 0)
    monkeypatch.setattr(device, "_npu_problem", str)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4")
    with pytest.raises(ConfigError, match=r"ASCEND_RT_VISIBLE_DEVICES=4: a container numbers its mounted cards from 0"):
        bind("auto", ["4"], 0)

    def set_device(index: int) -> None:
        raise RuntimeError(f"aclrtSetDevice failed for {index}\nmore")

    monkeypatch.setattr(device, "_module", lambda _: SimpleNamespace(set_device=set_device))
    with pytest.raises(ConfigError, match=r"npu:1 cannot be used: aclrtSetDevice failed for 1; does another process"):
        device.use(Device("npu", 1))


@pytest.mark.parametrize("name", ["tpu", "gpu", ""])
def test_kinds_that_are_not_served_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {name}: "):
        check_name(name)


def test_on_cpu_everything_has_happened_when_a_call_returns() -> None:
    stream = device_streams.CopyStream(CPU)
    before = device_streams.mark(CPU)
    stream.after(before)
    with stream:
        pass
    after = stream.mark()
    after.wait()
    assert after.is_reached
    assert device.num_multiprocessors(CPU) == 1
