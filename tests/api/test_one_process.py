"""Commands to a scheduler that serves by itself; tests/cluster/test_control.py has more, with two API processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.cluster import LiveCluster

LONG: dict[str, Any] = {"prompt": [5] * 40, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def test_requests_end_or_wait_when_the_operator_says_so(cluster: LiveCluster) -> None:
    url = f"{cluster.url}/v1/completions"
    with ThreadPoolExecutor(2) as pool:
        cluster.order("/pause?mode=keep&clear_cache=false")
        ended = pool.submit(cluster.client.post, url, json={**LONG, "request_id": "unwanted"})
        cluster.wait_until("it is there", lambda: cluster.client.get(f"{cluster.url}/load").json()["server_load"] == 1)
        waiting = pool.submit(cluster.complete, [5, 6], 2, ignore_eos=True)
        cluster.wait_until("both are", lambda: cluster.client.get(f"{cluster.url}/load").json()["server_load"] == 2)
        assert cluster.order("/abort_requests", request_ids=["cmpl-unwanted"]) == {"status": "aborted"}
        assert (ended.result().status_code, ended.result().json()["error"]["code"]) == (410, "aborted")
        assert not waiting.done()
        assert cluster.order("/resume") == {"status": "resumed"}
        assert len(waiting.result()) == 2
    cluster.assert_home()


def test_a_sleep_and_an_empty_cache(cluster: LiveCluster) -> None:
    prompt = [7] * 100
    before = cluster.complete(prompt, 4)
    assert cluster.order("/sleep?level=2") == {"status": "asleep", "level": 2}
    assert cluster.client.post(f"{cluster.url}/v1/completions", json=LONG).status_code == 503
    assert cluster.order("/wake_up") == {"status": "awake"}
    assert cluster.complete(prompt, 4) == before
    assert cluster.order("/reset_prefix_cache?reset_external=true") == {"success": True}
    cluster.wait_until("nothing is cached", lambda: not any(i["num_cached_blocks"] for i in cluster.instances()))
    assert cluster.complete(prompt, 4) == before
