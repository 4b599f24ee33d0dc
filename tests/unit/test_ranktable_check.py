"""Every fault of a set of tables, each on its line."""

import json
from pathlib import Path

import pytest

from ranktable_tools import check, generate, parse_node_ports, permission_warnings, write
from ranktable_tools.errors import Fault, RankTableError


def tables(folder: Path, **changed: object) -> list[Path]:
    """The global table, the local tables of prefill and decode, the scheduler's."""
    settings = {
        "prefill": [[4, 5]],
        "decode": [[6, 7]],
        "api_server": True,
        "server_ip": "10.0.0.18",
        "device_kind": "cpu",
    }
    return write(generate(**{**settings, **changed}), folder)  # type: ignore[arg-type]


def fields(faults: list[Fault]) -> list[str]:
    return [fault.field for fault in faults]


def test_a_fine_set_has_no_fault(tmp_path: Path) -> None:
    table, *local_tables = tables(tmp_path)
    assert check(table, local_tables, "8088,8089", 2) == []
    assert check(table, local_tables, [8088, 8089], 2) == []


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


def test_a_final_table_has_every_role(tmp_path: Path) -> None:
    table = tables(tmp_path, prefill=[], api_server=False)[0]
    faults = check(table)
    assert fields(faults) == ["server_group_list[0].server_count", "server_group_list[1].server_count"]
    assert "--api-server" in str(faults[0])


def test_an_unreadable_table_is_one_fault(tmp_path: Path) -> None:
    table = tables(tmp_path)[0]
    table.write_text("{")
    assert len(check(table, [tmp_path / "missing"], "1,2,3", 4)) == 1


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


def test_ports_are_counted_against_instances(tmp_path: Path) -> None:
    table = tables(tmp_path, prefill=[[0], [1]], decode=[[2]])[0]
    (fault,) = check(table, node_ports="8088,8089")
    assert fault.value == "2 ports"
    assert "3 ports" in fault.expected
    assert "2 prefill, 1 decode" in fault.expected


def test_a_port_may_be_used_again_on_another_host(tmp_path: Path) -> None:
    table = tables(tmp_path)[0]
    value = json.loads(table.read_text())
    decode = value["server_group_list"][2]["server_list"][0]
    decode["server_ip"] = "10.0.0.19"
    for device in decode["device"]:
        device["device_ip"] = "10.0.0.19"
    table.write_text(json.dumps(value))
    assert check(table, node_ports="8088,8088") == []


def test_localhost_and_its_address_are_one_host(tmp_path: Path) -> None:
    table = tables(tmp_path, server_ip="localhost")[0]
    value = json.loads(table.read_text())
    value["server_group_list"][2]["server_list"][0]["server_ip"] = "127.0.0.1"
    table.write_text(json.dumps(value))
    assert fields(check(table, node_ports="8088,8088")) == ["[1]"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "[0]"),
        ("8088,", "[1]"),
        ("8088,x", "[1]"),
        ("0", "[0]"),
        ("70000", "[0]"),
        ("-1", "[0]"),
        ("８０", "[0]"),
    ],
)
def test_ports_that_are_none(text: str, field: str) -> None:
    with pytest.raises(RankTableError) as caught:
        parse_node_ports(text)
    assert (caught.value.file, caught.value.field) == ("NODE_PORTS", field)


def test_node_ports() -> None:
    assert parse_node_ports("8088, 8089") == [8088, 8089]


def test_a_readable_file_is_a_warning_and_no_fault(tmp_path: Path) -> None:
    table, *local_tables = tables(tmp_path)
    assert permission_warnings([table, *local_tables]) == []
    table.chmod(0o644)
    (line,) = permission_warnings([table, *local_tables, tmp_path / "missing"])
    assert line.startswith(f"{table}: mode 0644")
    assert check(table) == []
