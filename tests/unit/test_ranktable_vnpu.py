"""`pd-ranktable gen` on machines with vNPUs, and on a machine of chips that no worker computes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_cluster.devices import hccl
from ranktable_tools import check, cli, load_global, npu, probe, vnpu
from tests.support import npu_machine
from tests.support.npu_machine import recorded

HOST = "10.0.0.18"
GEN = ["gen", "--device", "npu", "--server-ip", HOST, "--api-server"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An A2 machine whose NPU 4 is divided in two, NPU 5 into one part. Returns the folder for tables."""
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
    assert [hccl.is_wanted("auto", server) for server in table.instances] == [False, False, True]
    local = host / f"local_ranktable_{HOST}_164.json"
    assert json.loads(local.read_text())["server_list"][0]["device"][0]["device_id"] == "164"
    assert check(host / f"global_ranktable_{HOST}.json", [local]) == []


def test_a_container_has_it_under_a_card_s_name(host: Path) -> None:
    (host / "dev" / "vdavinci164").rename(host / "dev" / "davinci164")
    assert vnpu.present() == [164, 165, 180]
    assert gen(host, "--prefill-server-list", "164", "--decode-server-list", "165") == 0


def test_a_machine_whose_every_npu_is_divided_is_an_npu_machine(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(host / "nothing"))
    for file in (host / "dev").glob("davinci*"):
        file.unlink()
    assert probe.detect_kind() == "npu"
    for file in (host / "dev").glob("vdavinci*"):
        file.unlink()
    assert probe.detect_kind() != "npu"


def test_a_vnpu_that_cannot_serve_is_refused(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (
        ("--prefill-server-list 166", "vNPU 166: found nothing, expected the device file of a vNPU (there are 1"),
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
    assert "there is none" in error
    assert f"npu-smi set -t create-vnpu -i 1 -c 0, or say --device-ip 117={HOST}" in error
    assert gen(host, "--prefill-server-list", "117", "--device-ip", f"117={HOST}") == 0


def test_ids_above_99_are_nothing_special_on_a_cpu(tmp_path: Path) -> None:
    argv = ["gen", "--device", "cpu", "--server-ip", HOST, "--prefill-server-list", "100,101"]
    assert cli.main([*argv, "--save-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("Ascend 310P3", ["0"]),
        ("Ascend310P1", ["0", "--device-ip", "0=192.0.2.1"]),
        ("Ascend 310B4", ["164"]),
    ],
)
def test_the_310_series_is_refused_by_name(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, card: list[str]
) -> None:
    session = recorded("a2").replace("Ascend 910B3", name)
    assert session.count(name) == 8
    npu_machine.start(host, monkeypatch, session)
    assert gen(host, "--prefill-server-list", *card) == 1
    error = capsys.readouterr().err
    assert f"npu-smi info -m: Chip Name: found '{name}', expected a chip of Atlas A2 or A3" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("machine", "name", "chips"), [("a2", "Ascend 910B3", 8), ("a3", "Ascend910", 16)])
def test_the_chips_of_a2_and_a3_have_names(machine: str, name: str, chips: int) -> None:
    mapped = npu_machine.answer(machine, "npu-smi info -m")
    assert npu.parse_npu_smi_chip_names(mapped) == [name] * chips
