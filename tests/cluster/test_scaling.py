"""A simulated control loop over real processes: scales a role under load as the manifests' StatefulSets would.

Each pod is a process with the container's command line from deploy/kubernetes, with this machine's addresses, ports and
paths. The loop uses the metric and target of the manifests' ScaledObject.
"""

from __future__ import annotations

import math
import random
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.cluster.processes.launcher import Member
from pd_cluster.cluster.processes.port_reservations import free_ports
from pd_cluster.types import Sampling
from ranktable_tools.cluster_keys import write_keys
from ranktable_tools.table_files import Access
from tests.support.cluster import LiveCluster
from tests.support.engines import generate, make_core, random_prompt
from tests.support.manifests import documents
from tests.support.metrics import told

NUM_TOKENS = 48
MOST = 6
MORE = {"prefill": ["--num-blocks=256"], "decode": ["--num-blocks=64", "--max-num-seqs=4"], "scheduler": []}


def manifest(kind: str, name: str, file: str = "base/pd-cluster.yaml") -> dict[str, Any]:
    (found,) = (each for each in documents(file) if (each["kind"], each["metadata"]["name"]) == (kind, f"pd-{name}"))
    return found


class Pods(LiveCluster):
    """A namespace with a scheduler, and as many pods of each role as its StatefulSet's replicas."""

    def plan(self) -> list[Member]:
        self.files = {file.name: file for file in write_keys(self.folder, Access())}
        (self.join_port,) = free_ports(1)
        pods = [self.pod("prefill", 0), *(self.pod("decode", at) for at in range(2))]
        return [Member("scheduler", self.command("scheduler", "", self.launch.port), {}, self.launch.port), *pods]

    def command(self, role: str, name: str, port: int) -> list[str]:
        """Returns the manifest's command line, with this machine's addresses, ports and files."""
        kind = "Deployment" if role == "scheduler" else "StatefulSet"
        (container,) = manifest(kind, role)["spec"]["template"]["spec"]["containers"]
        own = {
            "--model": str(self.launch.model),
            "--served-model-name": "tiny",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--join": f"127.0.0.1:{self.join_port}",
            "--join-port": str(self.join_port),
            "--advertise-host": "127.0.0.1",
            "--instance-name": name,
            "--kv-port-range": "",  # all pods share one address here
        }
        given = dict(each.split("=", 1) for each in container["args"][2:] if "=" in each)  # all pods are on one host
        for flag, value in given.items():
            if found := re.fullmatch(r"/run/secrets/pd-cluster/(.*)", value):
                own[flag] = str(self.files[found[1]])
        flags = [f"{flag}={own.get(flag, value)}" for flag, value in given.items()]
        admin = [f"--admin-port={self.launch.port + 1}"] if role == "scheduler" else []
        return [sys.executable, "-m", "pd_cluster", *container["args"][1:2], *flags, *admin, *MORE[role]]

    def pod(self, role: str, at: int) -> Member:
        name, (port,) = f"pd-{role}-{at}", free_ports(1)
        return Member(name, self.command(role, name, port), {"OMP_NUM_THREADS": "1"}, port)

    def is_whole(self) -> bool:
        pods = sorted(name for name in self.members if name != "scheduler")
        return super().is_whole() and sorted(each["instance_id"] for each in self.instances()) == pods

    def decodes(self) -> list[str]:
        return [name for name in self.members if name.startswith("pd-decode-")]

    def scale(self, replicas: int) -> None:
        """Adds pods with the next numbers at once, or asks the pods with the highest numbers to end."""
        now = len(self.decodes())
        for at in range(now, replicas):
            member = self.pod("decode", at)
            self.members[member.name] = member
            self.start_member(member.name)
        for at in reversed(range(replicas, now)):
            name = f"pd-decode-{at}"
            self.kill(name, signal.SIGTERM)
            grace_s = manifest("StatefulSet", "decode")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert self.await_exit(name, grace_s) == 0, self.logs()
            del self.members[name], self.processes[name]


