"""Alert rules, dashboard and autoscaling use only metrics and labels that /metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from pd_cluster.api.admin.metrics_routes import metrics_of
from pd_cluster.cluster.records.request_stats import Outcome, RequestStats
from pd_cluster.process_messages import AllStats, Busy
from pd_cluster.types import FinishReason
from tests.support.manifests import CHART, documents
from tests.support.router_world import ready

ALERTS, DASHBOARD = CHART / "files" / "alerts.yaml", CHART / "files" / "dashboard.json"
METRIC = re.compile(r"((?:vllm|pd_cluster):\w+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
ADDED = {"le"}  # label of buckets


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for scaled in documents("components/autoscaling/autoscaling.yaml"):
        for trigger in scaled["spec"]["triggers"]:
            yield trigger["metadata"]["query"]


def exported() -> dict[str, dict[str, set[str]]]:
    """Returns metric -> label -> values for a cluster of two in which requests have ended in every way."""
    stats = RequestStats()
    reasons: list[FinishReason] = ["stop", "length", "abort", "error"]
    for reason in reasons:
        stats.ended(Outcome([reason], [1], 1, 1, 0.0, 1.0, 1.0, 0.5, [0.1], 0))
    instances = [ready("prefill-0"), ready("decode-0")]
    text = metrics_of(instances, "tiny", AllStats(stats.snapshot(), Busy(), 1), Busy()).decode()
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            of_name = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                of_name.setdefault(label, set()).add(value)
    return found


def test_every_expression_asks_for_what_is_exported() -> None:
    known, asked = exported(), list(expressions())
    assert len(asked) > 40
    for expression in asked:
        used = METRIC.findall(expression)
        assert used, expression
        for name, selector in used:
            assert name in known, f"{name} of {expression}"
            for label, is_pattern, value in re.findall(r'(\w+)=(~?)"([^"]*)"', selector):
                assert label in known[name], f"{label} of {expression}"
                wanted = value.split("|") if is_pattern else [value]
                assert value == "$model_name" or {*wanted} <= known[name][label], f"{value} of {expression}"
        labels = {label.strip() for group in GROUPING.findall(expression) for label in group.split(",")}
        assert all(labels - ADDED <= known[name].keys() for name, _ in used), expression


def test_the_chart_s_rules_are_the_file_s() -> None:
    (made,) = (each for each in documents("components/monitoring/monitoring.yaml") if each["kind"] == "PrometheusRule")
    assert [rule for group in made["spec"]["groups"] for rule in group["rules"]] == rules()


def test_backlog_is_counted_by_role() -> None:
    prefill, decode, lost = ready("prefill-0"), ready("decode-0"), ready("decode-1")
    prefill.outstanding_tokens, decode.outstanding_tokens, decode.others_tokens = 7, 20, 3
    lost.outstanding_tokens, lost.state = 99, "unreachable"
    text = metrics_of(
        [prefill, decode, lost], "tiny", AllStats(RequestStats().snapshot(), Busy(0, 0, 1, 40), 2), Busy(0, 0, 1, 2)
    ).decode()
    assert 'pd_cluster:backlog_tokens{model_name="tiny",role="prefill"} 7.0' in text
    assert 'pd_cluster:backlog_tokens{model_name="tiny",role="decode"} 23.0' in text
    assert 'pd_cluster:queued_tokens{model_name="tiny"} 42.0' in text
