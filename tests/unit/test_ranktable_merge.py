"""Merging several machines' global tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.cluster.members.rank_table_place import find_place
from ranktable_tools import cli, generate, load_global, load_local, locate, merge, write
from ranktable_tools.errors import RankTableError


def machine(folder: Path, server_ip: str = "10.0.0.1", **changed: object) -> Path:
    settings = {"prefill": [[0]], "decode": [[1]], "api_server": False, "device_kind": "cpu"}
    folder.mkdir(exist_ok=True)
    return write(generate(server_ip=server_ip, **{**settings, **changed}), folder)[0]  # type: ignore[arg-type]


def refusal(*paths: Path) -> RankTableError:
    with pytest.raises(RankTableError) as caught:
        merge(paths)
    return caught.value


def test_groups_keep_their_order_and_instances_the_files(tmp_path: Path) -> None:
    a = machine(tmp_path, "10.0.0.1", prefill=[[0], [1]], decode=[])
    b = machine(tmp_path, "10.0.0.2", prefill=[], decode=[[0, 1]])
    c = machine(tmp_path, "10.0.0.3", prefill=[[4]], decode=[], api_server=True)
    table = merge([c, a, b])
    assert [group.group_id for group in table.server_group_list] == ["0", "1", "2"]
    assert [group.server_count for group in table.server_group_list] == ["1", "3", "1"]
    assert [server.server_ip[-1] for server in table.instances] == ["3", "1", "1", "2"]


def test_containers_of_one_host_may_be_merged_and_addresses_are_of_one(tmp_path: Path) -> None:
    a = machine(tmp_path / "a", decode=[], api_server=True)
    b = machine(tmp_path / "b", prefill=[])
    assert len(merge([a, b]).instances) == 2
    ips = {0: "29.0.0.1", 1: "29.0.0.2"}
    a = machine(tmp_path, "10.0.0.1", api_server=True, device_ips=ips)
    b = machine(tmp_path, "10.0.0.2", device_ips=ips)
    assert refusal(a, b).field == "server_group_list[1].server_list[0].device[0].device_ip"


def test_a_device_in_two_files_is_refused(tmp_path: Path) -> None:
    a = machine(tmp_path / "a", api_server=True)
    b = machine(tmp_path / "b", prefill=[[1]], decode=[])
    error = refusal(a, b)
    assert (error.file, error.field) == (str(b), "server_group_list[1].server_list[0].device[0].device_id")
    assert f"{a} server_group_list[2].server_list[0].device[0]" in str(error)


def test_localhost_is_no_name_among_several_machines(tmp_path: Path) -> None:
    a = machine(tmp_path / "a", "localhost", api_server=True)
    assert "--server-ip" in str(refusal(a, machine(tmp_path / "b", "127.0.0.1")))
    error = refusal(a, machine(tmp_path, "10.0.0.2"))
    assert error.field == "server_group_list[0].server_list[0].server_ip"


def test_schedulers_are_counted_over_all_files(tmp_path: Path) -> None:
    a, b = machine(tmp_path, "10.0.0.1"), machine(tmp_path, "10.0.0.2")
    none = refusal(a, b)
    assert str(a) in none.file
    assert str(b) in none.file
    assert "--api-server" in str(none)
    c = machine(tmp_path, "10.0.0.3", api_server=True)
    d = machine(tmp_path, "10.0.0.4", api_server=True)
    two = refusal(a, c, d)
    assert (two.file, two.field) == (str(d), "server_group_list[0].server_list[0]")
    assert str(c) in two.expected


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    a = machine(tmp_path, api_server=True)
    assert refusal(a, tmp_path / "." / a.name).value == "given twice"
    wrong = tmp_path / "wrong.json"
    wrong.write_text(a.read_text().replace('"server_count": "1"', '"server_count": "2"'))
    assert refusal(a, wrong).file == str(wrong)


# ---- other programs' fields in rank tables are kept, merged and shown, and never refused


SUPER_POD = "super_pod_list"


def made(folder: Path, host: str, api_server: bool, **top: Any) -> Path:
    """Writes a machine's tables with the additional fields of Ascend's tools; returns the global table's path."""
    folder.mkdir(exist_ok=True)
    generated = generate(
        prefill=[[0]], decode=[[1]], api_server=api_server, server_ip=host, device_kind="cpu", device_ips={}
    )
    path, *locals_ = write(generated, folder)
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": host}]}]
    edit(path, lambda value: value.update({SUPER_POD: pods, **top}))
    edit(path, lambda value: value["server_group_list"][1].update(deploy_server=host))
    for each in (path, *locals_):
        edit(each, lambda value: [server.update(host_nic_ip="reserve") for server in servers(value)])
        edit(each, lambda value: [d.update(npu="910B") for server in servers(value) for d in server.get("device", [])])
    return path


