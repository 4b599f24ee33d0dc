"""Reading rank tables: the reference document's, faulty ones, and other programs'."""

import json
import re
from pathlib import Path

import pytest

from ranktable_tools.errors import MISSING
from ranktable_tools.schema import RankTableError, load_global, load_local, locate, parse_global, parse_local

# The reference document's example, with its masked addresses filled in.
DOCUMENT_GLOBAL = """{ "version": "1.0", "status": "completed", "server_group_list": [ { "group_id": "0",
"server_count": "1", "server_list": [ { "server_id": "localhost", "server_ip": "localhost" } ] },
{ "group_id": "1", "server_count": "1", "server_list": [ { "server_id": "localhost", "server_ip": "localhost",
"device": [ { "device_id": "4", "device_ip": "10.0.0.22", "rank_id": "0" },
{ "device_id": "5", "device_ip": "10.0.0.23", "rank_id": "1" } ] } ] },
{ "group_id": "2", "server_count": "1", "server_list": [ { "server_id": "localhost", "server_ip": "localhost",
"device": [ { "device_id": "6", "device_ip": "29.0.0.56", "rank_id": "0" },
{ "device_id": "7", "device_ip": "29.0.0.72", "rank_id": "1" } ] } ] } ] }"""
DOCUMENT_LOCAL = """{ "version": "1.0", "status": "completed", "group_id": "0", "server_count": "1",
"server_list": [ { "server_id": "localhost", "server_ip": "localhost", "device": [
{ "device_id": "6", "device_ip": "29.0.0.56", "rank_id": "0" },
{ "device_id": "7", "device_ip": "29.0.0.72", "rank_id": "1" } ] } ] }"""


def document() -> dict:
    return json.loads(DOCUMENT_GLOBAL)


def document_local() -> dict:
    return json.loads(DOCUMENT_LOCAL)


def put(value: object, field: str, replacement: object) -> None:
    """Replaces the value at a path in the notation of errors, such as `a[0].b`."""
    *path, last = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", field)]
    for part in path:
        value = value[part]  # type: ignore[index]
    value[last] = replacement  # type: ignore[index]


def refused(field: str, replacement: object) -> RankTableError:
    """Returns the error for the document's table with one value replaced."""
    value = document()
    put(value, field, replacement)
    return refusal(value)


def refusal(value: object) -> RankTableError:
    with pytest.raises(RankTableError) as caught:
        parse_global(value, "g.json")
    return caught.value


def local_refusal(value: object) -> RankTableError:
    with pytest.raises(RankTableError) as caught:
        parse_local(value, "l.json")
    return caught.value


def test_the_documents_tables_are_read(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(DOCUMENT_GLOBAL)
    (tmp_path / "l.json").write_text(DOCUMENT_LOCAL, encoding="utf-8-sig")  # a byte order mark is accepted
    table, local = load_global(tmp_path / "g.json"), load_local(tmp_path / "l.json")
    assert table.scheduler is not None
    assert table.scheduler.server_ip == "localhost"
    assert table.scheduler.device == ()
    assert [d.device_id for d in table.prefill[0].device] == ["4", "5"]
    assert [d.device_ip for d in table.decode[0].device] == ["29.0.0.56", "29.0.0.72"]
    assert table.instances == table.prefill + table.decode
    assert local.server == table.decode[0]
    assert locate(table, local) == ("decode", 0)
    assert json.loads(table.to_json()) == document()
    assert json.loads(local.to_json()) == document_local()


def test_either_spelling_of_the_file_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "local_ranktable_10.0.0.18_67.json").write_text(DOCUMENT_LOCAL)
    local = load_local(tmp_path / "local_rank_table_10.0.0.18_67.json")
    assert local.file == str(tmp_path / "local_ranktable_10.0.0.18_67.json")


def test_devices_come_in_order_of_rank_and_keep_super_device_id() -> None:
    value = document()
    value["server_group_list"][1]["server_list"][0]["device"].reverse()
    assert parse_global(value, "g.json") == parse_global(document(), "g.json")
    value = document()
    value["version"] = "1.2"
    value["server_group_list"][1]["server_list"][0]["device"][0]["super_device_id"] = "4294967295"
    table = parse_global(value, "g.json")
    assert table.prefill[0].device[0].super_device_id == "4294967295"
    assert table.to_dict() == value


def test_addresses_and_names() -> None:
    for address in ("169.254.7.1", "fd00::1", "10.0.0.1", "localhost", "node-3.cluster"):
        value = document()
        value["server_group_list"][0]["server_list"][0]["server_ip"] = address
        assert parse_global(value, "g.json").to_dict() == value


def test_what_is_no_address() -> None:
    field = "server_group_list[0].server_list[0].server_ip"
    for address in (
        *("10.**.**.18", "0.0,0,0", "10.0.0.300", "a b", "fe80::1%../x", ""),
        *("0.0.0.0", "0.1.2.3", "::", "224.0.0.1", "255.255.255.255", "240.0.0.1", "ff02::1", "4000::1"),
        *("::ffff:224.0.0.1", "::ffff:255.255.255.255", "::10.0.0.1", "fe80::1", "fe80::1%eth0"),
    ):
        error = refused(field, address)
        assert (error.field, error.value) == (field, address)


def test_an_error_is_one_line_that_names_all() -> None:
    field = "server_group_list[1].server_list[0].device[1].rank_id"
    line = str(refused(field, "7"))
    assert line.startswith(f"g.json: {field}: found '7', expected ")
    assert "\n" not in line


