"""Writing a machine's tables, and round trips from gen through merge."""

import json
import stat
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable_tools import check, generate, load_global, load_local, locate, merge, write
from ranktable_tools.errors import RankTableError
from ranktable_tools.gen import Generated
from ranktable_tools.table_files import write_private
from tests.unit.test_ranktable_schema import document, document_local

DEVICE_IPS = {4: "10.0.0.22", 5: "10.0.0.23", 6: "29.0.0.56", 7: "29.0.0.72"}


def one_machine(**changed: object) -> Generated:
    settings = {"prefill": [[4, 5]], "decode": [[6, 7]], "api_server": True, "server_ip": "10.0.0.18"}
    return generate(**{**settings, "device_kind": "npu", "device_ips": DEVICE_IPS, **changed})  # type: ignore[arg-type]


def test_the_documents_example() -> None:
    """1p1d with two devices each, and the scheduler on the same machine."""
    generated = one_machine(server_ip="localhost")
    assert generated.global_table.to_dict() == document()
    groups = document()["server_group_list"]
    for name, group in (("45", 1), ("67", 2), ("host", 0)):
        local = generated.locals[f"local_ranktable_localhost_{name}.json"].to_dict()
        assert local == {**document_local(), "server_list": groups[group]["server_list"]}


def test_the_documents_file_names(tmp_path: Path) -> None:
    written = write(one_machine(), tmp_path / "new" / "save_dir")
    assert [path.name for path in written] == [
        "global_ranktable_10.0.0.18.json",
        "local_ranktable_10.0.0.18_45.json",
        "local_ranktable_10.0.0.18_67.json",
        "local_ranktable_10.0.0.18_host.json",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(path.name for path in written)


def test_without_a_scheduler_group_0_is_empty() -> None:
    generated = one_machine(api_server=False)
    group = generated.global_table.to_dict()["server_group_list"][0]  # type: ignore[index]
    assert group == {"group_id": "0", "server_count": "0", "server_list": []}
    assert not any("host" in name for name in generated.locals)


def names(prefill: list, decode: list) -> list[str]:
    generated = generate(prefill=prefill, decode=decode, api_server=False, server_ip="10.0.0.1", device_kind="cpu")
    return [name.removeprefix("local_ranktable_10.0.0.1_").removesuffix(".json") for name in generated.locals]


def test_names_that_could_be_confused_are_told_apart() -> None:
    assert names([[1, 12]], [[11, 2], [3, 4]]) == ["1-12", "11-2", "34"]
    assert names([[1, 2]], [[12], [3]]) == ["1-2", "12", "3"]
    assert names([[0, 1, 2, 3]], [[4]]) == ["0123", "4"]
    assert names([[8, 9, 10, 11]], [[12, 13], [14], [15]]) == ["891011", "1213", "14", "15"], (
        "ids must be joined as in the guide"
    )
    generated = one_machine(server_ip="2001:db8::5")
    assert generated.global_name == "global_ranktable_2001-db8--5.json"
    assert generated.global_table.prefill[0].server_ip == "2001:db8::5"


def test_wrong_arguments_are_named() -> None:
    for changed, field in (
        ({"decode": [[5, 6]]}, "--decode-server-list[0]"),
        ({"prefill": [[4, 4]]}, "--prefill-server-list[0]"),
        ({"prefill": [[4, 5], []]}, "--prefill-server-list[1]"),
        ({"prefill": [[-1]]}, "--prefill-server-list[0]"),
        ({"prefill": [], "decode": [], "api_server": False}, "instances"),
        ({"server_ip": "10.**.**.18"}, "--server-ip"),
        ({"device_ips": {**DEVICE_IPS, 9: "10.0.0.9"}}, "--device-ip"),
        ({"device_ips": {**DEVICE_IPS, 5: "nowhere!"}}, "--device-ip 5"),
        ({"device_ips": {**DEVICE_IPS, 5: "10.0.0.22"}}, "server_group_list[1].server_list[0].device[1].device_ip"),
    ):
        with pytest.raises(RankTableError) as caught:
            one_machine(**changed)
        assert (caught.value.file, caught.value.field) == ("gen", field)


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file in the folder's place")
    with pytest.raises(OSError, match=r"taken/global_ranktable_10\.0\.0\.18\.json: .*; user \d+ needs write access"):
        write(one_machine(), tmp_path / "taken")


def test_writing_replaces_whole_files_and_leaves_no_others(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "half\ud800")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@st.composite
def machines(draw: st.DrawFn) -> list[dict]:
    """Draws one to three machines with prefill and decode instances of any sizes, and one scheduler."""
    found: list[dict] = []
    for host in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["npu", "cpu"]))
        most = 99 if kind == "npu" else 130  # ids from 100 on are vNPUs, of which an instance has one
        ids = draw(st.lists(st.integers(0, most), min_size=2, max_size=8, unique=True))
        cuts = sorted({0, len(ids), draw(st.integers(1, len(ids) - 1)), draw(st.integers(1, len(ids) - 1))})
        instances = [ids[a:b] for a, b in pairwise(cuts)]
        num_prefill = draw(st.integers(1, len(instances) - 1))
        addresses = {i: f"29.{host}.0.{i + 1}" for i in ids} if kind == "npu" else None
        server_ip = draw(st.sampled_from([f"10.0.0.{host + 1}", f"2001:db8::{host + 1}"]))
        about = {"api_server": False, "server_ip": server_ip, "device_kind": kind, "device_ips": addresses}
        found.append({"prefill": instances[:num_prefill], "decode": instances[num_prefill:], **about})
    found[draw(st.integers(0, len(found) - 1))]["api_server"] = True
    return found


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(machines())
def test_gen_merge_load_round_trip(tmp_path_factory: pytest.TempPathFactory, settings_of_machines: list[dict]) -> None:
    folder = tmp_path_factory.mktemp("tables")
    generated = [generate(**settings) for settings in settings_of_machines]
    written = [write(one, folder) for one in generated]
    merged = merge([paths[0] for paths in written])
    final = write_private(folder / "global_ranktable_merge.json", merged.to_json())
    table = load_global(final)

    assert table == merged
    assert json.loads(final.read_text()) == merged.to_dict()
    assert [[int(d.device_id) for d in server.device] for server in table.instances] == [
        ids for role in ("prefill", "decode") for settings in settings_of_machines for ids in settings[role]
    ]
    local_paths = [path for paths in written for path in paths[1:]]
    assert len(set(local_paths)) == len(table.instances) + 1
    located = [locate(table, load_local(path)) for path in local_paths]
    assert sorted(located) == sorted(
        [("scheduler", 0)]
        + [("prefill", i) for i in range(len(table.prefill))]
        + [("decode", i) for i in range(len(table.decode))]
    )
    assert check(final, local_paths, range(8000, 8000 + len(table.instances))) == []
