"""Batches survive schedulers: kill -9 loses and repeats no answer, and another scheduler continues them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support.cluster import LiveCluster

pytestmark = pytest.mark.slow

NUM_LINES = 1000
STOPS = (1, 40, 700)  # numbers of answers at which the scheduler is killed
URL = "/v1/chat/completions"
DEADLINE_S = 240.0


class BatchClient:
    """Runs a batch through any scheduler's port, and reads its answers from the disk."""

    def __init__(self, cluster: LiveCluster, files: Path) -> None:
        self.cluster, self._files = cluster, files
        self._http = httpx.Client(timeout=60, trust_env=False)
        self._known: set[Path] = set()

    def create(self, number: int) -> str:
        lines = [
            {
                "custom_id": f"request-{at}",
                "method": "POST",
                "url": URL,
                "body": {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": f"What is {at} + 4?"}],
                    "max_tokens": 12,
                    "temperature": 0,
                },
            }
            for at in range(number)
        ]
        data = "".join(json.dumps(line) + "\n" for line in lines)
        form = {"files": {"file": ("in.jsonl", data.encode())}, "data": {"purpose": "batch"}}
        file_id = self._post("/v1/files", **form)["id"]
        self._known = {*self._files.iterdir()}
        asked = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        found: str = self._post("/v1/batches", json=asked)["id"]
        return found

    def written(self) -> list[bytes]:
        """Returns the complete lines in the batch's files so far."""
        lines: list[bytes] = []
        for path in {*self._files.iterdir()} - self._known:
            lines += [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return lines

    def await_written(self, number: int) -> list[bytes]:
        self.cluster.wait_until(f"{number} answers are written", lambda: len(self.written()) >= number, DEADLINE_S)
        return self.written()

    def ended(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def has_ended() -> bool:
            found.update(self._get(f"/v1/batches/{batch_id}").json())
            return found["status"] not in ("validating", "in_progress", "finalizing", "cancelling")

        self.cluster.wait_until(f"{batch_id} has ended", has_ended, DEADLINE_S)
        return found

    def content(self, file_id: str) -> list[bytes]:
        return self._get(f"/v1/files/{file_id}/content").content.splitlines(keepends=True)

    def check(self, batch_id: str, seen: Sequence[bytes]) -> None:
        """Checks that each request has one line, and that no written answer changed."""
        batch = self.ended(batch_id)
        assert (batch["status"], batch["error_file_id"]) == ("completed", None), batch
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        lines = self.content(batch["output_file_id"])
        ids = Counter(json.loads(line)["custom_id"] for line in lines)
        assert ids == {f"request-{at}": 1 for at in range(NUM_LINES)}
        assert {*seen} <= {*lines}, "a written answer was lost"

    def _post(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = self._http.post(f"{self.cluster.url}{path}", **fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def _get(self, path: str) -> httpx.Response:
        answer = self._http.get(f"{self.cluster.url}{path}")
        assert answer.status_code == 200, answer.text
        return answer


@pytest.mark.timeout(600)
def test_kill_9_of_the_scheduler(tmp_path: Path) -> None:
    files = tmp_path / "files"
    with LiveCluster(tmp_path, SHIPPED_MODEL, arguments=[f"--files-dir={files}"]) as cluster:
        client, seen = BatchClient(cluster, files / "content"), list[bytes]()
        batch_id = client.create(NUM_LINES)
        for stop in STOPS:
            client.await_written(stop)
            cluster.kill("scheduler")
            cluster.await_exit("scheduler")
            seen += client.written()
            assert len(client.written()) < NUM_LINES, "the scheduler was killed only after the last answer"
            cluster.restart("scheduler")
        client.check(batch_id, seen)
        cluster.assert_home()


@pytest.mark.timeout(600)
def test_another_scheduler_goes_on(tmp_path: Path) -> None:
    files = tmp_path / "files"
    with LiveCluster(tmp_path, SHIPPED_MODEL, arguments=[f"--files-dir={files}"], num_schedulers=2) as cluster:
        client, urls = BatchClient(cluster, files / "content"), cluster.launch.urls
        batch_id = client.create(NUM_LINES)
        seen = client.await_written(40)
        running = [name for name in cluster.launch.scheduler_names if batch_id in cluster.log_file(name).read_text()]
        assert len(running) == 1, "exactly one scheduler must run the batch"
        cluster.kill(running[0])
        cluster.await_exit(running[0])
        cluster.url = next(
            url for name, url in zip(cluster.launch.scheduler_names, urls, strict=True) if name != running[0]
        )
        client.check(batch_id, seen)
