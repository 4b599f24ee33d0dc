"""A cluster whose workers prove their nodes: one is revoked under load, and returns with a new key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.extras.node_keys.node_key_files import (
    Node,
    NodeKeys,
    PublicPart,
    TrustedNodes,
    new_keys,
    now_text,
    read_node_keys,
    read_trusted_nodes,
    revoking,
    trusting,
    write_node_keys,
    write_public,
)
from tests.support.cluster import LiveCluster

Checkpoints = Callable[..., Path]
NAMES = ("prefill-0", "decode-0", "decode-1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Nodes:
    """A node with a key file for each worker, and one list for all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "trusted.nodes"
        write_public(self.file, TrustedNodes())
        for name in NAMES:
            self.renew(name)

    def key(self, name: str) -> Path:
        return self.folder / f"node-{name}.key"

    def renew(self, name: str) -> None:
        node = f"node-{name}"
        before = read_node_keys(self.key(name)) if self.key(name).exists() else None
        keys = new_keys(node, before)
        write_node_keys(self.key(name), keys)
        part = Node(node, [PublicPart(keys.public[0].hex())], ["127.0.0.0/8"])
        write_public(self.file, trusting(read_trusted_nodes(self.file), part, self.file))

    def revoke(self, name: str) -> None:
        write_public(self.file, revoking(read_trusted_nodes(self.file), f"node-{name}", "", self.file, now_text()))

    def flags(self) -> dict[str, list[str]]:
        trusted = f"--trusted-nodes={self.file}"
        return {
            "scheduler": [trusted],
            **{name: [f"--node-key-file={self.key(name)}", trusted] for name in NAMES},
        }


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    folder = tmp_path_factory.mktemp("nodes")
    folder.chmod(0o700)
    return Nodes(folder)


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoints, nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("proved")
    with LiveCluster(folder, checkpoint("llama"), 1, 2, member_arguments=nodes.flags()) as running:
        yield running


def test_a_node_is_revoked_under_load(cluster: LiveCluster, nodes: Nodes) -> None:
    prompt = [5, 6, 7, 8]
    wanted = cluster.complete(prompt, 24)
    answers: list[list[int]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(cluster.complete(prompt, 24))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    try:
        cluster.wait_until("requests run", lambda: len(answers) > 4)
        nodes.revoke("decode-1")
        cluster.wait_until("it is cut off", lambda: cluster.instance("decode-1")["state"] != "ready")
        assert " of node node-decode-1 was revoked at " in cluster.instance("decode-1")["reason"]
        num_then = len(answers)
        cluster.wait_until("requests go on", lambda: len(answers) > num_then + 8)
        assert "the connection with decode-1@" in (said := cluster.log_file("scheduler").read_text())
        assert " of node node-decode-1 was revoked at " in said
        nodes.renew("decode-1")
        cluster.wait_until("it is back with its new key", cluster.is_whole)
        num_then = len(answers)
        cluster.wait_until("requests go on", lambda: len(answers) > num_then + 8)
    finally:
        stop.set()
        for each in threads:
            each.join(60)
    assert all(each == wanted for each in answers)
    assert all(process.poll() is None for process in cluster.processes.values())
    cluster.assert_home()


def test_a_stolen_key_does_not_make_another_worker(cluster: LiveCluster, nodes: Nodes) -> None:
    """decode-1's host, with the cluster's secret and its own key, cannot pass as decode-0's node after a restart."""
    stolen = nodes.folder / "stolen.key"
    write_node_keys(stolen, NodeKeys("node-decode-0", read_node_keys(nodes.key("decode-1")).private))
    cluster.kill("decode-1")
    cluster.await_exit("decode-1")
    before = cluster.member_arguments
    cluster.member_arguments = {**before, "decode-1": [f"--node-key-file={stolen}"]}  # without a list of its own
    try:
        cluster.start_member("decode-1")
        cluster.wait_until(
            "it is refused by name",
            lambda: "node node-decode-0 has another key (" in (cluster.instance("decode-1")["reason"] or ""),
        )
        assert cluster.instance("decode-1")["state"] != "ready"
        assert cluster.instance("decode-0")["state"] == "ready"
    finally:
        cluster.kill("decode-1")
        cluster.await_exit("decode-1")
        cluster.member_arguments = before
        cluster.start_member("decode-1")
    cluster.wait_until("the right one is back", cluster.is_whole)
