"""`pd-ranktable gen --device npu` on recorded Atlas A2 and A3 machines (tests/data/npu): parsers, tables, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pd_cluster.devices import hccl_environment
from ranktable_tools import check, cli, load_global, load_local, locate, machine_probe, npu, vnpu
from ranktable_tools.errors import RankTableError
from ranktable_tools.npu import Chip, Npu
from tests.support import npu_machine
from tests.support.npu_machine import answer, recorded

GEN = ["gen", "--device", "npu", "--server-ip", "10.0.0.18", "--api-server"]
LISTS = ["--prefill-server-list", "4,5", "--decode-server-list", "6,7"]
GLOBAL = "global_ranktable_10.0.0.18.json"


class Machine:
    """Writes the tables of a machine that `start` simulates from a recorded session."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch

    def start(self, session: str, conf: str = "", programs: tuple[str, ...] = ("npu-smi", "hccn_tool")) -> None:
        npu_machine.start(self.folder, self._patch, session, programs)
        if conf:
            (self.folder / "hccn.conf").write_text((npu_machine.DATA / conf).read_text("utf-8"))

    def gen(self, *more: str, code: int = 0) -> Path:
        assert cli.main([*GEN, *(more or LISTS), "--save-dir", str(self.folder)]) == code
        return self.folder / GLOBAL

    def devices(self, *more: str) -> list[tuple[str, str, str | None]]:
        """Returns (device_id, device_ip, super_device_id) of each device in the table that gen writes."""
        servers = load_global(self.gen(*more)).instances
        return [(d.device_id, d.device_ip, d.super_device_id) for server in servers for d in server.device]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_recorded_lists_and_maps() -> None:
    for name, chips_of_a_card in (("a2", 1), ("a3", 2)):
        listed = answer(name, "npu-smi info -l")
        assert npu.parse_npu_smi_list(listed) == list(range(8))
        assert npu.parse_npu_smi_count(listed) == 8
        mapped = answer(name, "npu-smi info -m")
        model = "Ascend910" if name == "a3" else "Ascend 910B3"
        assert npu.parse_npu_smi_chip_names(mapped) == [model] * 8 * chips_of_a_card
        chips = npu.parse_npu_smi_map(mapped)
        assert [chip.logic_id for chip in chips] == list(range(8 * chips_of_a_card))
    assert chips[5] == Chip(npu_id=2, chip_id=1, logic_id=5, phy_id=5)
    assert npu.parse_npu_smi_count("NPU ID : 4") is None


def test_a_place_in_a_super_pod() -> None:
    for text, sdid in (
        (answer("a3", "npu-smi info -t spod-info -i 2 -c 1"), str((4 << 22) | (2 << 18) | (1 << 16) | 5)),
        ("\tSDID                           : 0\n\tSuper Pod Size : 384\n", "0"),
        (answer("a2", "npu-smi info -t spod-info -i 0 -c 0"), None),
        ("\tSDID                           : 4294967295\n", None),
        ("\tSDID                           : NA\n\tServer Index : 4\n", None),
    ):
        assert npu.parse_spod_info(text) == sdid


def test_hccn_conf_of_both_families() -> None:
    a2, a2_ipv6, a3 = (npu_machine.DATA / f"{name}_hccn.conf" for name in ("a2", "a2_ipv6", "a3"))
    assert npu.parse_hccn_conf(a2.read_text()) == {i: f"192.0.2.{20 + i}" for i in range(8)}
    assert npu.parse_hccn_conf(a2_ipv6.read_text()) == {i: f"2001:db8:a2::{20 + i}" for i in range(8)}
    assert len(npu.parse_hccn_conf(a3.read_text())) == 16
    both = "IPv6address_0=2001:db8::1\naddress_0=192.0.2.1\nIPv6address_1=2001:db8::2\n"
    assert npu.parse_hccn_conf(both) == {0: "192.0.2.1", 1: "2001:db8::2"}


@pytest.mark.parametrize(("name", "prefix"), [("a2", "192.0.2.2"), ("a2_ipv6", "2001:db8:a2::2")])
def test_an_a2_machine(machine: Machine, name: str, prefix: str) -> None:
    """Tables have the chips' addresses, not the vNICs', and version 1.0, without super pod fields."""
    machine.start(recorded(name))
    assert machine.devices() == [(str(i), f"{prefix}{i}", None) for i in (4, 5, 6, 7)]
    for file in machine.folder.glob("*_ranktable_*.json"):
        assert json.loads(file.read_text())["version"] == "1.0"
        assert "super" not in file.read_text()


