"""Workers without a rank table register with a scheduler, die, return and leave; every answer equals generate().

All tests share one cluster; each continues from the state that the previous one left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pd_cluster.cluster.processes.launcher import Member
from pd_cluster.cluster.processes.port_reservations import free_ports
from ranktable_tools.cluster_keys import SECRET_FILE, read_secret, secret_text, write_keys
from ranktable_tools.table_files import Access
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, assert_same, random_prompt
from tests.support.otlp_collector import collector

Checkpoints = Callable[..., Path]
NUM_TOKENS = 24


def member_of(cluster: LiveCluster, name: str, role: str, port: int, *more: str) -> Member:
    """Returns a worker process with --role and the cluster's model."""
    flags = [f"--role={role}", "--host=127.0.0.1", f"--port={port}", f"--model={cluster.launch.model}"]
    flags += ["--served-model-name=tiny", *cluster.launch.arguments, *more]
    # With one core, as in clusters with tables, a rank can be forked from the tests' preloader.
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return Member(name, [sys.executable, "-m", "pd_cluster", "serve", *flags], env, port)


class Joined(LiveCluster):
    """A scheduler without a rank table, and two workers that join it."""

    def plan(self) -> list[Member]:
        self.secret, key, token = write_keys(self.folder, Access())
        self.join_port, self.dead_port = free_ports(2)
        files = [f"--scheduler-key-file={key}", f"--admin-token-file={token}", f"--join-port={self.join_port}"]
        scheduler = self.member("scheduler", "scheduler", self.launch.port, *files)
        return [scheduler, self.worker("prefill"), self.worker("decode")]

    def worker(self, role: str, name: str = "", *more: str) -> Member:
        """Returns a worker that joins; one without a given name first tries an address without a listener."""
        (port,) = free_ports(1)
        where = f"127.0.0.1:{self.join_port}"
        where = where if name else f"127.0.0.1:{self.dead_port},{where}"
        name = name or f"{role}-at-{port}"
        return self.member(name, role, port, f"--join={where}", f"--instance-name={name}", *more)

    def member(self, name: str, role: str, port: int, *more: str) -> Member:
        return member_of(self, name, role, port, f"--secret-file={self.secret}", *more)

    @property
    def workers(self) -> list[str]:
        """Returns the names in the scheduler's order."""
        return sorted(name for name in self.members if name != "scheduler")

    def is_whole(self) -> bool:
        """Checks the links again after the list, because a worker not yet listed would not count as missing links."""
        is_listed = super().is_whole() and [i["instance_id"] for i in self.instances()] == self.workers
        return is_listed and self._all_linked()

    def await_whole(self) -> None:
        self.wait_until(f"{self.workers} serve", self.is_whole, 90)

    def add(self, member: Member) -> None:
        self.members[member.name] = member
        self.start_member(member.name)

    def forget(self, name: str) -> None:
        """Removes a worker from those that the test waits for."""
        del self.members[name], self.processes[name]

    def named(self, role: str) -> str:
        (name,) = (name for name in self.workers if name.startswith(role))
        return name

    def refusal_of(self, member: Member) -> str:
        """Starts a worker that must exit with code 1; returns its last line."""
        self.add(member)
        assert self.await_exit(member.name) == 1, self.logs()
        self.forget(member.name)
        return self.log_file(member.name).read_text().splitlines()[-1]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=512)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    with Joined(
        tmp_path_factory.mktemp("join"), model, arguments=["--num-blocks=128", "--connect-timeout=2"]
    ) as running:
        yield running


def is_exact(cluster: Joined, model: Path, seed: int) -> None:
    """Asserts that one completion through the split equals generate(), and that nothing stays held."""
    cluster.await_whole()
    prompt = random_prompt(random.Random(seed), 40)
    before = cluster.instance(cluster.named("decode"))["kv_received_nbytes"]
    assert_same(model, prompt, cluster.complete(prompt, NUM_TOKENS), NUM_TOKENS)
    cluster.wait_until("handed over", lambda: cluster.instance(cluster.named("decode"))["kv_received_nbytes"] > before)
    cluster.assert_home()


def epochs(cluster: Joined) -> dict[str, str]:
    return {i["instance_id"]: i["epoch"] for i in cluster.instances()}


def test_two_workers_join_a_scheduler_that_had_none(cluster: Joined, model: Path) -> None:
    is_exact(cluster, model, 1)


def test_a_decode_worker_is_killed_and_another_joins(cluster: Joined, model: Path) -> None:
    lost = cluster.named("decode")
    cluster.kill(lost)
    cluster.await_exit(lost)
    cluster.forget(lost)
    cluster.wait_until("it is forgotten", lambda: list(epochs(cluster)) == cluster.workers)
    cluster.add(cluster.worker("decode"))
    is_exact(cluster, model, 2)


def test_a_worker_that_is_started_again_keeps_its_name(cluster: Joined, model: Path) -> None:
    name = cluster.named("decode")
    before = epochs(cluster)[name]
    cluster.kill(name)
    cluster.await_exit(name)
    cluster.start_member(name)
    cluster.wait_until("its next life is here", lambda: epochs(cluster).get(name, before) != before)
    is_exact(cluster, model, 3)


