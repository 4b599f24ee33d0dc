"""The records by which commands find clusters started by `pd-cluster up` on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pd_cluster.client.admin_client import DEFAULT_ADMIN, DEFAULT_URL, Admin, public_url
from pd_cluster.cluster.processes.running_clusters import folder_of_records, recorded, running_clusters
from pd_cluster.errors import ConfigError

FIRST = ("http://127.0.0.1:7001", "http://127.0.0.1:7000", "/one/admin.token", "tiny-chat")
SECOND = ("http://127.0.0.1:8001", "http://127.0.0.1:8000", "/two/admin.token", "other")
OTHER_PROCESS = """
import sys
from pd_cluster.cluster.processes.running_clusters import recorded
with recorded({"XDG_RUNTIME_DIR": sys.argv[1]}, *sys.argv[2:]):
    print("here", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs another process that holds the record of SECOND until it is killed."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path), *SECOND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def found(env: dict[str, str], url: str = "", token_file: str = "") -> tuple[str, str]:
    admin = Admin.find(url, token_file, env)
    return admin.url, admin.token_file


def test_the_only_cluster_is_found_while_it_runs(env: dict[str, str]) -> None:
    """A single running cluster is found unless another place is given."""
    with recorded(env, *FIRST):
        assert found(env) == (FIRST[0], FIRST[2])
        assert found(env, url=FIRST[0] + "/") == (FIRST[0], FIRST[2])
        assert found(env, token_file=FIRST[2]) == (FIRST[0], FIRST[2])
        assert public_url(env) == FIRST[1]
        (file,) = folder_of_records(env).iterdir()
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert found(env, url="http://host:1") == ("http://host:1", "")
        assert found(env, "http://host:1", "/token") == ("http://host:1", "/token")
        assert found(env | {"GLOBAL_RANK_TABLE_FILE_PATH": "/table.json"}) == (DEFAULT_ADMIN, "")
    assert (found(env), public_url(env)) == ((DEFAULT_ADMIN, ""), DEFAULT_URL)
    assert not list(folder_of_records(env).iterdir())


def test_several_clusters_are_listed(env: dict[str, str], other: subprocess.Popen[str]) -> None:
    with recorded(env, *FIRST):
        choices = f"choose one: --admin {SECOND[0]} (other), --admin {FIRST[0]} (tiny-chat)"
        with pytest.raises(ConfigError) as caught:
            found(env)
        assert str(caught.value) == f"several clusters run here; {choices}"
        with pytest.raises(ConfigError, match=f"choose one: --url {SECOND[1]} "):
            public_url(env)
        assert found(env, url=SECOND[0]) == (SECOND[0], SECOND[2])


def test_a_killed_process_leaves_no_cluster(env: dict[str, str], other: subprocess.Popen[str]) -> None:
    (file,) = folder_of_records(env).iterdir()
    assert [each.pid for each in running_clusters(env)] == [other.pid]
    other.kill()
    other.wait()
    assert file.exists()
    assert not running_clusters(env)
    assert not file.exists()


@pytest.mark.parametrize(
    ("field", "value", "stays"), [("start_ticks", 1, False), ("boot", "another", True), ("pids", "pid:[1]", True)]
)
def test_another_process_with_the_same_pid(env: dict[str, str], field: str, value: object, stays: bool) -> None:
    """Only records of this machine and PID namespace can be known to have ended."""
    with recorded(env, *FIRST):
        (file,) = folder_of_records(env).iterdir()
        file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | {field: value}))
        assert not running_clusters(env)
        assert file.exists() == stays


def test_a_record_that_others_could_have_written_is_ignored(env: dict[str, str], tmp_path: Path) -> None:
    with recorded(env, *FIRST):
        (file,) = folder_of_records(env).iterdir()
        file.chmod(0o660)
        assert not running_clusters(env)
        file.chmod(0o600)
        assert running_clusters(env)
        file.rename(tmp_path / "real")
        file.symlink_to(tmp_path / "real")
        assert not running_clusters(env)
        file.unlink()
        os.mkfifo(file)
        assert not running_clusters(env)
