"""Who am I: every fault of the environment is one line that names the variable or the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pd_cluster.cluster.place import (
    Place,
    admin_token,
    find_place,
    node_ports,
    read_admin_token,
    secret_of,
    use_openai,
)
from pd_cluster.errors import ConfigError
from ranktable_tools import generate, merge, write

Env = dict[str, str]


def tables(folder: Path, num_prefill: int = 1, num_decode: int = 1, server_ip: str = "10.0.0.18") -> list[Path]:
    """The global table, the local ones in the order of NODE_PORTS, the scheduler's."""
    slots = [[slot] for slot in range(num_prefill + num_decode)]
    generated = generate(
        prefill=slots[:num_prefill],
        decode=slots[num_prefill:],
        api_server=True,
        server_ip=server_ip,
        device_kind="cpu",
    )
    return write(generated, folder)


def env_of(table: Path, local: Path, **more: str) -> Env:
    return {"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local), **more}


def fault(env: Env, secret_file: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        find_place(env, secret_file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_everyone_finds_themselves(tmp_path: Path) -> None:
    table, *local_tables = tables(tmp_path, num_prefill=2, num_decode=2)
    places = [find_place(env_of(table, local)) for local in local_tables]
    assert [place.name for place in places] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "scheduler"]
    for place in places:
        assert place.names == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        assert place.hosts == dict.fromkeys(place.names, "10.0.0.18")
        assert place.bind_address == "10.0.0.18"
        assert place.num_local_ranks == 4
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
    assert place.num_local_ranks == (1 if spans else 2)


@pytest.mark.parametrize("name", ["GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"])
@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_variable(tmp_path: Path, name: str, value: str | None) -> None:
    table, prefill, *_ = tables(tmp_path)
    env = env_of(table, prefill)
    del env[name]
    if value is not None:
        env[name] = value
    assert fault(env).startswith(f"{name} is not set")


@pytest.mark.parametrize("name", ["GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"])
@pytest.mark.parametrize("wrong", ["missing.json", ""], ids=["no such file", "a folder"])
def test_a_missing_file(tmp_path: Path, name: str, wrong: str) -> None:
    table, prefill, *_ = tables(tmp_path)
    path = str(tmp_path / wrong)
    assert fault({**env_of(table, prefill), name: path}) == f"{name}={path}: no such file"


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


@pytest.mark.parametrize("which", [0, 1], ids=["global", "local"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": "1.0"}', "\x00"])
def test_an_unreadable_table_is_named(tmp_path: Path, which: int, content: str) -> None:
    files = tables(tmp_path)
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not set"),
        ("", "is not set"),
        (" ", "is not set"),
        ("8088", "1 ports"),
        ("8088,8089,8090", "3 ports"),
        ("8088,http", "http"),
        ("8088;8089", "8088;8089"),
        ("8088,", "a port from 1 to 65535"),
        ("8088,0", "a port from 1 to 65535"),
        ("8088,65536", "65536"),
        ("8088,-1", "-1"),
        ("8088,8088", "8088"),
        ("8088,８０８９", "a port from 1 to 65535"),
    ],
)
def test_wrong_ports(place: Place, text: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        node_ports({} if text is None else {"NODE_PORTS": text}, place)
    message = str(caught.value)
    assert message.startswith("NODE_PORTS")
    assert said in message
    assert "\n" not in message


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
    with pytest.raises(ConfigError, match="it is no text"):
        node_ports(env, place)


def test_which_api() -> None:
    assert [use_openai(env) for env in ({}, {"USE_OPENAI": "1"}, {"USE_OPENAI": "0"})] == [True, True, False]
    for value in ("2", "", "true", "-1", "00"):
        with pytest.raises(ConfigError, match=r"^USE_OPENAI="):
            use_openai({"USE_OPENAI": value})


# ---- the secret


def test_everyone_derives_the_same_secret_from_the_same_bytes(tmp_path: Path) -> None:
    table, *local_tables = tables(tmp_path)
    copy = tmp_path / "copy.json"
    copy.write_bytes(table.read_bytes())
    places = [find_place(env_of(path, local)) for path in (table, copy) for local in local_tables]
    assert len({place.secret for place in places}) == len({place.cluster_tag for place in places}) == 1
    assert all(place.secret_is_derived for place in places)
    copy.write_bytes(table.read_bytes() + b"\n")
    other = find_place(env_of(copy, local_tables[0]))
    assert other.secret != places[0].secret
    assert other.cluster_tag != places[0].cluster_tag


def test_a_secret_file_wins(tmp_path: Path) -> None:
    table, prefill, *_ = tables(tmp_path)
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    place = find_place(env_of(table, prefill), str(file))
    assert (place.secret, place.secret_is_derived) == (b"0123456789abcdef", False)
    assert "0123456789abcdef" not in place.cluster_tag


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "No such file"),
        (b"0123456789abcdef", 0o644, "others can read it; chmod 600"),
        (b"0123456789abcdef", 0o640, "others can read it; chmod 600"),
        (b"0123456789abcde \n", 0o600, "at least 16 bytes"),
        (b"", 0o600, "at least 16 bytes"),
    ],
)
def test_a_bad_secret_file(tmp_path: Path, content: bytes | None, mode: int, said: str) -> None:
    table, prefill, *_ = tables(tmp_path)
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
        os.chmod(file, mode)
    message = fault(env_of(table, prefill), str(file))
    assert message.startswith(f"--secret-file {file}: ")
    assert said in message


# ---- the admin token


def test_the_token_follows_from_the_secret_and_does_not_tell_it(tmp_path: Path) -> None:
    table, *local_tables = tables(tmp_path)
    place = find_place(env_of(table, local_tables[-1]))
    assert secret_of(env_of(table, local_tables[-1]), None) == place.secret
    token = admin_token(place.secret)
    assert token == admin_token(place.secret) != admin_token(place.secret + b"x")
    assert len(token) == 64
    assert place.cluster_tag not in token
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    assert secret_of({}, str(file)) == b"0123456789abcdef"
    with pytest.raises(ConfigError, match="GLOBAL_RANK_TABLE_FILE_PATH is not set"):
        secret_of({}, None)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "No such file"),
        (b"0123456789abcdef", 0o644, "others can read it; chmod 600"),
        (b"0123456789", 0o600, "at least 16 bytes"),
        (b"0123456789 abcdef", 0o600, "without spaces"),
        ("0123456789abcdefü".encode(), 0o600, "without spaces"),
    ],
)
def test_a_bad_token_file(tmp_path: Path, content: bytes | None, mode: int, said: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
        os.chmod(file, mode)
    with pytest.raises(ConfigError, match=said) as caught:
        read_admin_token(str(file))
    assert str(caught.value).startswith(f"--admin-token-file {file}: ")


def test_a_good_token_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert read_admin_token(str(file)) == "0123456789abcdef"