def test_a_missing_field_names_what_looks_like_it() -> None:
    value = document()
    device = value["server_group_list"][1]["server_list"][0]["device"][0]
    device["devise_ip"] = device.pop("device_ip")
    error = refusal(value)
    assert error.field == "server_group_list[1].server_list[0].device[0].device_ip"
    assert "is 'devise_ip' meant to be this field?" in str(error)


def test_a_wrong_value_is_named() -> None:
    scheduler, *groups = document()["server_group_list"]
    for field, replacement in (
        *(
            ("server_group_list", wrong)
            for wrong in ([], [scheduler], [scheduler, groups[0]], [scheduler, *groups * 2])
        ),
        *(("version", wrong) for wrong in ("2.0", 1.0)),
        ("status", "initializing"),
        ("server_group_list[1].group_id", "2"),
        ("server_group_list[2].server_count", "3"),
        ("server_group_list[2].server_list[0].device[1].rank_id", "0"),
        ("server_group_list[0].server_list[0].device", groups[0]["server_list"][0]["device"][:1]),
    ):
        assert refused(field, replacement).field == field


def test_a_device_belongs_to_one_instance(tmp_path: Path) -> None:
    value = document()
    value["server_group_list"][2]["server_list"][0]["device"][1]["device_id"] = "4"
    file = tmp_path / "g.json"
    file.write_text(json.dumps(value))
    with pytest.raises(RankTableError) as caught:
        load_global(file)
    assert caught.value.file == str(file)
    assert caught.value.field == "server_group_list[2].server_list[0].device[1].device_id"
    assert "server_group_list[1].server_list[0].device[0]" in caught.value.expected


def test_two_schedulers_are_refused() -> None:
    value = document()
    group = value["server_group_list"][0]
    group["server_list"].append({"server_id": "10.0.0.2", "server_ip": "10.0.0.2"})
    group["server_count"] = "2"
    assert refusal(value).field == "server_group_list[0].server_list[1]"


def test_other_programs_tables_are_refused_by_name() -> None:
    for value, name in (
        ({"status": "completed", "version": "1.0", "server_count": "1", "server_list": []}, "HCCL table of one"),
        ({"status": "completed", "group_count": "1", "group_list": []}, "group_list"),
        ({"version": "1.2", "prefill_device_list": [], "decode_device_list": []}, "vllm-ascend"),
        ({"server_group_list": [{"group_id": "0", "server_count": 1, "server_list": []}]}, "omni-infer"),
        (document_local(), "local rank table"),
    ):
        line = str(refusal(value))
        assert name in line
        assert "pd-ranktable gen" in line or "GLOBAL_RANK_TABLE_FILE_PATH" in line


def test_a_controller_in_the_place_of_prefill() -> None:
    value = document()
    del value["server_group_list"][1]["server_list"][0]["device"]
    error = refusal(value)
    assert error.field == "server_group_list[1].server_list[0].device"
    assert error.value is MISSING
    assert "MindIE" in str(error)


def test_local_tables() -> None:
    assert "a global rank table" in str(local_refusal(document()))
    servers = document_local()["server_list"]
    wrong_values: list[tuple[str, object]] = [
        *(("version", "2.0"), ("version", 1.0), ("status", "initializing"), ("group_id", "1"), ("group_id", "2")),
        *(("server_count", "2"), ("server_count", 1), ("server_list", []), ("server_list", servers * 2)),
        *(("server_list[0].device", nothing) for nothing in ({}, None, "", 0)),
    ]
    for field, wrong in wrong_values:
        value = document_local()
        put(value, field, wrong)
        assert local_refusal(value).field == field


def test_locate_names_both_files_and_what_differs() -> None:
    for field, value in (("device_ip", "29.0.0.57"), ("super_device_id", "8"), ("device_id", "9")):
        other = document_local()
        other["server_list"][0]["device"][0][field] = value
        with pytest.raises(RankTableError, match=r"^l\.json: .*g\.json") as caught:
            locate(parse_global(document(), "g.json"), parse_local(other, "l.json"))
        assert caught.value.field == f"server_list[0].device[0].{field}"


def test_locate_finds_no_entry() -> None:
    table = parse_global(document(), "g.json")
    stranger, host = document_local(), document_local()
    stranger["server_list"][0]["server_ip"] = "10.0.0.9"
    with pytest.raises(RankTableError, match=r"l\.json: .*g\.json, which has localhost \[4,5\], localhost \[6,7\]"):
        locate(table, parse_local(stranger, "l.json"))
    host["server_list"] = [{"server_id": "localhost", "server_ip": "localhost"}]
    assert locate(table, parse_local(host, "l.json")) == ("scheduler", 0)
    without = document()
    without["server_group_list"][0].update(server_count="0", server_list=[])
    with pytest.raises(RankTableError, match=r"gen --api-server"):
        locate(parse_global(without, "g.json"), parse_local(host, "l.json"))


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    for data, field in (
        (b"", "line 1 column 1"),
        (b"{\n  1", "line 2 column 3"),
        (b"\xff{}", "byte 0"),
        (b"[]", "(top level)"),
        (b'{"version": "1.0", "version": "1.0"}', "version"),
        (b"[" * 100_000, "(file)"),
        (b"9" * 10_000, "(file)"),
        (b" " * (16 * 1024 * 1024 + 1), "(file)"),
    ):
        file.write_bytes(data)
        with pytest.raises(RankTableError) as caught:
            load_global(file)
        assert (caught.value.file, caught.value.field) == (str(file), field)
    for path in (tmp_path, tmp_path / "missing.json", Path("a\0b")):
        with pytest.raises(RankTableError) as caught:
            load_global(path)
        assert caught.value.file == str(path)
