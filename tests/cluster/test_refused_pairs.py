"""Workers that cannot work with the others are refused when they meet, by name, and nobody is sent to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import LiveCluster

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Its decode instances: one with other weights of the same shapes, one with another secret."""
    folder = tmp_path_factory.mktemp("refused")
    secret = folder / "another-secret"
    secret.write_bytes(b"another secret of 32 bytes length")
    secret.chmod(0o600)
    unlike = {
        "decode-0": [f"--model={checkpoint('llama', seed=1)}"],
        "decode-1": [f"--secret-file={secret}"],
    }
    running = LiveCluster(folder, checkpoint("llama"), num_decode=2, member_arguments=unlike)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def await_refusal(cluster: LiveCluster, name: str, why: str) -> None:
    def refused() -> bool:
        return why in str(cluster.health()[1].get("instances", {}).get(name))

    cluster.wait_until(f"/health says of {name}: {why}", refused, 90)


def test_a_worker_with_another_model(cluster: LiveCluster) -> None:
    """By the model's identity, before any request could be answered wrongly."""
    await_refusal(cluster, "decode-0", "serves another model")
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503
    assert "serves another model" in answer.json()["error"]["message"]


def test_a_worker_with_another_secret(cluster: LiveCluster) -> None:
    await_refusal(cluster, "decode-1", "another global rank table or secret")
    assert cluster.health()[0] == 503
