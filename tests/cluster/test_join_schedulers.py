"""Two schedulers with a Lease object, and workers without a rank table; the owner dies, and the API server goes away.

The API server is tests/support/lease_server.py over HTTPS; everything else is production code. Each test continues from
the state that the previous one left.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.cluster.processes.launcher import Member
from pd_cluster.cluster.processes.port_reservations import free_ports
from ranktable_tools.cluster_keys import write_keys
from ranktable_tools.table_files import Access
from tests.cluster.test_join import NUM_TOKENS, Checkpoints, Joined
from tests.support.certificates import make_certificate
from tests.support.engines import assert_same, random_prompt
from tests.support.lease_server import LeaseServer, make_account, serving

pytestmark = pytest.mark.slow

NAMES = ("scheduler-0", "scheduler-1")
OWNS = re.compile(r"^pd_cluster:owns_membership\{.*\} 1\.0$", re.MULTILINE)
LEASE_S = 6.0
PATIENCE_S = 30.0
IN_A_POD = """
import sys
from pathlib import Path
from pd_cluster.cluster.leases import lease_kubernetes
lease_kubernetes.SERVICE_ACCOUNT = Path(sys.argv.pop(1))
from pd_cluster.commands.cli import main
main()
"""


class JoinedSchedulers(Joined):
    """A cluster with the service account's folder and the API server's port as in pods."""

    account: Path
    api_port: int

    def plan(self) -> list[Member]:
        self.secret, key, token = write_keys(self.folder, Access())
        self.join_ports = free_ports(len(NAMES))
        self.join_port, self.dead_port = self.join_ports[0], self.join_ports[1]
        self.token = token.read_text().strip()
        files = [f"--scheduler-key-file={key}", f"--admin-token-file={token}"]
        lease = ["--scheduler-lease=kubernetes:pd/pd-schedulers", f"--lease-duration={LEASE_S:g}"]
        made = []
        for at, name in enumerate(NAMES):
            own = [f"--scheduler-index={at}", f"--join-port={self.join_ports[at]}"]
            member = self.member(name, "scheduler", self.launch.port + 2 * at, *files, *lease, *own)
            member.command[1:3] = ["-c", IN_A_POD, str(self.account)]
            where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT_HTTPS": str(self.api_port)}
            member.env.update(where)
            made.append(member)
        return [*made, self.worker("prefill"), self.worker("decode")]

    def worker(self, role: str, name: str = "", *more: str) -> Member:
        (port,) = free_ports(1)
        name = name or f"{role}-at-{port}"
        where = ",".join(f"127.0.0.1:{each}" for each in self.join_ports)
        return self.member(name, role, port, f"--join={where}", f"--instance-name={name}", *more)

    @property
    def workers(self) -> list[str]:
        return sorted(name for name in self.members if name not in NAMES)

    def look_at(self, name: str) -> None:
        port = self.members[name].port
        self.url, self.admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"

    def owner(self) -> str:
        """Returns the scheduler that reports that it owns membership; "" if none does."""
        for name in NAMES:
            if self.processes[name].poll() is None:
                self.look_at(name)
                with suppress(httpx.HTTPError):
                    if OWNS.search(self.client.get(f"{self.url}/metrics").text):
                        return name
        return ""

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def await_owner(self, *among: str) -> str:
        self.wait_until("one owns membership", lambda: self.owner() in among, PATIENCE_S)
        return self.owner()


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=512)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LeaseServer, ExitStack, Any]]:
    folder = tmp_path_factory.mktemp("api")
    certificate = make_certificate(folder, "cluster")
    leases = LeaseServer()
    leases.rights["pod"] = {"get", "create", "update"}
    make_account(folder / "account", certificate, "pod")
    (port,) = free_ports(1)
    with ExitStack() as stack:
        stack.enter_context(serving(leases, certificate, port))
        JoinedSchedulers.account, JoinedSchedulers.api_port = folder / "account", port
        yield leases, stack, lambda: stack.enter_context(serving(leases, certificate, port))


@pytest.fixture(scope="module")
def cluster(api: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedSchedulers]:
    folder = tmp_path_factory.mktemp("join")
    flags = ["--num-blocks=128", "--connect-timeout=2"]
    with JoinedSchedulers(folder, model, arguments=flags, num_schedulers=len(NAMES)) as running:
        yield running


def serves(cluster: JoinedSchedulers, model: Path, seed: int) -> None:
    """Asserts that every live scheduler has all workers and answers exactly."""
    for at, name in enumerate(NAMES):
        if cluster.processes[name].poll() is None:
            cluster.look_at(name)
            cluster.await_whole()
            prompt = random_prompt(random.Random(seed + 100 * at), 40)
            assert_same(model, prompt, cluster.complete(prompt, NUM_TOKENS), NUM_TOKENS)
            cluster.assert_home()


def test_both_schedulers_know_the_workers_that_one_has_admitted(cluster: JoinedSchedulers, model: Path) -> None:
    owner = cluster.await_owner(*NAMES)
    serves(cluster, model, 1)
    follower = next(name for name in NAMES if name != owner)
    cluster.look_at(follower)
    refused = cluster.client.post(
        f"{cluster.admin_url}/instances/{cluster.named('decode')}/drain", json={}, headers=cluster.auth
    )
    assert refused.status_code == 409
    assert f"{owner} does, at http://127.0.0.1:" in refused.text


def test_the_owner_is_killed_and_workers_register_with_the_next_one(cluster: JoinedSchedulers, model: Path) -> None:
    lives = {each["instance_id"]: each["epoch"] for each in cluster.instances()}
    dead = cluster.await_owner(*NAMES)
    other = next(name for name in NAMES if name != dead)
    cluster.kill(dead)
    cluster.await_exit(dead)
    cluster.look_at(other)
    prompt = random_prompt(random.Random(7), 40)
    assert_same(model, prompt, cluster.complete(prompt, NUM_TOKENS), NUM_TOKENS)  # before any scheduler owns membership
    assert cluster.await_owner(other) == other
    cluster.add(cluster.worker("decode", "decode.new"))
    serves(cluster, model, 2)
    for name in lives:
        port = cluster.join_ports[NAMES.index(other)]
        cluster.wait_until(
            f"{name} registers there",
            lambda name=name, port=port: (  # type: ignore[misc]
                f"registered with the scheduler at 127.0.0.1:{port}" in cluster.log_file(name).read_text()
            ),
            PATIENCE_S,
        )
    cluster.look_at(other)
    assert {each["instance_id"]: each["epoch"] for each in cluster.instances() if each["instance_id"] in lives} == lives
    cluster.start_member(dead)
    cluster.wait_until(
        "it follows", lambda: cluster.processes[dead].poll() is None and _is_up(cluster, dead), PATIENCE_S
    )
    serves(cluster, model, 3)
    assert cluster.await_owner(*NAMES) == other


def _is_up(cluster: JoinedSchedulers, name: str) -> bool:
    cluster.look_at(name)
    try:
        return cluster.is_whole()
    except httpx.HTTPError:
        return False


def test_a_worker_is_forgotten_by_both(cluster: JoinedSchedulers, model: Path) -> None:
    cluster.kill("decode.new")
    cluster.await_exit("decode.new")
    cluster.forget("decode.new")
    serves(cluster, model, 4)


def test_while_the_api_server_is_gone_all_serve_and_then_one_owns_membership(
    cluster: JoinedSchedulers, model: Path, api: Any
) -> None:
    _, stack, come_back = api
    stack.close()
    cluster.wait_until("nobody owns membership", lambda: cluster.owner() == "", PATIENCE_S)
    for name in NAMES:
        cluster.look_at(name)
        prompt = random_prompt(random.Random(11), 40)
        assert_same(model, prompt, cluster.complete(prompt, NUM_TOKENS), NUM_TOKENS)
    come_back()
    cluster.await_owner(*NAMES)
    cluster.add(cluster.worker("decode", "decode.late"))
    serves(cluster, model, 5)


def test_at_sigterm_the_next_one_need_not_wait(cluster: JoinedSchedulers, model: Path, api: Any) -> None:
    leases = api[0]
    leaving = cluster.await_owner(*NAMES)
    other = next(name for name in NAMES if name != leaving)
    cluster.kill(leaving, signal.SIGTERM)
    assert cluster.await_exit(leaving) == 0
    cluster.await_owner(other)
    assert leases.object("pd", "pd-schedulers")["spec"]["holderIdentity"].startswith(f"{other}@")
    serves(cluster, model, 6)
