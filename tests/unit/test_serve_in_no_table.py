"""`pd-cluster serve --role` without rank tables; every contradiction gives a one-line error."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.cluster.members.cluster_credentials import admin_token_of, credentials_of
from pd_cluster.cluster.members.rank_table_place import Place, address_towards, place_alone
from pd_cluster.commands.serve_start import start_of
from pd_cluster.errors import ConfigError
from pd_cluster.settings.process_settings import JoinSettings, KeyFiles, default_name, name_problem
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.settings.setting import declared
from ranktable_tools.cluster_keys import write_keys
from ranktable_tools.public_keys import public_key
from ranktable_tools.table_files import Access

JOIN = "127.0.0.1:9002"


def place(env: dict[str, str] | None = None, **given: Any) -> Place:
    return start_of(ServeOptions(model="m", **given), env or {}).place


def fault(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "addresses"),
    [
        ("s:1", (("s", 1),)),
        ("scheduler.pd.svc:9002, 10.0.0.1:9003", (("scheduler.pd.svc", 9002), ("10.0.0.1", 9003))),
        ("[fd00::1]:65535", (("fd00::1", 65535),)),
    ],
)
def test_addresses(written: str, addresses: tuple[tuple[str, int], ...]) -> None:
    found = ServeOptions(join=written).read(JoinSettings).addresses
    assert found == addresses
    again = ServeOptions(join=declared(JoinSettings)[1].write(found)).read(JoinSettings).addresses
    assert again == found


def test_addresses_that_are_none() -> None:
    for written in ("", "s", ":1", "s:", "s:0", "s:65536", "s:x", "fd00::1:9", "a b:1", "s:1,", "s:²"):
        told = fault(partial(ServeOptions(join=written).read, JoinSettings))
        assert "expected HOST:PORT" in told, written


def test_places() -> None:
    found = place(role="decode", join=JOIN, instance_name="d.1", tensor_parallel_size=2)
    assert (found.name, found.role, found.bind_address, found.num_local_ranks) == ("d.1", "decode", "127.0.0.1", 2)
    assert [device.device_id for device in found.server.device] == ["0", "1"]
    found = place(role="scheduler", join_port=9002)
    assert (found.name, found.names, found.table.file) == ("scheduler", [], "")


def test_a_worker_s_own_name_tells_hosts_and_ports_apart() -> None:
    assert place(role="prefill", join=JOIN, port=8123).name == default_name("prefill", socket.gethostname(), 8123)
    assert default_name("decode", "a host!", 1) == "decode-a-host--1"
    for hostname in ("0", "x" * 300, "a.b"):
        assert name_problem(default_name("decode", hostname, 8000)) == ""


def test_a_worker_s_own_address() -> None:
    assert place(role="prefill", join=JOIN, advertise_host="localhost").bind_address == "127.0.0.1"
    assert address_towards([("unknown.invalid", 1), ("localhost", 1)], 0.0) == "127.0.0.1"
    told = fault(lambda: address_towards([("unknown.invalid", 1)], 0.0))
    assert told.startswith("--join: host 'unknown.invalid' cannot be resolved")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"role": "decode"}, "--role decode: give --join HOST:PORT"),
        ({"role": "encode", "join": JOIN, "tensor_parallel_size": 2}, "--tensor-parallel-size 2: an encoder has"),
        ({"role": "worker"}, "--role 'worker': expected scheduler, prefill, decode or encode"),
        ({"role": "scheduler"}, "--role scheduler: workers need a port to register at; give --join-port PORT"),
        ({"role": "scheduler", "join_port": 1, "join": JOIN}, "--join: only a worker registers"),
        ({"instance_name": "d"}, "--instance-name: only a worker registers; give --role prefill, decode or encode"),
        ({"advertise_host": "h"}, "--advertise-host: only a worker registers"),
        ({"role": "decode", "join": JOIN, "instance_name": "decode-7"}, "--instance-name 'decode-7': names of this"),
        ({"role": "decode", "join": JOIN, "instance_name": "a b"}, "--instance-name 'a b': expected up to 128"),
        ({"role": "decode", "join": JOIN, "advertise_host": "x.invalid"}, "--advertise-host 'x.invalid' cannot be"),
        ({"join_port": 0}, "--join-port 0: must be in 1 to 65535"),
    ],
)
def test_flags_that_contradict_each_other(given: dict[str, Any], told: str) -> None:
    assert fault(lambda: place(**given)).startswith(told)


def test_a_role_and_rank_tables_contradict_each_other() -> None:
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS", "NODE_PORTS_FILE"):
        told = fault(partial(place, {name: "x"}, role="decode", join=JOIN))
        assert told == f"{name} is set, and --role decode reads no rank tables; drop one of them"


def test_credentials_from_named_files(tmp_path: Path) -> None:
    secret, key, token = map(str, write_keys(tmp_path, Access()))
    scheduler, worker = place_alone("scheduler", "0.0.0.0"), place_alone("decode", "127.0.0.1", "d", 1)
    own = credentials_of(scheduler, KeyFiles(secret, key, token))
    theirs = credentials_of(worker, KeyFiles(secret))
    assert (own.secret, own.schedulers, own.table) == (theirs.secret, theirs.schedulers, theirs.table)
    assert own.schedulers == (public_key(own.key),)
    assert (theirs.key, theirs.table) == (b"", b"")
    assert len(admin_token_of(scheduler, KeyFiles(secret, key, token))) == 64


@pytest.mark.parametrize(
    ("role", "files", "told"),
    [
        ("decode", KeyFiles(), "--secret-file: --role decode requires it"),
        ("decode", KeyFiles(derives=True), "--derive-secret: derives the secret from a rank table"),
        ("scheduler", KeyFiles("s"), "--scheduler-key-file: --role scheduler requires it"),
        ("scheduler", KeyFiles("s", "k"), "--admin-token-file: --role scheduler requires it"),
    ],
)
def test_files_that_nothing_names(role: Any, files: KeyFiles, told: str) -> None:
    assert fault(lambda: credentials_of(place_alone(role, "127.0.0.1", "d"), files)).startswith(told)


@pytest.mark.parametrize("role", ["prefill", "scheduler"])
def test_every_role_checks_every_value(role: str) -> None:
    """All roles check all values first, so that no instance loads a model for a cluster that cannot serve."""
    for given, said in (
        ({"max_logprobs": -2}, "--max-logprobs -2: "),
        ({"api_workers": 0}, "--api-workers 0: "),
        ({"tool_call_parser": "nobody"}, "--tool-call-parser nobody: not known"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0: "),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs 2: needs --ssl-certfile"),
        ({"stream_interval": 0}, "--stream-interval 0: "),
    ):
        with pytest.raises(ConfigError, match=said):
            start_of(ServeOptions(model="m", role=role, **given), {})


def test_a_worker_needs_no_file_of_the_scheduler() -> None:
    given = {"tool_parser_plugin": "/on/another/host.py", "tool_call_parser": "own", "chat_template": "/on/another"}
    ServeOptions(model="m", **given).check()
    with pytest.raises(ConfigError, match="there is no such file"):
        ServeOptions(**given).chat()