class Clients:
    """Clients that each send one request after another and compare the answers."""

    def __init__(self, cluster: Pods, expected: dict[tuple[int, ...], list[int]]) -> None:
        self.cluster, self.expected = cluster, expected
        self.num_exact, self.wrong = 0, list[str]()
        self._wanted, self._threads = 0, list[threading.Thread]()
        self._lock = threading.Lock()

    def set(self, number: int) -> None:
        self._wanted = number
        for at in range(len(self._threads), number):
            thread = threading.Thread(target=self._run, args=(at,), daemon=True)
            self._threads.append(thread)
            thread.start()
        for thread in self._threads[number:]:
            thread.join(120)
            assert not thread.is_alive(), "a request does not end"
        del self._threads[number:]

    def _run(self, at: int) -> None:
        rng = random.Random(at)
        with httpx.Client(timeout=120, trust_env=False) as client:
            while at < self._wanted:
                prompt = rng.choice(list(self.expected))
                body = {"prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
                answer = client.post(f"{self.cluster.url}/v1/completions", json={**body, "ignore_eos": True})
                is_exact = answer.status_code == 200 and (
                    answer.json()["choices"][0]["token_ids"] == self.expected[prompt]
                )
                with self._lock:
                    self.num_exact += is_exact
                    if not is_exact:
                        self.wrong.append(answer.text[:300])


def wanted_replicas(cluster: Pods, tokens_per_replica: float) -> int:
    """Returns an autoscaler's replicas: the ScaledObject's query divided by the target per replica."""
    scaled = manifest("ScaledObject", "decode", "components/autoscaling/autoscaling.yaml")["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["query"] == 'max(pd_cluster:backlog_tokens{role="decode"})'
    answer = httpx.get(f"{cluster.url}/metrics", timeout=30, trust_env=False).text
    (value,) = re.findall(r'^pd_cluster:backlog_tokens\{.*role="decode".*\} (\S+)$', answer, re.MULTILINE)
    return min(max(2, math.ceil(float(value) / tokens_per_replica)), MOST)


def lives(cluster: Pods) -> dict[str, int]:
    return {name: process.pid for name, process in cluster.processes.items()}


@pytest.mark.slow  # about a minute, because eight workers start
@pytest.mark.timeout(600)
def test_decode_is_scaled_from_two_to_six_and_back_under_load(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("llama", max_position_embeddings=512)
    prompts = [random_prompt(random.Random(seed), 40) for seed in range(8)]
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    answers = generate(make_core(model, num_blocks=512), prompts, sampling)
    expected = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    with Pods(tmp_path, model) as cluster:
        before = lives(cluster)
        clients = Clients(cluster, expected)
        clients.set(24)
        # This load exceeds the target sixfold on any machine, because 24 clients always have requests waiting.
        cluster.wait_until("tokens wait", lambda: wanted_replicas(cluster, 40) == MOST, 60)
        cluster.scale(MOST)
        cluster.wait_until("six serve", cluster.is_whole, 240)
        at_six = lives(cluster)
        assert at_six.items() >= before.items(), "other pods must not restart"
        served = clients.num_exact
        cluster.wait_until("they answer", lambda: clients.num_exact > served + 24, 120)
        load = {each["instance_id"]: each["kv_received_nbytes"] for each in cluster.instances()}
        assert all(load[name] > 0 for name in cluster.decodes()), "every new pod must get work"
        clients.set(2)
        cluster.wait_until("fewer tokens wait", lambda: wanted_replicas(cluster, 400) == 2, 60)
        cluster.scale(2)
        cluster.wait_until("two serve", cluster.is_whole, 60)
        assert lives(cluster) == before, "remaining pods must not restart"
        served = clients.num_exact
        cluster.wait_until("they answer", lambda: clients.num_exact > served + 4, 120)
        clients.set(0)
        assert clients.wrong == []
        cluster.assert_home()
        counts = told(cluster)
        assert [each for each in counts.items() if each[0][0] == "pd_cluster:replays_total" and each[1]] == [], (
            cluster.logs()
        )
        assert sum(value for (name, why), value in counts.items() if name == "pd_cluster:requests_refused_total") == 0
