"""A running cluster changes under a steady stream of requests: none is lost, and no token changes.

All tests share a cluster of two prefill and two decode instances; its secret is in a file, so its table can grow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pd_cluster.cluster.processes.launcher import Member
from pd_cluster.cluster.processes.port_reservations import free_ports
from ranktable_tools import generate, write
from ranktable_tools.cluster_keys import ADMIN_TOKEN_FILE
from tests.support.cluster import LiveCluster
from tests.support.steady_stream import SteadyStream

pytestmark = pytest.mark.slow  # about half a minute, mostly two starts of rank processes

Checkpoints = Callable[..., Path]
ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


class Elastic(LiveCluster):
    """A cluster whose scheduler reads the workers' ports from a file."""

    def plan(self) -> list[Member]:
        members = super().plan()
        self.write_ports([member.port for member in members[:-1]])
        for member in members:
            member.env["NODE_PORTS_FILE"] = str(self.ports_file)
            del member.env["NODE_PORTS"]
        return members

    @property
    def ports_file(self) -> Path:
        return self.folder / "ports"

    def write_ports(self, ports: list[int]) -> None:
        self.ports_file.write_text(",".join(map(str, ports)))

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `pd-cluster instances …` as typed by an operator."""
        token = {"PD_CLUSTER_ADMIN_TOKEN_FILE": str(self.folder / ADMIN_TOKEN_FILE)}
        return subprocess.run(
            [sys.executable, "-m", "pd_cluster", "instances", f"--admin={self.admin_url}", *words],
            env={**os.environ, **(token if env is None else env)},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def does(self, *words: str) -> str:
        done = self.command(*words)
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def refuses(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        done = self.command(*words, env=env)
        assert (done.returncode, done.stdout) == (1, ""), done
        *progress, line = done.stderr.splitlines()
        assert not progress, progress
        return line.removeprefix("pd-cluster: ")

    def roles(self) -> dict[str, str]:
        return {each["instance_id"]: each["role"] for each in self.instances()}

    def await_whole(self) -> None:
        self.wait_until("all instances are ready and linked", self.is_whole)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two API processes"])
def cluster(
    request: pytest.FixtureRequest, checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Elastic]:
    folder = tmp_path_factory.mktemp("elastic")
    arguments = ["--num-blocks=512", f"--api-workers={request.param}"]
    with Elastic(folder, checkpoint("llama", max_position_embeddings=512), 2, 2, arguments) as running:
        yield running


@pytest.fixture(scope="module")
def stream(cluster: Elastic) -> SteadyStream:
    return SteadyStream(cluster)


def test_drain_and_undo(cluster: Elastic, stream: SteadyStream) -> None:
    with stream.running():
        for name in ("decode-0", "prefill-1"):
            assert cluster.does("drain", name) == f"{name} is drained; `drain --undo` puts it back in service"
            assert cluster.instance(name)["state"] == "drained"
            assert cluster.instance(name)["num_outstanding"] == 0
            assert cluster.does("drain", name, "--undo") == f"{name} is in service"
        cluster.does("drain", "decode-1", "--timeout=0")  # its requests continue elsewhere
        cluster.does("drain", "decode-1", "--undo")
    cluster.assert_home()


def test_roles_there_and_back(cluster: Elastic, stream: SteadyStream) -> None:
    epochs = {each["instance_id"]: each["epoch"] for each in cluster.instances()}
    with stream.running():
        assert cluster.does("role", "prefill-1", "decode") == "prefill-1 is decode"
        cluster.await_whole()
        assert cluster.does("role", "decode-0", "prefill") == "decode-0 is prefill"
        assert cluster.roles() == {**ROLES, "prefill-1": "decode", "decode-0": "prefill"}
        cluster.await_whole()
        before = {each["instance_id"]: each["kv_sent_nbytes"] for each in cluster.instances()}
        cluster.wait_until(
            "the new prefill instance hands over",
            lambda: cluster.instance("decode-0")["kv_sent_nbytes"] > before["decode-0"],
        )
        cluster.does("role", "decode-0", "decode", "--timeout=0.1")
        cluster.does("role", "prefill-1", "prefill", "--timeout=0.1")
        cluster.await_whole()
    cluster.assert_home()
    assert cluster.roles() == ROLES
    assert epochs == {each["instance_id"]: each["epoch"] for each in cluster.instances()}, "no process may be restarted"


def test_leave_and_come_back(cluster: Elastic, stream: SteadyStream) -> None:
    port = cluster.instance("prefill-0")["port"]
    with stream.running():
        assert cluster.does("remove", "prefill-0") == "prefill-0 has left; you can end its process now"
        assert list(cluster.roles()) == ["prefill-1", "decode-0", "decode-1"]
        assert cluster.does("add", "prefill-0", f"--port={port}") == "prefill-0 is here"
        assert list(cluster.roles()) == list(ROLES)
        cluster.await_whole()
    cluster.assert_home()


def test_what_is_refused(cluster: Elastic) -> None:
    assert "refuses this token" in cluster.refuses("drain", "decode-0", env={})
    moved = cluster.refuses("drain", "decode-0", "--secret-file=cluster.secret")
    assert moved.startswith("--secret-file: the admin token is a file of its own; give --admin-token-file FILE")
    assert cluster.refuses("drain", "decode-7").endswith("known are prefill-0, prefill-1, decode-0, decode-1")
    assert cluster.refuses("add", "prefill-0", "--port=1").startswith("prefill-0 already exists, at port ")
    assert "has no prefill-2; it has prefill-0" in cluster.refuses("add", "prefill-2", "--port=1")
    cluster.does("drain", "decode-0")
    assert cluster.refuses("role", "decode-1", "prefill").startswith("decode-1 is the last decode instance")
    cluster.does("drain", "decode-0", "--undo")
    assert all(each["state"] == "ready" for each in cluster.instances())


def grown(cluster: Elastic) -> Member:
    """Adds a third prefill instance to the tables; returns its process, not started yet."""
    generated = generate(
        prefill=[[0], [1], [4]], decode=[[2], [3]], api_server=True, server_ip="127.0.0.1", device_kind="cpu"
    )
    write(generated, cluster.folder)
    like = cluster.members["prefill-1"]
    (port,) = free_ports(1)
    command = [f"--port={port}" if word.startswith("--port=") else word for word in like.command]
    table = str(cluster.folder / list(generated.locals)[2])
    return Member("prefill-2", command, {**like.env, "RANK_TABLE_FILE_PATH": table}, port)


def test_a_new_worker_joins_and_leaves_with_its_entry(cluster: Elastic, stream: SteadyStream) -> None:
    scheduler = cluster.processes["scheduler"]
    table = Path(cluster.members["scheduler"].env["GLOBAL_RANK_TABLE_FILE_PATH"])
    before = table.read_bytes()
    member = cluster.members["prefill-2"] = grown(cluster)
    cluster.start_member("prefill-2")
    with stream.running():
        assert cluster.does("add", "prefill-2", f"--port={member.port}") == "prefill-2 is here"
        cluster.await_whole()
        cluster.wait_until("it hands over", lambda: cluster.instance("prefill-2")["kv_sent_nbytes"] > 0)
        table.write_bytes(before)
        scheduler.send_signal(signal.SIGHUP)
        cluster.wait_until("it has left", lambda: list(cluster.roles()) == list(ROLES))
        assert cluster.processes["prefill-2"].poll() is None, "its process must be left to its operator"
        grown(cluster)
        names = ("prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1")
        cluster.write_ports([cluster.members[name].port for name in names])
        scheduler.send_signal(signal.SIGHUP)
        cluster.wait_until("it is back", lambda: cluster.roles().get("prefill-2") == "prefill")
        cluster.await_whole()
        cluster.does("remove", "prefill-2")
        table.write_bytes(before)
        cluster.write_ports([cluster.members[name].port for name in ROLES])
        scheduler.send_signal(signal.SIGHUP)
    cluster.kill("prefill-2", signal.SIGTERM)
    assert cluster.await_exit("prefill-2") == 0
    del cluster.members["prefill-2"], cluster.processes["prefill-2"]
    cluster.assert_home()


def test_a_faulty_table_changes_nothing(cluster: Elastic) -> None:
    table = Path(cluster.members["scheduler"].env["GLOBAL_RANK_TABLE_FILE_PATH"])
    before = table.read_bytes()
    table.write_text("{")
    try:
        assert cluster.refuses("add", "prefill-2", "--port=1").endswith("; nothing has changed")
        cluster.processes["scheduler"].send_signal(signal.SIGHUP)
        cluster.wait_until(
            "it says so", lambda: "SIGHUP: " in cluster.log_file("scheduler").read_text().splitlines()[-1]
        )
    finally:
        table.write_bytes(before)
    assert cluster.is_whole()


def test_a_worker_that_starts_again_keeps_the_role_that_it_was_given(cluster: Elastic, stream: SteadyStream) -> None:
    cluster.does("role", "prefill-1", "decode")
    cluster.kill("prefill-1")
    cluster.await_exit("prefill-1")
    cluster.start_member("prefill-1")
    cluster.await_whole()
    assert cluster.roles() == {**ROLES, "prefill-1": "decode"}
    with stream.running():
        before = cluster.instance("prefill-1")["kv_received_nbytes"]
        cluster.wait_until("it decodes", lambda: cluster.instance("prefill-1")["kv_received_nbytes"] > before)


def test_a_scheduler_that_starts_again_knows_the_tables_roles(cluster: Elastic, stream: SteadyStream) -> None:
    assert cluster.roles()["prefill-1"] == "decode", "the previous test must leave this role"
    cluster.kill("scheduler")
    cluster.await_exit("scheduler")
    cluster.start_member("scheduler")
    cluster.await_whole()
    assert cluster.roles() == ROLES
    with stream.running():
        before = cluster.instance("prefill-1")["kv_sent_nbytes"]
        cluster.wait_until("it prefills", lambda: cluster.instance("prefill-1")["kv_sent_nbytes"] > before)
    cluster.assert_home()
