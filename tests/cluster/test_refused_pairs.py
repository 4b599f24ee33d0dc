"""Pairs that cannot work are refused when they meet, by name, and nobody is sent to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.cluster import LiveCluster

Checkpoints = Callable[..., Path]


def test_a_worker_with_another_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Same shapes, other weights: refused by the model's identity, before any request could be answered wrongly."""
    model, other = checkpoint("llama"), checkpoint("llama", seed=1)
    cluster = LiveCluster(tmp_path, model, member_arguments={"decode-0": [f"--model={other}"]})
    try:
        cluster.start()
        cluster.wait_until(
            "/health names the foreign model",
            lambda: "serves another model" in str(cluster.health()[1].get("instances", {}).get("decode-0")),
            90,
        )
        answer = cluster.client.post(f"{cluster.url}/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "serves another model" in answer.json()["error"]["message"]
    finally:
        cluster.stop()


def test_a_worker_with_another_secret(checkpoint: Checkpoints, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"another secret of 32 bytes length")
    secret.chmod(0o600)
    cluster = LiveCluster(tmp_path, checkpoint("llama"), member_arguments={"prefill-0": [f"--secret-file={secret}"]})
    try:
        cluster.start()
        cluster.wait_until(
            "/health names the foreign secret",
            lambda: "another global rank table or secret" in str(cluster.health()[1].get("instances", {})),
            90,
        )
        assert cluster.health()[0] == 503
    finally:
        cluster.stop()