def test_the_scheduler_is_started_again_and_the_same_lives_register(cluster: Joined, model: Path) -> None:
    before = epochs(cluster)
    cluster.kill("scheduler")
    cluster.await_exit("scheduler")
    cluster.start_member("scheduler")
    is_exact(cluster, model, 4)
    assert epochs(cluster) == before


def another_secret(cluster: Joined, name: str, schedulers: tuple[bytes, ...]) -> str:
    file = cluster.folder / name
    file.write_text(secret_text(b"x" * 32, schedulers))
    file.chmod(0o600)
    return f"--secret-file={file}"


@pytest.mark.slow  # 25 s, because five workers start
def test_one_line_for_each_worker_that_may_not_join(cluster: Joined, model: Path, checkpoint: Checkpoints) -> None:
    before = epochs(cluster)
    pinned = read_secret(cluster.secret).schedulers
    taken = cluster.named("decode")
    where = f"pd-cluster: --join 127.0.0.1:{cluster.join_port}: "

    same_key = cluster.worker("decode", "other-secret", another_secret(cluster, "other.secret", pinned))
    assert cluster.refusal_of(same_key).startswith(f"{where}the scheduler there has a secret that differs")
    stranger = cluster.worker("decode", "other-cluster", another_secret(cluster, "other-cluster.secret", (b"k" * 32,)))
    assert cluster.refusal_of(stranger).startswith(f"{where}the other end closed the connection during the handshake")
    other_model = cluster.worker("decode", "other-model", f"--model={checkpoint('qwen2')}")
    assert "refuses this worker: it serves another model" in cluster.refusal_of(other_model)
    namesake = cluster.worker("decode", "namesake", f"--instance-name={taken}")
    assert f"--instance-name {taken}: the decode instance at 127.0.0.1:" in cluster.refusal_of(namesake)
    unreachable = cluster.refusal_of(cluster.worker("decode", "elsewhere", "--advertise-host=127.0.0.2"))
    assert "the scheduler cannot reach it: no process answers at 127.0.0.2:" in unreachable

    assert epochs(cluster) == before, "no other worker may be disturbed"
    is_exact(cluster, model, 5)


def test_a_worker_leaves_at_sigterm(cluster: Joined, model: Path) -> None:
    leaving = cluster.named("prefill")
    cluster.add(cluster.worker("prefill", "prefill-next"))
    cluster.await_whole()
    cluster.kill(leaving, signal.SIGTERM)
    assert cluster.await_exit(leaving) == 0
    cluster.forget(leaving)
    cluster.wait_until("it is forgotten", lambda: list(epochs(cluster)) == cluster.workers)
    is_exact(cluster, model, 6)


@pytest.mark.slow  # 15 s, because a second cluster starts
def test_both_kinds_in_one_cluster_with_several_api_processes(model: Path, tmp_path: Path) -> None:
    """A decode worker joins a cluster with tables, serves alone when the table's one is killed, and is removed.

    Each API process exports the traces of its own requests.
    """
    join_port, port = free_ports(2)
    with collector() as traces, both_kinds(model, tmp_path, join_port, port, traces.url) as cluster:
        trace_id = "12" * 16
        headers = {"traceparent": f"00-{trace_id}-{'34' * 8}-01"}
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body, headers=headers)
        assert answer.headers["traceparent"].startswith(f"00-{trace_id}-")
        spans = traces.awaited(trace_id, lambda spans: any(span.name == "decode" for span in spans))
        assert [span.name for span in spans][-1] == "decode"


@contextmanager
def both_kinds(model: Path, tmp_path: Path, join_port: int, port: int, url: str) -> Iterator[LiveCluster]:
    """Yields a cluster whose only decode worker is the joined one; removes that one afterwards."""
    own = {"scheduler": [f"--join-port={join_port}", "--api-workers=2", f"--otlp-traces-endpoint={url}"]}
    with LiveCluster(tmp_path, model, arguments=["--num-blocks=128"], member_arguments=own) as cluster:
        flags = [f"--join=127.0.0.1:{join_port}", f"--secret-file={tmp_path / SECRET_FILE}"]
        cluster.members["guest"] = member_of(cluster, "guest", "decode", port, *flags, "--instance-name=guest")
        cluster.start_member("guest")
        names = ["prefill-0", "decode-0", "guest"]
        cluster.wait_until(
            "all are linked",
            lambda: [i["instance_id"] for i in cluster.instances()] == names and cluster.is_whole(),
            90,
        )
        yield cluster
        cluster.kill("decode-0")
        cluster.await_exit("decode-0")
        prompts = [random_prompt(random.Random(seed), 40) for seed in range(4)]
        assert_all_same(model, prompts, [cluster.complete(prompt, NUM_TOKENS) for prompt in prompts], NUM_TOKENS)
        cluster.await_received("guest")
        cluster.assert_home()
        assert [i["instance_id"] for i in cluster.instances()] == names, "the table's entry must stay listed"
        cluster.order("/instances/guest/remove", force=True)
        assert cluster.await_exit("guest") == 1
        assert "an operator has removed guest" in cluster.log_file("guest").read_text().splitlines()[-1]
        cluster.wait_until("it is gone", lambda: [i["instance_id"] for i in cluster.instances()] == names[:2])
