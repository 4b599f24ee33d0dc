"""`/metrics` for Prometheus: what the workers' heartbeats say, under the names that dashboards for vLLM query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pd_cluster.cluster.instance import Instance
from pd_cluster.wire import Load

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Read = Callable[[Load], float]

GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("vllm:num_requests_running", "Sequences that take part in steps.", lambda load: load.num_running),
    ("vllm:num_requests_waiting", "Requests that wait for room.", lambda load: load.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that requests hold, 0 to 1.",
        lambda load: load.num_held_blocks / max(1, load.num_blocks),
    ),
    ("pd_cluster:num_cached_blocks", "KV blocks kept for later requests.", lambda load: load.num_cached_blocks),
    (
        "pd_cluster:num_swapped_blocks",
        "KV blocks of preempted requests in host memory.",
        lambda load: load.num_swap_blocks - load.num_free_swap_blocks,
    ),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda x: x.num_prefix_query_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda load: load.num_prefix_hit_tokens),
    ("vllm:num_preemptions", "Requests that gave way to older ones.", lambda load: load.num_preemptions),
    ("pd_cluster:kv_sent_bytes", "KV cache sent to decode instances.", lambda load: load.kv_sent_nbytes),
    ("pd_cluster:kv_received_bytes", "KV cache received from prefill instances.", lambda load: load.kv_received_nbytes),
    (
        "pd_cluster:kv_frames_dropped",
        "KV headers that were replayed, forged, out of order or not decodable.",
        lambda load: load.num_dropped_kv_frames,
    ),
)


class _Loads(Collector):
    def __init__(self, instances: Sequence[Instance], model_name: str) -> None:
        self._instances = instances
        self._model_name = model_name

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        labels = ["model_name", "instance_id"]
        for name, text, read in GAUGES:
            yield self._filled(GaugeMetricFamily(name, text, labels=labels), read)
        for name, text, read in COUNTERS:
            yield self._filled(CounterMetricFamily(name, text, labels=labels), read)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, read: Read
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for instance in self._instances:
            if instance.is_ready:
                family.add_metric([self._model_name, instance.name], read(instance.load))
        return family


def metrics_of(instances: Sequence[Instance], model_name: str) -> bytes:
    """The exposition text. A counter starts again from 0 when its instance does."""
    registry = CollectorRegistry()
    registry.register(_Loads(instances, model_name))
    return generate_latest(registry)
