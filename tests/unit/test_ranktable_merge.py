"""Several machines' global tables into one."""

from pathlib import Path

import pytest

from ranktable_tools import generate, merge, write
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


def test_two_containers_of_one_host_may_be_merged(tmp_path: Path) -> None:
    a = machine(tmp_path / "a", decode=[], api_server=True)
    b = machine(tmp_path / "b", prefill=[])
    assert len(merge([a, b]).instances) == 2


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


def test_a_device_address_on_two_hosts_is_refused(tmp_path: Path) -> None:
    ips = {0: "29.0.0.1", 1: "29.0.0.2"}
    a = machine(tmp_path, "10.0.0.1", api_server=True, device_ips=ips)
    b = machine(tmp_path, "10.0.0.2", device_ips=ips)
    assert refusal(a, b).field == "server_group_list[1].server_list[0].device[0].device_ip"


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
