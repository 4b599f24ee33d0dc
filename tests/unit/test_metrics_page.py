"""docs/metrics.md lists all metrics of /metrics, which include those used by vLLM's dashboards.

`python tests/unit/test_metrics_page.py --fix` rewrites the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_cluster.api.admin import metric_tables as tables
from pd_cluster.api.admin.metrics_routes import (
    AdapterNaming,
    MetricSources,
    batch_lines_metric,
    metrics_of,
    metrics_routes,
)
from pd_cluster.api.middleware.drain_middleware import Drain
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.records.request_stats import BOUNDS, COUNTERS, Outcome, RequestStats, added
from pd_cluster.cluster.tenancy.tenant_counts import MAX_NAMED, with_names
from pd_cluster.errors import Unavailable
from pd_cluster.kv.kv_layout import keys_and_values
from pd_cluster.process_messages import AllStats, Busy, Stats
from pd_cluster.service.files.batch_states import RequestCounts
from pd_cluster.wire import DraftCounts, LayoutInfo, Load
from tests.support.router_world import info_of, ready

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

OF_EACH: list[Any] = [
    *(*tables.INSTANCE_GAUGES, *tables.INSTANCE_PARTS, *tables.INSTANCE_COUNTERS),
    *(*tables.INSTANCE_POSITIONS, *tables.INSTANCE_HISTOGRAMS),
]
SECTIONS: dict[str, list[Any]] = {
    "Instances": OF_EACH,
    "Requests": [*tables.REQUEST_COUNTERS, *tables.HISTOGRAMS],
    "Tenants": [*tables.TENANT_COUNTERS],
    "Cluster": [*tables.CLUSTER_GAUGES, tables.ADAPTERS, tables.BATCH_LINES],
}


def page() -> str:
    """Returns the page with tables generated from the code."""
    head, *sections = re.split(r"(?m)^## ", PAGE.read_text(encoding="utf-8"))
    parts = [head]
    for title, metrics in SECTIONS.items():
        (text,) = [each for each in sections if each.startswith(f"{title}\n")]
        rows = [f"| `{shown(each)}` | {kind(each)} | {each.text} |" for each in metrics]
        before = text.partition("| name |")[0]
        end = "\n" if len(parts) < len(SECTIONS) else ""
        parts.append("\n".join([f"## {before}| name | kind | meaning |", "|---|---|---|", *rows]) + "\n" + end)
    return "".join(parts)


def kind(each: Any) -> str:
    if each in (*tables.HISTOGRAMS, *tables.INSTANCE_HISTOGRAMS):
        return "histogram"
    of_instances = (*tables.INSTANCE_COUNTERS, *tables.INSTANCE_POSITIONS)
    return "counter" if each in (*of_instances, *tables.REQUEST_COUNTERS, *tables.TENANT_COUNTERS) else "gauge"


def shown(each: Any) -> str:
    name = each.name + ("_total" if kind(each) == "counter" else "")
    of_tenant = "tenant" if each in tables.TENANT_COUNTERS else ""
    labels = ",".join(filter(None, (of_tenant, getattr(each, "label", ""))))
    return f"{name}{{{labels}}}" if labels else name


def told(
    stats: Stats | None = None, instances: list[Instance] | None = None
) -> dict[str, dict[tuple[str, ...], float]]:
    """Returns metric -> label values (without the model), ordered by label -> number, for a cluster of two."""
    instance = ready("prefill-0")
    layout = LayoutInfo(
        num_layers=2, num_kv_heads=2, planes=keys_and_values(4), block_size=16, dtype="float32", tp_size=1, tp_rank=0
    )
    instance.info = info_of("prefill-0", "prefill", layout=layout, num_blocks=99)
    instance.load = Load(num_blocks=10, num_held_blocks=5, num_exporting=2, num_landing=1, num_leaked_blocks=4)
    counts = AllStats(stats or Stats(), Busy(3, 4, 2), 2)
    text = metrics_of(instances or [instance, ready("decode-0")], "tiny", counts, Busy(0, 5, 7)).decode()
    text += AdapterNaming({}, 4).metric().decode()
    text += batch_lines_metric("tiny", RequestCounts(9, 3, 1), 2).decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert family.name == tables.ADAPTERS.name or sample.labels.pop("model_name") == "tiny"
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/unit/test_metrics_page.py --fix"


def test_all_that_is_on_the_page_is_told_and_nothing_else() -> None:
    named = {line.split("`")[1].partition("{")[0] for line in page().splitlines() if line.startswith("| `")}
    stats = RequestStats()
    stats.tenants.ended("a", "limited")
    stats.tenants.limited("a", "tokens")
    stats.tenants.computed("a", 1, 2)
    drafting = ready("decode-0")
    drafting.load = Load(drafts=DraftCounts(accepted_at=(1,)))
    drafting.info = info_of("decode-0", "decode", unit="decode-0..1", unit_rank=1, unit_size=2)
    found = {**told(stats.snapshot(), [drafting]), **told(stats.snapshot())}
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in found}
    assert families == named


def test_lines_of_batches_by_state() -> None:
    """Lines that end in one process count as running until their batch's counts are stored."""
    assert told()["pd_cluster:batch_lines"] == {("waiting",): 3.0, ("running",): 2.0, ("answered",): 4.0}
    late = batch_lines_metric("tiny", RequestCounts(5, 4, 0), 3).decode()
    assert 'state="running"} 1.0' in late
    assert 'state="waiting"} 0.0' in late


