"""Which device a rank has, with a torch that counts what the test says."""

from __future__ import annotations

import pytest

from pd_cluster import device
from pd_cluster.device import CPU, Device, bind, check_name
from pd_cluster.errors import ConfigError


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    count = [2]
    monkeypatch.setattr(device, "num_cuda_devices", lambda: count[0])
    return count


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_container_that_sees_just_its_own_cards_counts_them_from_0(name: str, visible: list[int]) -> None:
    assert [bind(name, ["4", "5"], rank) for rank in (0, 1)] == [Device("cuda", 0), Device("cuda", 1)]


def test_a_process_that_sees_others_cards_too_takes_its_own_by_number(visible: list[int]) -> None:
    visible[0] = 8
    assert [bind("cuda", ["5", "4"], rank).index for rank in (0, 1)] == [4, 5]
    visible[0] = 12
    assert bind("cuda", ["10", "9"], 0).index == 9  # by number, not by letters


def test_cpu_is_taken_when_asked_for_or_when_there_is_nothing_else(visible: list[int]) -> None:
    assert bind("cpu", ["0"], 0) == CPU
    visible[0] = 0
    assert bind("auto", ["0"], 0) == CPU
    assert CPU.torch_name == "cpu"
    assert not CPU.is_accelerator


def test_a_card_that_is_not_there_is_named_and_the_way_out(visible: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"rank 0 device_id 4, and 2 CUDA devices are visible.*correct its device_id"):
        bind("cuda", ["4"], 0)
    with pytest.raises(ConfigError, match="device_id a0: a CUDA device is named by its number"):
        bind("cuda", ["a0"], 0)
    visible[0] = 0
    with pytest.raises(ConfigError, match=r"--device cuda: torch finds no CUDA device here .*use --device cpu"):
        bind("cuda", ["0"], 0)


@pytest.mark.parametrize("name", ["npu", "gpu", ""])
def test_kinds_that_are_not_served_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {name}: "):
        check_name(name)


def test_on_cpu_everything_has_happened_when_a_call_returns() -> None:
    stream = device.SideStream(CPU)
    before = device.mark(CPU)
    stream.after(before)
    with stream:
        pass
    after = stream.mark()
    after.wait()
    assert after.is_reached
    assert device.num_multiprocessors(CPU) == 1
