"""Workers that do not fit the others are refused by name when they meet, and receive no requests.

The prefill instance serves alone meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ranktable_tools.files import PRIVATE, write_private
from ranktable_tools.keys import SECRET_FILE, read_secret, secret_text, write_keys
from tests.support.cluster import LiveCluster

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Its decode instances: one with other weights of the same shapes, two with the secrets of another cluster."""
    folder = tmp_path_factory.mktemp("refused")
    write_keys(folder, PRIVATE)
    write_keys(folder / "another", PRIVATE)
    pinned = read_secret(folder / SECRET_FILE).schedulers
    guess = write_private(folder / "guess", secret_text(b"a guess of thirty-two bytes here", pinned))
    unlike = {
        "decode-0": [f"--model={checkpoint('llama', seed=1)}"],
        "decode-1": [f"--secret-file={folder / 'another' / SECRET_FILE}"],
        "decode-2": [f"--secret-file={guess}"],
    }
    running = LiveCluster(folder, checkpoint("llama"), num_decode=3, member_arguments=unlike)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def await_state(cluster: LiveCluster, name: str, why: str) -> None:
    def is_told() -> bool:
        return why in str(cluster.health()[1].get("instances", {}).get(name))

    cluster.wait_until(f"/health says of {name}: {why}", is_told, 90)


def test_a_worker_with_another_model(cluster: LiveCluster) -> None:
    """By the model's identity, before any request could be answered wrongly."""
    await_state(cluster, "decode-0", "serves another model")
    await_state(cluster, "prefill-0", "ready")
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-pd-served-by"] == "prefill-0"


def test_a_worker_that_pins_another_scheduler(cluster: LiveCluster) -> None:
    await_state(cluster, "decode-1", "another cluster.secret than the scheduler (the other end does not admit")
    assert cluster.health()[1]["status"] == "degraded"


def test_a_worker_with_another_secret(cluster: LiveCluster) -> None:
    """It admits the scheduler, and cannot prove that it is one of the cluster."""
    await_state(cluster, "decode-2", "another cluster.secret than the scheduler (the other end has another secret")
    assert cluster.health()[1]["status"] == "degraded"