def test_all_that_is_counted_is_told() -> None:
    rows = [*tables.REQUEST_COUNTERS, *tables.HISTOGRAMS]
    assert {name for row in rows for name in row.numbers.values()} == {*COUNTERS, *BOUNDS}


# Names from vLLM's example Grafana dashboard, and older names of the same metrics.
QUERIED = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_count vllm:e2e_request_latency_seconds_sum
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:time_per_output_token_seconds_bucket
vllm:time_per_output_token_seconds_sum vllm:time_per_output_token_seconds_count vllm:inter_token_latency_seconds_bucket
vllm:num_requests_running vllm:num_requests_waiting vllm:time_to_first_token_seconds_bucket
vllm:time_to_first_token_seconds_sum vllm:time_to_first_token_seconds_count vllm:gpu_cache_usage_perc
vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_sum vllm:prefix_cache_hits_total
vllm:prefix_cache_queries_total vllm:gpu_prefix_cache_hits_total vllm:gpu_prefix_cache_queries_total
vllm:num_preemptions_total vllm:cache_config_info vllm:request_params_n_bucket vllm:request_params_max_tokens_bucket
vllm:iteration_tokens_total_bucket vllm:request_num_preemptions_bucket vllm:num_requests_waiting_by_reason
vllm:external_prefix_cache_queries_total vllm:external_prefix_cache_hits_total vllm:prompt_tokens_cached_total
vllm:prompt_tokens_by_source_total vllm:admission_rejections_total vllm:request_prefill_kv_computed_tokens_bucket
vllm:request_time_per_output_token_seconds_bucket
"""


def test_what_vllms_dashboards_query_is_there_before_the_first_request() -> None:
    assert set(QUERIED.split()) <= set(told())


def test_what_is_told_is_what_was_counted() -> None:
    stats = RequestStats()
    stats.replayed("moved")
    for value in (0.01, 0.02, 0.02, 1000.0):
        stats.inter_token_s.observe(value)
    stats.ended(Outcome(["stop", "stop", "length"], [3, 4, 5], 7, 9, 1.0, 2.0, 4.0))
    found = told(stats.snapshot())
    assert found["vllm:request_success_total"] == {("stop",): 2, ("length",): 1, ("abort",): 0, ("error",): 0}
    assert found["pd_cluster:replays_total"] == {("death",): 0, ("fault",): 0, ("moved",): 1, ("full",): 0}
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        buckets = found[f"{name}_bucket"]
        assert (buckets["0.01",], buckets["0.025",], buckets["80.0",], buckets["+Inf",]) == (1, 3, 3, 4)
        assert found[f"{name}_sum"][()] == pytest.approx(1000.05)
        assert found[f"{name}_count"][()] == 4
    assert found["vllm:request_prompt_tokens_sum"] == {(): 7}
    assert found["vllm:request_generation_tokens_sum"] == {(): 12}


def test_tenants_beyond_the_named_ones_are_together() -> None:
    """The number of series is bounded, however many tenants a key file names."""
    stats = RequestStats()
    assert not any("tenant" in name for name in told(stats.snapshot()))
    stats.tenants.named = frozenset(names := with_names(["old"], (f"t{at}" for at in range(500))))
    assert (len(names), names[0], names[-1]) == (MAX_NAMED, "old", f"t{MAX_NAMED - 2}")
    assert with_names(names, ["new", *names]) == names, "a name must stay, or its counters would restart"
    for at in range(500):
        stats.tenants.ended(f"t{at}", "finished")
        stats.tenants.computed(f"t{at}", 3, 4)
    stats.tenants.ended("t7", "limited")
    found = told(added([stats.snapshot(), stats.snapshot()]))
    requests, num_others = found["pd_cluster:tenant_requests_total"], 500 - 99
    assert requests["finished", "t7"] == requests["finished", "t98"] == requests["limited", "t7"] == 2
    assert requests["finished", "other"] == 2 * num_others
    assert len(requests) == 99 + 1 + 1
    assert found["pd_cluster:tenant_prompt_tokens_total"]["other",] == 2 * 3 * num_others
    assert found["pd_cluster:tenant_generation_tokens_total"]["t0",] == 2 * 4


def test_what_is_there_now() -> None:
    found = told()
    assert found["pd_cluster:open_streams"] == {(): 5 + 4}
    assert found["pd_cluster:api_processes_alive"] == {(): 2}
    assert found["pd_cluster:leases_held"]["prefill-0",] == 3
    assert found["pd_cluster:leaked_blocks"]["prefill-0",] == 4
    assert found["vllm:kv_cache_usage_perc"]["prefill-0",] == found["vllm:gpu_cache_usage_perc"]["prefill-0",] == 0.5
    (labels,) = found["vllm:cache_config_info"]
    assert (labels[:3], labels[4:]) == (("16", "float32", "prefill-0"), (str(16 * 99), "99"))
    assert found["vllm:engine_sleep_state"]["prefill-0", "awake"] == 1
    assert found["vllm:engine_sleep_state"]["prefill-0", "discard_all"] == 0
    states = found["pd_cluster:instances"]
    assert (states["prefill", "ready"], states["decode", "ready"], states["prefill", "draining"]) == (1, 1, 0)
    assert sum(states.values()) == 2


def test_who_does_not_know_the_others_counts_says_so() -> None:
    """A process without the others' counts returns an error, because lower counters would look like a restart."""
    unused = cast(Any, None)
    routes = metrics_routes(unused, [], "tiny", Drain(1.0, lambda: None), MetricSources(lambda: None))
    for route in routes.routes:
        coroutine = cast(Any, route).endpoint(unused)
        with pytest.raises(Unavailable):
            coroutine.send(None)


