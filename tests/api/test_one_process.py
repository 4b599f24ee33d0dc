"""Commands to a scheduler with one process; tests/cluster/test_control.py has more, with two API processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster import LiveCluster
from tests.support.metrics import told


def test_requests_end_or_wait_when_the_operator_says_so(cluster: LiveCluster) -> None:
    url, body = f"{cluster.url}/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}

    def is_there() -> bool:
        """Whether the request waits for its turn; /load counts it before its body is read."""
        return told(cluster)["pd_cluster:queued_requests", ""] == 1

    cluster.order("/pause?mode=keep&clear_cache=false")
    with ThreadPoolExecutor(1) as pool:
        for command, status in (("/abort_requests", 410), ("/resume", 200)):
            waiting = pool.submit(cluster.client.post, url, json=body)
            cluster.wait_until("it is there", is_there)
            assert not waiting.done()
            cluster.order(command)
            assert waiting.result().status_code == status
    cluster.assert_home()


def asleep(cluster: LiveCluster) -> list[float]:
    """Returns, per instance, three flags: awake, asleep without KV cache, asleep also without weights."""
    text = cluster.client.get(f"{cluster.url}/metrics").text
    families = [each for each in text_string_to_metric_families(text) if each.name == "vllm:engine_sleep_state"]
    return [sample.value for family in families for sample in family.samples]


def test_a_sleep_and_an_empty_cache(cluster: LiveCluster) -> None:
    prompt = [7] * 100
    before = cluster.complete(prompt, 4)
    assert cluster.order("/sleep?level=2") == {"status": "asleep", "level": 2}
    cluster.wait_until("metrics say so", lambda: asleep(cluster) == [0.0, 0.0, 1.0] * 2)
    assert cluster.client.post(f"{cluster.url}/v1/completions", json={"prompt": prompt}).status_code == 503
    assert cluster.order("/wake_up") == {"status": "awake"}
    assert cluster.complete(prompt, 4) == before
    assert cluster.order("/reset_prefix_cache?reset_external=true") == {"success": True}
    cluster.wait_until("nothing is cached", lambda: not any(i["num_cached_blocks"] for i in cluster.instances()))
    assert cluster.complete(prompt, 4) == before
