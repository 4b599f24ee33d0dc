"""Output of the vendors' programs, in the layout of their manuals, and its interpretation."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ranktable_tools import npu, probe
from ranktable_tools.errors import RankTableError
from ranktable_tools.npu import Chip, Npu

NPU_SMI_LIST = """\tTotal Count                    : 2

\tNPU ID                         : 4
\tProduct Name                   : IT21HMDB01-B2
\tChip Count                     : 1

\tNPU ID                         : 5
\tChip Count                     : 1
"""
NPU_SMI_MAP = """\tNPU ID              Chip ID             Chip Logic ID       Chip Name
\t4                   0                   0                   Ascend 910B3
\t4                   1                   -                   Mcu
\t5                   0                   1                   Ascend 910B3
\t5                   1                   -                   Mcu
"""
NPU_SMI_MAP_A3 = """NPU ID      Chip ID     Chip Logic ID     Chip Phy-ID     Chip Name
0           0           0                 8               Ascend910
0           1           1                 9               Ascend910
0           2           -                 -               Mcu
"""
NVIDIA_SMI_LIST = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a1f0e4c-0000-0000-0000-000000000000)
  MIG 1g.10gb     Device  0: (UUID: MIG-6b1f0e4c-0000-0000-0000-000000000000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5a1f0e4c-0000-0000-0000-000000000001)
"""
HCCN_CONF = "address_0=10.0.0.10\nnetmask_0=255.255.255.0\n address_11 = 10.0.0.21 \naddress_2=\naddress_3=x\n"


def answering(answers: dict[str, str]) -> probe.Run:
    """Programs whose arguments (less the program's folder) are in `answers`; the rest aren't there."""

    def run(command: Sequence[str]) -> str | None:
        return answers.get(" ".join([Path(command[0]).name, *command[1:]]))

    return run


def test_hccn_tool() -> None:
    for text, address in (
        ("ipaddr:10.0.0.10\nnetmask:255.255.255.0\n", "10.0.0.10"),
        ("netmask:64\nipaddr:2001:db8::10\n", "2001:db8::10"),
        ("ipv6_address:2001:db8::10\nprefix_length:64\n", "2001:db8::10"),
        ("vnic ipaddr: 192.168.0.3\nvnic netmask: 255.255.0.0\n", "192.168.0.3"),
        ("hccn_tool failed: device 4 not found\n", None),
        ("", None),
    ):
        assert npu.parse_hccn_tool(text) == address


def test_printed_lists() -> None:
    assert npu.parse_hccn_conf(HCCN_CONF) == {0: "10.0.0.10", 11: "10.0.0.21"}
    assert npu.parse_npu_smi_list(NPU_SMI_LIST) == [4, 5]
    assert npu.parse_npu_smi_map(NPU_SMI_MAP) == [Chip(4, 0, 0), Chip(5, 0, 1)]
    assert npu.parse_npu_smi_map(NPU_SMI_MAP_A3) == [Chip(0, 0, 0, 8), Chip(0, 1, 1, 9)]
    assert npu.parse_npu_smi_map("dcmi model initialized failed") == []
    assert probe.parse_nvidia_smi_list(NVIDIA_SMI_LIST) == [0, 1]


def test_npu_addresses_come_from_three_places(tmp_path: Path) -> None:
    conf = tmp_path / "hccn.conf"
    conf.write_text("address_6=10.0.0.26\n")
    run = answering(
        {
            "hccn_tool -i 4 -ip -g": "ipaddr:10.0.0.24\nnetmask:255.255.255.0\n",
            "hccn_tool -i 5 -ip -g": "not set",
            "hccn_tool -i 5 -vnic -g": "ipaddr:10.0.0.25\n",
        }
    )
    found = probe.find_devices("npu", [4, 5, 6], "10.0.0.1", {}, run, conf)
    assert found == {4: Npu("10.0.0.24"), 5: Npu("10.0.0.25"), 6: Npu("10.0.0.26")}


def test_an_npu_without_an_address_says_the_way_out(tmp_path: Path) -> None:
    run = answering({"npu-smi info -l": NPU_SMI_LIST})
    with pytest.raises(RankTableError, match=r"npu-smi sees 4, 5.*--device-ip 7=ADDRESS"):
        probe.find_devices("npu", [7], "10.0.0.1", {}, run, tmp_path / "missing")


def test_gpus_are_looked_for_where_nvidia_smi_is() -> None:
    run = answering({"nvidia-smi -L": NVIDIA_SMI_LIST})
    assert probe.find_devices("gpu", [0, 1], "10.0.0.1", {}, run) == dict.fromkeys((0, 1), Npu("10.0.0.1"))
    with pytest.raises(RankTableError, match="found 2, expected one of 0, 1"):
        probe.find_devices("gpu", [1, 2], "10.0.0.1", {}, run)
    assert probe.find_devices("gpu", [2], "10.0.0.1", {2: "10.0.0.2"}, run) == {2: Npu("10.0.0.2")}
    assert probe.find_devices("gpu", [7], "10.0.0.1", {}, answering({})) == {7: Npu("10.0.0.1")}
    slots = probe.find_devices("cpu", [0, 90], "localhost", {}, answering({}))
    assert slots == dict.fromkeys((0, 90), Npu("localhost"))


def test_the_kind_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(probe.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(probe.glob, "glob", lambda pattern: [pattern] if pattern in there else [])
    for present, kind in (
        *(({"npu-smi"}, "npu"), ({"hccn_tool", "nvidia-smi"}, "npu"), ({"/dev/davinci*"}, "npu")),
        *(({"nvidia-smi"}, "gpu"), ({"/dev/nvidia0"}, "gpu"), (set(), "cpu")),
    ):
        there.clear()
        there.update(present)
        assert probe.detect_kind() == kind


def test_programs_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.run_program(["echo", "ipaddr:10.0.0.1"]) == "ipaddr:10.0.0.1\n"
    assert probe.run_program(["false"]) is None
    assert probe.run_program(["no-such-program-here"]) is None
    monkeypatch.setattr(probe, "_PROGRAM_TIMEOUT_S", 0.05)
    assert probe.run_program(["sleep", "5"]) is None


def test_the_default_address_is_one_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    address = probe.default_server_ip()
    assert address is None or probe.is_ip(address)

    def no_network(*_: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(probe.socket, "socket", no_network)
    assert probe.default_server_ip() is None