def test_drafts_are_counted_from_the_start() -> None:
    drafting, plain = ready("decode-0"), ready("decode-1")
    drafting.load = Load(drafts=DraftCounts(5, 20, 9, (5, 3, 1), 0.25))
    found = told(instances=[drafting, plain])
    numbers = {
        "vllm:spec_decode_num_drafts_total": (5, 0),
        "vllm:spec_decode_num_draft_tokens_total": (20, 0),
        "vllm:spec_decode_num_accepted_tokens_total": (9, 0),
        "pd_cluster:spec_decode_drafting_seconds_total": (0.25, 0),
    }
    for name, of_each in numbers.items():
        assert found[name] == dict(zip([("decode-0",), ("decode-1",)], of_each, strict=True)), name
    positions = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert positions == {("decode-0", "0"): 5, ("decode-0", "1"): 3, ("decode-0", "2"): 1}


def test_what_requests_wait_for() -> None:
    """Waiting requests are divided into those whose prompts have not begun and those that wait for capacity."""
    both, none = ready("decode-0"), ready("decode-1")
    both.load = Load(num_waiting=7, num_expected=3)
    found = told(instances=[both, none])["vllm:num_requests_waiting_by_reason"]
    numbers = {"decode-0": {"capacity": 4, "deferred": 3}, "decode-1": {"capacity": 0, "deferred": 0}}
    assert found == {(name, reason): num for name, of in numbers.items() for reason, num in of.items()}


if __name__ == "__main__" and sys.argv[1:] == ["--fix"]:
    PAGE.write_text(page(), encoding="utf-8")
