"""GET /metrics, read back with Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster import LiveCluster


def sample(cluster: LiveCluster, name: str, instance_id: str) -> float:
    text = cluster.client.get(f"{cluster.url}/metrics").text
    return next(
        each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name == name and each.labels["instance_id"] == instance_id
    )


def test_what_dashboards_query_is_there_and_moves(cluster: LiveCluster) -> None:
    before = {name: sample(cluster, name, "prefill-0") for name in ("vllm:prefix_cache_hits_total",)}
    prompt = [17] * 100
    for _ in range(2):
        cluster.complete(prompt, 2)
    cluster.assert_home()
    hits = sample(cluster, "vllm:prefix_cache_hits_total", "prefill-0") - before["vllm:prefix_cache_hits_total"]
    assert hits >= 96  # the second time, all blocks of 16 but the last token's
    assert sample(cluster, "vllm:prefix_cache_queries_total", "prefill-0") >= hits
    assert sample(cluster, "pd_cluster:kv_received_bytes_total", "decode-0") > 0
    assert sample(cluster, "pd_cluster:num_cached_blocks", "decode-0") > 0
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert sample(cluster, name, "prefill-0") == 0
