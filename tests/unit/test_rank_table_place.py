"""A process's place in the rank tables: each environment fault gives one line naming the variable or file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_cluster.cluster.members.rank_table_place import Place, check_ports, find_place, node_ports, use_openai
from pd_cluster.errors import ConfigError
from ranktable_tools import generate, merge, write
from ranktable_tools.ports import GivenPorts, scheduler_ports
from tests.support.faults import fault as fault_of

Env = dict[str, str]


def tables(folder: Path, num_prefill: int = 1, num_decode: int = 1, server_ip: str = "10.0.0.18") -> list[Path]:
    """Returns the files of the global table, the local ones in the order of NODE_PORTS, and the scheduler's."""
    slots = [[slot] for slot in range(num_prefill + num_decode)]
    prefill, decode = slots[:num_prefill], slots[num_prefill:]
    generated = generate(prefill=prefill, decode=decode, api_server=True, server_ip=server_ip, device_kind="cpu")
    return write(generated, folder)


def env_of(table: Path, local: Path, **more: str) -> Env:
    return {"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local), **more}


def fault(env: Env) -> str:
    return fault_of(lambda: find_place(env))


def test_everyone_finds_themselves(tmp_path: Path) -> None:
    table, *local_tables = tables(tmp_path, num_prefill=2, num_decode=2)
    places = [find_place(env_of(table, local)) for local in local_tables]
    assert [place.name for place in places] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "scheduler"]
    for place in places:
        assert place.names == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        assert place.hosts == dict.fromkeys(place.names, "10.0.0.18")
        assert place.bind_address == "10.0.0.18"
        assert place.num_local_ranks == 4
        if place.role != "scheduler":
            assert place.paired_tp_sizes("auto") == ()  # through host memory or IPC
            assert place.paired_tp_sizes("dist") == (1, 1)
            assert place.paired_tp_sizes("dist", 1) == (1, 1), "one pair is open, and one may be closing"
        assert not place.spans_hosts


def test_localhost_binds_to_an_address(tmp_path: Path) -> None:
    table, prefill, *_ = tables(tmp_path, server_ip="127.0.0.1")
    for file in (table, prefill):
        file.write_text(file.read_text().replace("127.0.0.1", "localhost"))
    assert find_place(env_of(table, prefill)).bind_address == "127.0.0.1"


@pytest.mark.parametrize(("second", "spans"), [("10.0.0.19", True), ("10.0.0.18", False)])
def test_spans_hosts(tmp_path: Path, second: str, spans: bool) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    first = generate(prefill=[[0]], decode=[], api_server=True, server_ip="10.0.0.18", device_kind="cpu")
    other = generate(prefill=[], decode=[[1]], api_server=False, server_ip=second, device_kind="cpu")
    merged = tmp_path / "global.json"
    merged.write_text(merge([write(first, one)[0], write(other, two)[0]]).to_json())
    local = next(one.glob("local*host.json"))
    place = find_place(env_of(merged, local))
    assert place.spans_hosts is spans
    prefill = find_place(env_of(merged, next(one.glob("local*_0.json"))))
    assert prefill.paired_tp_sizes("auto") == ((1,) if spans else ())
    assert place.num_local_ranks == (1 if spans else 2)


@pytest.mark.parametrize("name", ["GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"])
def test_a_missing_variable(tmp_path: Path, name: str) -> None:
    table, *local_tables = tables(tmp_path)
    for local in local_tables:  # every role needs both variables
        for value in (None, "", "  "):
            env = {**env_of(table, local), name: value or ""}
            if value is None:
                del env[name]
            assert fault(env).startswith(f"{name} is not set")


def test_a_missing_file(tmp_path: Path) -> None:
    table, prefill, *_ = tables(tmp_path)
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"):
        for path in (tmp_path / "missing.json", tmp_path):
            assert fault({**env_of(table, prefill), name: str(path)}) == f"{name}={path}: no such file"


