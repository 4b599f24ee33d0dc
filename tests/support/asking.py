"""Posts requests to a cluster's public port."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.cluster import LiveCluster


def post(cluster: LiveCluster, path: str, **body: Any) -> httpx.Response:
    return cluster.client.post(f"{cluster.url}{path}", json=body)


def right(answer: httpx.Response) -> Any:
    """Returns a successful answer's JSON."""
    assert answer.status_code == 200, answer.text
    return answer.json()
