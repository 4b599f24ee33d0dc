"""Reads /metrics with Prometheus' own parser."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster import LiveCluster

Counts = Counter[str]
LABELS = ("instance_id", "finished_reason", "cause", "reason", "source")  # no metric has two of these labels


def told(cluster: LiveCluster) -> dict[tuple[str, str], float]:
    """Returns {(metric, value of its label): number} without buckets, read over a new connection."""
    answer = cluster.client.get(f"{cluster.url}/metrics", timeout=30)
    assert answer.status_code == 200, answer.text
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            if not sample.name.endswith("_bucket"):
                found[sample.name, "".join(sample.labels.get(name, "") for name in LABELS)] = sample.value
    return found


def counts_of(cluster: LiveCluster) -> Counts:
    """Returns the request metrics by short names; a histogram is represented by its count."""
    found = Counts()
    for (name, label), value in told(cluster).items():
        short = name.partition(":")[2]
        if name == "vllm:request_success_total":
            found[f"request_success_{label}"] = int(value)
        elif not label and name.endswith(("_total", "_count")):
            found[short.removesuffix("_count")] = int(value)
    return found