@pytest.mark.parametrize(("name", "prefix"), [("a2", "192.0.2.2"), ("a2_ipv6", "2001:db8:a2::2"), ("a3", "192.0.2.12")])
def test_hccn_conf_where_hccn_tool_is_missing(machine: Machine, name: str, prefix: str) -> None:
    machine.start(recorded(name), f"{name}_hccn.conf", programs=("npu-smi",))
    assert [device_ip for _, device_ip, _ in machine.devices()] == [f"{prefix}{i}" for i in (4, 5, 6, 7)]


def test_an_a3_machine(machine: Machine) -> None:
    """16 chips on 8 cards: one instance on two dies of a card, one on two cards. Uses the vNICs' addresses."""
    machine.start(recorded("a3"), "a3_hccn.conf")
    devices = machine.devices("--prefill-server-list", "4,5", "--decode-server-list", "6,15")
    assert [(device_id, device_ip) for device_id, device_ip, _ in devices] == [
        (str(i), f"203.0.113.{10 + i}") for i in (4, 5, 6, 15)
    ]
    assert [sdid for _, _, sdid in devices] == ["17301508", "17367045", "17563654", "18677775"]


def test_a_super_device_id_survives_gen_merge_load_show(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.start(recorded("a3"))
    first = machine.gen()
    assert json.loads(first.read_text())["version"] == "1.2"
    local_tables = sorted(machine.folder.glob("local_*.json"))
    assert {json.loads(file.read_text())["version"] for file in local_tables} == {"1.2"}
    other = ["gen", "--device", "cpu", "--server-ip", "10.0.0.19", "--decode-server-list", "0"]
    assert cli.main([*other, "--save-dir", str(machine.folder)]) == 0
    second = machine.folder / "global_ranktable_10.0.0.19.json"
    mixed = ["merge", "--global-ranktable-list", str(second), str(first), f"--save-dir={machine.folder}"]
    assert cli.main(mixed) == 1
    assert ".device[0].super_device_id: found nothing, expected one for every device" in capsys.readouterr().err
    second.write_text(second.read_text().replace('"rank_id": "0"', '"rank_id": "0", "super_device_id": "7"'))
    assert cli.main(["merge", "--global-ranktable-list", str(second), str(first), f"--save-dir={machine.folder}"]) == 0
    merged = machine.folder / "global_ranktable_merge.json"
    table = load_global(merged)
    assert table.version == "1.2"  # the higher version, as 1.2 only adds an optional field of devices
    assert [d.super_device_id for d in table.prefill[0].device] == ["17301508", "17367045"]
    located = {locate(table, load_local(file)) for file in local_tables}
    assert located == {("scheduler", 0), ("prefill", 0), ("decode", 1)}
    assert check(merged, local_tables) == []
    capsys.readouterr()
    assert cli.main(["show", str(merged)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].endswith("super device ids")
    assert shown[3].split()[-1] == "17301508,17367045"
    assert shown[4].split()[-1] == "7"


def test_with_one_of_the_programs_alone(machine: Machine) -> None:
    """Manual addresses keep the super device ids; without npu-smi, the table has what is known."""
    machine.start(recorded("a3"), programs=("npu-smi",))
    devices = machine.devices("--prefill-server-list", "0", "--device-ip", "0=203.0.113.99")
    assert devices == [("0", "203.0.113.99", "16777216")]
    (machine.folder / "bin" / "npu-smi").unlink()
    machine.start(recorded("a3"), programs=("hccn_tool",))
    assert machine.devices("--prefill-server-list", "4") == [("4", "192.0.2.124", None)]


@pytest.mark.parametrize("programs", [("npu-smi",), ()])
def test_without_any_address_the_way_out_is_said(
    machine: Machine, capsys: pytest.CaptureFixture[str], programs: tuple[str, ...]
) -> None:
    machine.start(recorded("a2"), programs=programs)
    machine.gen(code=1)
    error = capsys.readouterr().err
    assert f"mount {machine.folder}/hccn.conf and hccn_tool into the container, or give --device-ip 4=ADDRESS" in error
    seen = "npu-smi sees 0, 1, 2, 3, 4, 5, 6, 7 on 8 cards" if programs else "npu-smi sees no device"
    assert seen in error
    assert error.count("\n") == 1


def test_a_device_that_is_not_there(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing device is refused even if the host's hccn.conf, mounted into the container, has its address."""
    machine.start(recorded("a3"), "a3_hccn.conf")
    with machine.folder.joinpath("hccn.conf").open("a") as conf:
        conf.write("address_16=192.0.2.250\n")
    machine.gen("--prefill-server-list", "0", "16", code=1)
    there = ", ".join(map(str, range(16)))
    error = capsys.readouterr().err
    assert f"NPU 16: found nothing, expected a device that exists and is up (npu-smi sees {there} on 8" in error


def test_chips_that_are_down_are_not_there(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    width = " " * 30
    up = "\t7                              1                              15                             15  "
    assert up in recorded("a3")
    down = f"\t7 {width}1 {width}-1{width}-1  "
    machine.start(recorded("a3").replace(up, down), "a3_hccn.conf", programs=("npu-smi",))
    machine.gen("--prefill-server-list", "15", code=1)
    assert "sees 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 on 8 cards" in capsys.readouterr().err


def test_a_chip_without_its_place_in_the_super_pod_is_refused(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = recorded("a3").replace("spod-info -i 2 -c 1\n", "spod-info -i 2 -c 1\nfailed\n[exit 255]\n$ nothing\n")
    machine.start(silent)
    machine.gen(code=1)
    error = capsys.readouterr().err
    assert "npu-smi info -t spod-info -i 2 -c 1: SDID: found nothing, expected the place of NPU 5" in error


def test_a_container_that_sees_two_cards_takes_either_of_their_names() -> None:
    """Without physical ids, both 4 and 5 or 0 and 1 may name cards 4 and 5; hccn.conf lists all cards of the host."""
    mapped = "\tNPU ID   Chip ID   Chip Logic ID   Chip Name\n\t4   0   0   Ascend 910B3\n\t5   0   1   Ascend 910B3\n"
    chips = npu.parse_npu_smi_map(mapped)
    assert [chip.device_ids for chip in chips] == [[0, 4], [1, 5]]


# ---- `pd-ranktable gen` on machines with vNPUs, and with unsupported chips


HOST = "10.0.0.18"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates an A2 machine whose NPU 4 has two vNPUs and NPU 5 has one; returns the folder for tables."""
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("davinci0", "davinci4", "vdavinci164", "vdavinci165", "vdavinci180", "davinci_manager"):
        (dev / name).touch()
    monkeypatch.setattr(vnpu, "DEV", dev)
    npu_machine.start(tmp_path, monkeypatch, recorded("a2"))
    return tmp_path


def gen(folder: Path, *arguments: str) -> int:
    return cli.main([*GEN, *arguments, "--save-dir", str(folder)])


def test_a_vnpu_has_its_own_id_and_the_host_s_address(host: Path) -> None:
    assert gen(host, "--prefill-server-list", "164", "--decode-server-list", "180", "0") == 0
    table = load_global(host / f"global_ranktable_{HOST}.json")
    found = [(server.device[0].device_id, server.device[0].device_ip) for server in table.instances]
    assert found == [("164", HOST), ("180", HOST), ("0", "192.0.2.20")]
    assert [hccl_environment.is_wanted("auto", server) for server in table.instances] == [False, False, True]
    local = host / f"local_ranktable_{HOST}_164.json"
    assert json.loads(local.read_text())["server_list"][0]["device"][0]["device_id"] == "164"
    assert check(host / f"global_ranktable_{HOST}.json", [local]) == []
    (host / "dev" / "vdavinci164").rename(host / "dev" / "davinci164")
    assert vnpu.present() == [164, 165, 180]
    assert gen(host, "--prefill-server-list", "164", "--decode-server-list", "165") == 0


def test_a_machine_whose_every_npu_is_divided_is_an_npu_machine(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(host / "nothing"))
    for file in (host / "dev").glob("davinci*"):
        file.unlink()
    assert machine_probe.detect_kind() == "npu"
    for file in (host / "dev").glob("vdavinci*"):
        file.unlink()
    assert machine_probe.detect_kind() != "npu"


def test_a_vnpu_that_cannot_serve_is_refused(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (
        (
            "--prefill-server-list 166",
            "vNPU 166: found nothing, expected the device file of a vNPU (existing ones are 1",
        ),
        ("--prefill-server-list 164,165", "--prefill-server-list[0]: found '164,165', expected one device"),
        ("--decode-server-list 0,164", "--decode-server-list[0]: found '0,164', expected one device"),
        ("--prefill-server-list 164 --decode-server-list 3,4", "[0]: found 164, expected a vNPU of an NPU that no ins"),
    ):
        assert gen(host, *given.split()) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_an_absent_vnpu_says_how_one_is_made(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (host / "dev").glob("vdavinci*"):
        file.unlink()
    assert gen(host, "--prefill-server-list", "117") == 1
    error = capsys.readouterr().err
    assert "none exists" in error
    assert f"npu-smi set -t create-vnpu -i 1 -c 0, or give --device-ip 117={HOST}" in error
    assert gen(host, "--prefill-server-list", "117", "--device-ip", f"117={HOST}") == 0


def test_ids_above_99_are_nothing_special_on_a_cpu(tmp_path: Path) -> None:
    argv = ["gen", "--device", "cpu", "--server-ip", HOST, "--prefill-server-list", "100,101"]
    assert cli.main([*argv, "--save-dir", str(tmp_path)]) == 0


def test_the_310_series_is_refused_by_name(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, card in (
        *(("Ascend 310P3", ["0"]), ("Ascend310P1", ["0", "--device-ip", "0=192.0.2.1"]), ("Ascend 310B4", ["164"])),
    ):
        npu_machine.start(host, monkeypatch, recorded("a2").replace("Ascend 910B3", name))
        assert gen(host, "--prefill-server-list", *card) == 1
        error = capsys.readouterr().err
        assert f"npu-smi info -m: Chip Name: found '{name}', expected a chip of Atlas A2 or A3" in error
        assert error.count("\n") == 1


# ---- interpretation of the vendor's program output, in the layout of the manuals


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


def answering(answers: dict[str, str]) -> machine_probe.Run:
    """Returns a runner that knows the commands in `answers` (without the program's folder); others are missing."""

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
    assert machine_probe.parse_nvidia_smi_list(NVIDIA_SMI_LIST) == [0, 1]


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
    found = machine_probe.find_devices("npu", [4, 5, 6], "10.0.0.1", {}, run, conf)
    assert found == {4: Npu("10.0.0.24"), 5: Npu("10.0.0.25"), 6: Npu("10.0.0.26")}


def test_gpus_are_looked_for_where_nvidia_smi_is() -> None:
    run = answering({"nvidia-smi -L": NVIDIA_SMI_LIST})
    assert machine_probe.find_devices("gpu", [0, 1], "10.0.0.1", {}, run) == dict.fromkeys((0, 1), Npu("10.0.0.1"))
    with pytest.raises(RankTableError, match="found 2, expected one of 0, 1"):
        machine_probe.find_devices("gpu", [1, 2], "10.0.0.1", {}, run)
    assert machine_probe.find_devices("gpu", [2], "10.0.0.1", {2: "10.0.0.2"}, run) == {2: Npu("10.0.0.2")}
    assert machine_probe.find_devices("gpu", [7], "10.0.0.1", {}, answering({})) == {7: Npu("10.0.0.1")}
    slots = machine_probe.find_devices("cpu", [0, 90], "localhost", {}, answering({}))
    assert slots == dict.fromkeys((0, 90), Npu("localhost"))


def test_the_kind_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(machine_probe.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(machine_probe.glob, "glob", lambda pattern: [pattern] if pattern in there else [])
    for present, kind in (
        *(({"npu-smi"}, "npu"), ({"hccn_tool", "nvidia-smi"}, "npu"), ({"/dev/davinci*"}, "npu")),
        *(({"nvidia-smi"}, "gpu"), ({"/dev/nvidia0"}, "gpu"), (set(), "cpu")),
    ):
        there.clear()
        there.update(present)
        assert machine_probe.detect_kind() == kind


def test_programs_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_probe.run_program(["echo", "ipaddr:10.0.0.1"]) == "ipaddr:10.0.0.1\n"
    assert machine_probe.run_program(["false"]) is None
    assert machine_probe.run_program(["no-such-program-here"]) is None
    monkeypatch.setattr(machine_probe, "_PROGRAM_TIMEOUT_S", 0.05)
    assert machine_probe.run_program(["sleep", "5"]) is None


def test_the_default_address_is_one_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    address = machine_probe.default_server_ip()
    assert address is None or machine_probe.is_ip(address)

    def no_network(*_: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(machine_probe.socket, "socket", no_network)
    assert machine_probe.default_server_ip() is None