def edit(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def servers(value: dict[str, Any]) -> list[dict[str, Any]]:
    groups = value.get("server_group_list", [value])
    return [server for group in groups for server in group["server_list"]]


def test_a_table_is_written_again_as_it_was_read(tmp_path: Path) -> None:
    path = made(tmp_path, "10.0.0.1", True, anything=[1, None, {"a": 2.5}])
    table = load_global(path)
    assert table.to_dict() == json.loads(path.read_text())
    for local in tmp_path.glob("local_*"):
        assert load_local(local).to_dict() == json.loads(local.read_text())


def test_the_cluster_reads_them_and_does_not_mind_differences(tmp_path: Path) -> None:
    path = made(tmp_path, "10.0.0.1", True)
    local = tmp_path / "local_ranktable_10.0.0.1_1.json"
    edit(local, lambda value: servers(value)[0].update(host_nic_ip="another"))
    assert locate(load_global(path), load_local(local)) == ("decode", 0)
    place = find_place({"GLOBAL_RANK_TABLE_FILE_PATH": str(path), "RANK_TABLE_FILE_PATH": str(local)})
    assert place.name == "decode-0"


def test_merge_joins_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = made(tmp_path / "a", "10.0.0.1", True, deploy_server="10.0.0.1", build="7", empty=None)
    b = made(tmp_path / "b", "10.0.0.2", False, deploy_server="10.0.0.2", build="7", empty=None, only_b={"x": "y"})
    argv = ["merge", "--global-ranktable-list", str(a), str(b), "--save-dir", str(tmp_path)]
    assert cli.main(argv) == 0
    merged = json.loads((tmp_path / "global_ranktable_merge.json").read_text())
    assert merged[SUPER_POD] == [
        {"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.1"}, {"server_id": "10.0.0.2"}]}
    ]
    assert (merged["deploy_server"], merged["build"], merged["empty"]) == ("10.0.0.1", "7", None)
    assert merged["only_b"] == {"x": "y"}
    assert all(server["host_nic_ip"] == "reserve" for server in servers(merged))
    assert all(device["npu"] == "910B" for server in servers(merged) for device in server.get("device", []))
    assert capsys.readouterr().err.splitlines() == [
        f"note: {b}: deploy_server: differs from the value of {a}, which is kept",  # the prefill group's field
        f"note: {b}: deploy_server: differs from the value of {a}, which is kept",
    ]


def test_super_pods_with_other_ids_stay_apart(tmp_path: Path) -> None:
    pods = [[{"super_pod_id": str(at), "server_list": []}] for at in (0, 1)]
    a = made(tmp_path / "a", "10.0.0.1", True, **{SUPER_POD: pods[0]})
    b = made(tmp_path / "b", "10.0.0.2", False, **{SUPER_POD: pods[1]})
    assert cli.main(["merge", "--global-ranktable-list", str(a), str(b), "--save-dir", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "global_ranktable_merge.json").read_text())[SUPER_POD] == [*pods[0], *pods[1]]


def test_show_and_check_name_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, "10.0.0.1", True)
    path.chmod(0o600)
    assert cli.main(["show", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert f'{SUPER_POD} = [{{"super_pod_id": "0", "server_list": [{{"server_id": "10.0.0.1"}}]}}]' in shown
    assert 'server_group_list[1].server_list[0].host_nic_ip = "reserve"' in shown
    assert 'server_group_list[2].server_list[0].device[0].npu = "910B"' in shown
    assert cli.main(["check", str(path)]) == 0
    note = capsys.readouterr().err
    assert note.startswith(f"note: fields of other programs, which have no meaning here: {SUPER_POD}, ")
    assert note.count("\n") == 1
