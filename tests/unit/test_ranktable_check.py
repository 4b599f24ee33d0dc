"""`check` reports every fault of a set of tables, one per line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranktable_tools import check, generate, write
from ranktable_tools.errors import Fault
from ranktable_tools.ports import GivenPorts, scheduler_ports


def tables(folder: Path, **changed: object) -> list[Path]:
    """Returns the files of the global table, the local tables of prefill and decode, and the scheduler's."""
    settings = {"prefill": [[4, 5]], "decode": [[6, 7]], "api_server": True, "server_ip": "10.0.0.18"}
    return write(generate(**{**settings, "device_kind": "cpu", **changed}), folder)  # type: ignore[arg-type]


def fields(faults: list[Fault]) -> list[str]:
    return [fault.field for fault in faults]


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    table, prefill, *_ = tables(tmp_path, api_server=False)
    prefill.write_text(prefill.read_text().replace('"4"', '"3"'))
    faults = check(table, [prefill], "8088,8088", 1)
    assert fields(faults) == [
        "server_group_list[0].server_count",
        "server_list[0].device[0].device_id",
        "[1]",
        "server_group_list[1].server_list[0].device",
        "server_group_list[2].server_list[0].device",
    ]
    assert all("\n" not in str(fault) for fault in faults)
    assert "--api-server" in str(faults[0])
    table.write_text("{")
    assert len(check(table, [tmp_path / "missing"], "1,2,3", 4)) == 1, "an unreadable table must be one fault"


def test_every_duplicate_is_listed(tmp_path: Path) -> None:
    table = tables(tmp_path)[0]
    table.write_text(table.read_text().replace('"6"', '"4"').replace('"7"', '"5"'))
    assert fields(check(table)) == [f"server_group_list[2].server_list[0].device[{i}].device_id" for i in (0, 1)]


def test_two_local_tables_of_one_instance(tmp_path: Path) -> None:
    table, prefill, *_ = tables(tmp_path)
    copied = tmp_path / "copy.json"
    copied.write_text(prefill.read_text())
    (fault,) = check(table, [prefill, copied])
    assert fault.file == str(copied)
    assert str(prefill) in fault.expected


def changed(table: Path, change: Callable[[list[Any]], None]) -> list[str]:
    """Changes a table's groups; returns the fields of its faults."""
    value = json.loads(table.read_text())
    change(value["server_group_list"])
    table.write_text(json.dumps(value))
    return fields(check(table))


def test_one_host_in_two_spellings(tmp_path: Path) -> None:
    """One host in two spellings is recognized: its devices and ports are used twice."""
    for own, other in (
        ("10.0.0.18", "::FFFF:a00:12"),
        ("fd00::1", "FD00:0::1"),
        ("127.0.0.1", "::1"),
        ("localhost", "127.0.0.2"),
    ):
        table = tables(tmp_path, server_ip=own)[0]

        def respell(groups: list[Any], other: str = other) -> None:
            server = groups[2]["server_list"][0]
            server["server_ip"] = other
            for device, number in zip(server["device"], "45", strict=True):
                device["device_id"], device["device_ip"] = number, other

        assert changed(table, respell) == [f"server_group_list[2].server_list[0].device[{i}].device_id" for i in (0, 1)]
    table = tables(tmp_path)[0]
    value = table.read_text().replace('"10.0.0.18"', '"::ffff:10.0.0.18"', 3)
    table.write_text(value)
    assert fields(check(table, node_ports="8088,8088")) == ["[1]"]


def test_a_devices_address_is_no_other_hosts(tmp_path: Path) -> None:
    table = tables(tmp_path)[0]

    def move(groups: list[Any]) -> None:
        groups[0]["server_list"][0].update(server_id="10.0.0.1", server_ip="10.0.0.1")
        devices = [device for group in groups[1:] for device in group["server_list"][0]["device"]]
        for device, address in zip(devices, ("10.9.0.4", "10.0.0.1", "10.9.0.6", "10.9.0.7"), strict=True):
            device["device_ip"] = address

    assert changed(table, move) == ["server_group_list[1].server_list[0].device[1].device_ip"]


def named(*ids: str | None) -> Callable[[list[Any]], None]:
    """Returns a change that gives a table's four devices these super_device_ids."""

    def change(groups: list[Any]) -> None:
        devices = [device for group in groups[1:] for server in group["server_list"] for device in server["device"]]
        for device, number in zip(devices, ids, strict=True):
            device.update({} if number is None else {"super_device_id": number})

    return change


def test_super_device_ids_are_of_all_and_each_once(tmp_path: Path) -> None:
    for ids, wrong in (
        (("1", "2", "3", "4"), []),
        (("1", "2", None, None), [(2, 0), (2, 1)]),
        ((None, "2", "3", "4"), [(1, 0)]),
        (("1", "2", "3", "1"), [(2, 1)]),
        (("1", "1", "3", "4"), [(1, 1)]),
    ):
        expected = [f"server_group_list[{group}].server_list[0].device[{at}].super_device_id" for group, at in wrong]
        assert changed(tables(tmp_path)[0], named(*ids)) == expected


def test_two_super_pods_may_number_alike(tmp_path: Path) -> None:
    for num_pods, num_faults in ((1, 2), (2, 0)):
        table = tables(tmp_path)[0]

        def spread(groups: list[Any]) -> None:
            decode = groups[2]["server_list"][0]
            decode["server_ip"] = "10.0.0.19"
            for device in decode["device"]:
                device["device_ip"] = "10.0.0.19"
            named("1", "2", "1", "2")(groups)

        changed(table, spread)
        value = json.loads(table.read_text())
        value["super_pod_list"] = [{"super_pod_id": str(at)} for at in range(num_pods)]
        table.write_text(json.dumps(value))
        assert len(check(table, node_ports="8088,8088")) == num_faults, "another host may use the same port"


def test_no_two_processes_of_a_host_listen_at_one_port(tmp_path: Path) -> None:
    table = tables(tmp_path / "one")[0]
    elsewhere = tables(tmp_path / "other")[0]
    elsewhere.write_text(elsewhere.read_text().replace("10.0.0.18", "10.0.0.1", 2))
    for given, faults in (
        (GivenPorts(scheduler_ports(9000)), []),
        (GivenPorts(scheduler_ports(8087)), [("NODE_PORTS", "[0]")]),
        (GivenPorts(scheduler_ports(8089)), [("NODE_PORTS", "[1]")]),
        (GivenPorts(scheduler_ports(9000, 8089)), [("NODE_PORTS", "[1]")]),
        (GivenPorts(scheduler_ports(9000, None, 8088)), [("NODE_PORTS", "[0]")]),
        (GivenPorts(scheduler_ports(9000, None, 9001)), [("scheduler", "--join-port")]),
        (GivenPorts(scheduler_ports(65535)), [("scheduler", "--admin-port")]),
        (GivenPorts(kv_range=(7000, 7000)), [("--kv-port-range", "count")]),
        (GivenPorts(kv_range=(8089, 8095)), [("--kv-port-range", "ports")]),
        (GivenPorts(scheduler_ports(7005), kv_range=(7000, 7005)), [("--kv-port-range", "ports")]),
        (GivenPorts(worker={"--port": 7001}, kv_range=(7000, 7005)), [("--kv-port-range", "ports")]),
    ):
        assert [(each.file, each.field) for each in check(table, node_ports="8088,8089", given=given)] == faults
        found = check(elsewhere, node_ports="8088,8089", given=given)
        assert not [each for each in found if each.file == "NODE_PORTS"]
