"""`pd-ranktable gen --device npu` on recorded Atlas A2 and A3 machines (tests/data/npu): parsers, tables, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranktable_tools import check, cli, load_global, load_local, locate, npu
from ranktable_tools.npu import Chip
from tests.support import npu_machine
from tests.support.npu_machine import answer, recorded

GEN = ["gen", "--device", "npu", "--server-ip", "10.0.0.18", "--api-server"]
LISTS = ["--prefill-server-list", "4,5", "--decode-server-list", "6,7"]
GLOBAL = "global_ranktable_10.0.0.18.json"


class Machine:
    """Writes tables of a machine that `start` makes of a recorded session."""

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
        """(device_id, device_ip, super_device_id) of the table that gen writes."""
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
        chips = npu.parse_npu_smi_map(answer(name, "npu-smi info -m"))
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
    """Its chips' own addresses, not those of the vNICs; version 1.0 without a word of super pods."""
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
    """16 chips on 8 cards; an instance of two dies of one card, and one of two cards. The address is the vNIC's."""
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
    assert table.version == "1.2"  # the higher of the two: 1.2 only adds a field that a device may have
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
    """Addresses by hand keep the super device ids. A container without npu-smi has as good a table as is known."""
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
    assert f"mount {machine.folder}/hccn.conf and hccn_tool into the container, or say --device-ip 4=ADDRESS" in error
    seen = "npu-smi sees 0, 1, 2, 3, 4, 5, 6, 7 on 8 cards" if programs else "npu-smi sees no device"
    assert seen in error
    assert error.count("\n") == 1


def test_a_device_that_is_not_there(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Though hccn.conf, which a container gets of its host, has its address."""
    machine.start(recorded("a3"), "a3_hccn.conf")
    with machine.folder.joinpath("hccn.conf").open("a") as conf:
        conf.write("address_16=192.0.2.250\n")
    machine.gen("--prefill-server-list", "0", "16", code=1)
    there = ", ".join(map(str, range(16)))
    error = capsys.readouterr().err
    assert f"NPU 16: found nothing, expected a device that is there and up (npu-smi sees {there} on 8" in error


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
    """Without physical ids, cards 4 and 5 may be meant by 4 and 5 or by 0 and 1; hccn.conf has all of the host's."""
    mapped = "\tNPU ID   Chip ID   Chip Logic ID   Chip Name\n\t4   0   0   Ascend 910B3\n\t5   0   1   Ascend 910B3\n"
    chips = npu.parse_npu_smi_map(mapped)
    assert [chip.device_ids for chip in chips] == [[0, 4], [1, 5]]


def test_a_machine_with_these_programs_is_an_npu_machine(machine: Machine) -> None:
    """`--device auto` on a machine with the recorded programs is `--device npu`."""
    machine.start(recorded("a2"))
    argv = [word for word in GEN if word not in ("--device", "npu")]
    assert cli.main([*argv, *LISTS, "--save-dir", str(machine.folder)]) == 0
    assert load_global(machine.folder / GLOBAL).prefill[0].device[0].device_ip == "192.0.2.24"
