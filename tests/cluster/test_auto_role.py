"""`--auto-role` on real processes: a load of prompts makes a decode instance a prefill one, and the reason is shown."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt

pytestmark = pytest.mark.slow  # about a minute, mostly starting ranks and the first window of arrivals

CONCURRENCY = 24


def test_prompts_move_an_instance_over_two_api_processes(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("llama", max_position_embeddings=1024)
    arguments = ["--auto-role", "--api-workers=2", "--num-blocks=2048"]
    with LiveCluster(tmp_path, model, 1, 3, arguments) as cluster:
        stopping = threading.Event()

        def flood(seed: int) -> None:
            rng = random.Random(seed)
            with httpx.Client(timeout=60, trust_env=False) as client:
                while not stopping.is_set():
                    body = {"model": "tiny", "prompt": random_prompt(rng, 900), "max_tokens": 2, "ignore_eos": True}
                    assert client.post(f"{cluster.url}/v1/completions", json=body).status_code == 200

        def overview() -> dict[str, object]:
            found: dict[str, object] = cluster.ask_admin("GET", "/overview").json()
            return found

        def roles() -> list[str]:
            return [each["role"] for each in cluster.instances()]

        assert roles().count("prefill") == 1
        threads = [threading.Thread(target=flood, args=(at,), daemon=True) for at in range(CONCURRENCY)]
        for thread in threads:
            thread.start()
        try:
            cluster.wait_until("a decode instance computes prompts", lambda: roles().count("prefill") >= 2)
        finally:
            stopping.set()
            for thread in threads:
                thread.join(60)
        found = overview()
        assert found["roles"], found
        marks = found["marks"]
        assert isinstance(marks, list)
        (mark, *_) = [each["text"] for each in marks if "by --auto-role" in each["text"]]
        assert mark.startswith("becomes prefill by --auto-role: prompts need ")
        metrics = cluster.client.get(f"{cluster.url}/metrics").text
        counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        (changes,) = [count for name, count in counts.items() if "role_changes_total" in name and "prefill" in name]
        assert float(changes) >= 1
        assert sum(float(count) for name, count in counts.items() if "roles_kept_total" in name) >= 1
        cluster.assert_home()
