"""In any state of a cluster, restarting any one process never makes it serve less than before.

Before each restart, the test reaches the state and checks that the cluster serves. Dead processes stay dead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.test_join import Joined, member_of
from tests.support.clips import make_seer
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same

Checkpoints = Callable[..., Path]
PROMPT, NUM_TOKENS = [5, 6, 7, 8, 9, 10], 6


def serves(cluster: LiveCluster) -> bool:
    """Whether a request is answered; /health may not yet reflect a process that was just killed."""
    body = {"prompt": PROMPT, "max_tokens": 1}
    with contextlib.suppress(httpx.HTTPError):
        is_answered = cluster.client.post(f"{cluster.url}/v1/completions", json=body).status_code == 200
        return is_answered and cluster.health()[0] == 200
    return False


def restart_each(cluster: LiveCluster, model: Path) -> None:
    """Restarts every live process in turn; after each, the cluster must serve as before."""
    assert_serves(cluster, model, "before")
    for name in [name for name, process in cluster.processes.items() if process.poll() is None]:
        cluster.kill(name)
        cluster.await_exit(name)
        cluster.start_member(name)
        assert_serves(cluster, model, f"after a restart of {name}")


def assert_serves(cluster: LiveCluster, model: Path, when: str) -> None:
    cluster.wait_until(f"it serves {when}", lambda: serves(cluster), 60)
    assert_same(model, PROMPT, cluster.complete(PROMPT, NUM_TOKENS), NUM_TOKENS)


def kill(cluster: LiveCluster, *names: str) -> None:
    for name in names:
        cluster.kill(name)
        cluster.await_exit(name)


def change_roles(cluster: LiveCluster) -> None:
    """Makes every prefill instance decode by command; the table's roles return with a scheduler restart."""
    cluster.order("/instances/prefill-1/role", role="decode")
    cluster.wait_until("its role is another", lambda: cluster.instance("prefill-1")["role"] == "decode")
    kill(cluster, "prefill-0", "decode-0")


def drain(cluster: LiveCluster) -> None:
    cluster.order("/instances/decode-1/drain")
    kill(cluster, "prefill-0")


STATES: dict[str, tuple[dict[str, Any], Callable[[LiveCluster], None]]] = {
    "prefill dead": ({}, lambda cluster: kill(cluster, "prefill-0")),
    "decode dead": ({}, lambda cluster: kill(cluster, "decode-0")),
    "one of two prefill dead": ({"num_prefill": 2}, lambda cluster: kill(cluster, "prefill-1")),
    "both decode dead": ({"num_decode": 2}, lambda cluster: kill(cluster, "decode-0", "decode-1")),
    "two schedulers": ({"num_schedulers": 2}, lambda cluster: kill(cluster, "prefill-0")),
    "after a change of roles": ({"num_prefill": 2}, change_roles),
    "after a drain": ({"num_decode": 2}, drain),
}


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_with_a_table(checkpoint: Checkpoints, tmp_path: Path, state: str) -> None:
    sizes, reach = STATES[state]
    model = checkpoint("llama")
    with LiveCluster(tmp_path, model, **sizes) as cluster:
        reach(cluster)
        restart_each(cluster, model)


def test_the_scheduler_restarts_while_prefill_is_dead(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Decode restarts, too, then the scheduler again, so that no process remembers the dead instance."""
    model = checkpoint("llama")
    with LiveCluster(tmp_path, model) as cluster:
        kill(cluster, "prefill-0")
        restart_each(cluster, model)
        kill(cluster, "scheduler")
        cluster.start_member("scheduler")
        assert_serves(cluster, model, "after another restart of the scheduler")
        assert cluster.health()[1]["status"] == "degraded"
        cluster.restart("prefill-0")


@pytest.mark.slow
def test_a_stranger_at_the_port_of_the_dead(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A foreign worker at a dead one's port fails only that instance, and no scheduler restart."""
    model = checkpoint("llama")
    with LiveCluster(tmp_path, model, num_decode=2) as cluster:
        kill(cluster, "prefill-0")
        member = cluster.members["prefill-0"]
        flags = [each for each in member.command if each.startswith("--secret-file")]
        flags += ["--join=127.0.0.1:9", "--instance-name=stranger"]
        cluster.members["stranger"] = member_of(cluster, "stranger", "prefill", member.port, *flags)
        cluster.start_member("stranger")
        cluster.wait_until("the stranger is seen", lambda: "stranger" in str(cluster.health()[1].get("instances")), 60)
        restart_each(cluster, model)


@pytest.mark.slow
@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_workers_that_join(checkpoint: Checkpoints, tmp_path: Path, dead: str) -> None:
    model = checkpoint("llama")
    cluster = Joined(tmp_path, model)
    try:
        cluster.start()
        cluster.await_whole()
        (name,) = [each for each in cluster.workers if each.startswith(dead)]
        kill(cluster, name)
        restart_each(cluster, model)
    finally:
        cluster.stop()


@pytest.mark.slow
def test_an_encoder_is_dead(tmp_path: Path) -> None:
    """Prefill instances compute images themselves, as without encoders."""
    with LiveCluster(
        tmp_path, make_seer(tmp_path / "model", "qwen3_vl", max_position_embeddings=4096), num_encode=1
    ) as cluster:
        kill(cluster, cluster.launch.encoder_names[0])
        for name in ("scheduler", "prefill-0", "decode-0"):
            kill(cluster, name)
            cluster.start_member(name)
            cluster.wait_until(f"it serves after a restart of {name}", lambda: serves(cluster), 60)
            assert cluster.complete(PROMPT, NUM_TOKENS)