def test_the_documents_other_spelling_is_the_same_file(tmp_path: Path) -> None:
    table, prefill, *_ = tables(tmp_path)
    assert prefill.name.startswith("local_ranktable_")
    spelled = prefill.with_name(prefill.name.replace("ranktable", "rank_table"))
    assert not spelled.exists()
    assert find_place(env_of(table, spelled)).name == "prefill-0"


def test_a_local_table_of_another_cluster(tmp_path: Path) -> None:
    table = tables(tmp_path / "here")[0]
    foreign = tables(tmp_path / "there", server_ip="10.0.0.99")[1]
    message = fault(env_of(table, foreign))
    assert str(foreign) in message
    assert str(table) in message


def test_an_unreadable_table_is_named(tmp_path: Path) -> None:
    for which in (0, 1):
        files = tables(tmp_path)
        for content in ("", "{", "[]", '{"version": "1.0"}'):
            files[which].write_text(content)
            assert str(files[which]) in fault(env_of(files[0], files[1]))


def test_a_table_with_a_doubled_device(tmp_path: Path) -> None:
    table, prefill, *_ = tables(tmp_path)
    table.write_text(table.read_text().replace('"device_id": "1"', '"device_id": "0"'))
    message = fault(env_of(table, prefill))
    assert str(table) in message
    assert "device_id" in message


# ---- NODE_PORTS and USE_OPENAI


@pytest.fixture
def place(tmp_path: Path) -> Place:
    table, *local_tables = tables(tmp_path)
    return find_place(env_of(table, local_tables[-1]))


def test_ports_in_the_tables_order(place: Place) -> None:
    assert node_ports({"NODE_PORTS": " 8088, 8089 "}, place) == [8088, 8089]


def test_wrong_ports(place: Place) -> None:
    for text, said in (
        *((nothing, "is not set") for nothing in (None, "", " ")),
        *(("8088", "1 ports"), ("8088,8089,8090", "3 ports"), ("8088,http", "http"), ("8088;8089", "8088;8089")),
        *((wrong, "a port from 1 to 65535") for wrong in ("8088,", "8088,0", "8088,65536", "8088,-1", "8088,８０８９")),
        ("8088,8088", "8088"),
    ):
        with pytest.raises(ConfigError, match=r"\ANODE_PORTS.*\Z") as caught:  # one line
            node_ports({} if text is None else {"NODE_PORTS": text}, place)
        assert said in str(caught.value)


def test_ports_from_a_file(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "ports"
    env = {"NODE_PORTS_FILE": str(file), "NODE_PORTS": "1,2"}
    with pytest.raises(ConfigError, match=r"^NODE_PORTS_FILE=.*ports: No such file"):
        node_ports(env, place)
    file.write_text("8088,8089\n")
    assert node_ports(env, place) == [8088, 8089]
    file.write_text("8088\n")
    with pytest.raises(ConfigError, match="1 ports"):
        node_ports(env, place)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not text"):
        node_ports(env, place)


def test_which_api() -> None:
    assert [use_openai(env) for env in ({}, {"USE_OPENAI": "1"}, {"USE_OPENAI": "0"})] == [True, True, False]
    for value in ("2", "", "true", "-1", "00"):
        with pytest.raises(ConfigError, match=r"^USE_OPENAI="):
            use_openai({"USE_OPENAI": value})


def test_a_start_refuses_the_ports_that_check_refuses(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"^NODE_PORTS: \[1\]: found 9001, .* \(--admin-port 9001 does\)$"):
        node_ports({"NODE_PORTS": "8088,9001"}, place, GivenPorts(scheduler_ports(9000)))
    with pytest.raises(ConfigError, match=r"^scheduler: --join-port: found 9000, expected another port than --port$"):
        check_ports(place, GivenPorts(scheduler_ports(9000, None, 9000)))
    with pytest.raises(ConfigError, match=r"^--kv-port-range: ports: found '8080-8090', .* \(--port is 8088\)$"):
        check_ports(place, GivenPorts(worker={"--port": 8088}, kv_range=(8080, 8090)))
    check_ports(place, GivenPorts(worker={"--port": 8088}, kv_range=(7000, 7010)))
