"""`/metrics` for Prometheus, and `/load`: figures of instances from heartbeats, counts of requests from all API
processes.

metric_tables.py defines the metrics. Knows nothing of counting or of the exchange of counts between processes.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pd_cluster.api.admin import metric_tables as tables
from pd_cluster.api.admin.metric_tables import (
    OfInstance,
    OfInstanceParts,
    OfInstancePositions,
    OfInstanceSteps,
    OfRequests,
)
from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.drain_middleware import Drain
from pd_cluster.api.middleware.http_bodies import LOOKING, json_of
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.records.request_stats import BOUNDS
from pd_cluster.cluster.routing.router import Router
from pd_cluster.cluster.tenancy.tenant_counts import by_tenant
from pd_cluster.errors import Unavailable
from pd_cluster.process_messages import AdapterUse, AllStats, Buckets, Busy, Stats
from pd_cluster.service.files.batch_states import RequestCounts
from pd_cluster.types import ROLES, Role

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Totals = Callable[[], AllStats | None]
Further = Callable[[AllStats], Awaitable[bytes]]
Owner = tuple[str, bool]  # a scheduler's name, and whether it owns membership
ONLY_ONE: Owner = ("scheduler", True)
Family = GaugeMetricFamily | CounterMetricFamily


class ServerLoad(Struct):
    server_load: Annotated[int, Meta(description="In all API processes together.")]


@dataclass(frozen=True, slots=True)
class MetricSources:
    """Figures from outside this process.

    `totals`: the counts of all API processes; None: there is only this process. `owner`: this scheduler's name, and
    whether it owns membership.
    """

    totals: Totals | None = None
    owner: Callable[[], Owner] = lambda: ONLY_ONE


THIS_PROCESS = MetricSources()


def metrics_routes(
    router: Router,
    instances: Sequence[Instance],
    model_name: str,
    drain: Drain,
    sources: MetricSources = THIS_PROCESS,
    further: Sequence[Further] = (),
) -> APIRouter:
    """`further`: optional metrics."""
    totals = sources.totals
    routes = APIRouter(route_class=PlainRoute)

    def told() -> AllStats:
        found = AllStats(router.stats.snapshot(), Busy(), 1) if totals is None else totals()
        if found is None:  # counts below those of another process's last answer would look like a restart
            raise Unavailable("this process has just started and does not know the other processes' counts yet")
        return found

    @routes.api_route(
        "/metrics",
        methods=LOOKING,
        summary="For Prometheus.",
        response_class=PlainTextResponse,
        response_description="OK",
    )
    async def metrics(request: Request) -> Response:
        found = told()
        body = metrics_of(instances, model_name, found, busy_of(router, drain), sources.owner())
        for more in further:
            body += await more(found)
        return Response(body, media_type=METRICS_MEDIA_TYPE)

    @routes.api_route("/load", methods=LOOKING, openapi_extra=Operation("Requests in flight.", ServerLoad))
    async def load(request: Request) -> Response:
        return json_of(ServerLoad(drain.num_running + told().others.num_requests))

    return routes


@dataclass(frozen=True, slots=True)
class AdapterNaming:
    """`digests`: current names of adapters -> digests. `most`: --max-loras."""

    digests: Mapping[str, str]
    most: int

    def metric(self, *uses: AdapterUse) -> bytes:
        """Returns the metric of adapters in use. It is a single series, as expected by gateways that route by it."""
        running = self._names(digest for use in uses for digest in use.running)
        waiting = self._names(digest for use in uses for digest in use.waiting)
        of = tables.ADAPTERS
        family = GaugeMetricFamily(
            of.name, of.text, labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        )
        family.add_metric([str(self.most), running, waiting], time.time())
        return _text_of(family)

    def _names(self, digests: Iterable[str]) -> str:
        used = set(digests)
        return ",".join(sorted(name for name, digest in self.digests.items() if digest in used))


def batch_lines_metric(model_name: str, counts: RequestCounts, num_running: int) -> bytes:
    """Returns the metric of the lines of unfinished batches. `num_running`: those being answered."""
    of = tables.BATCH_LINES
    family = GaugeMetricFamily(of.name, of.text, labels=["model_name", "state"])
    num_answered = counts.completed + counts.failed
    num_running = min(num_running, counts.total - num_answered)  # the counts are updated only once a second
    waiting = counts.total - num_answered - num_running
    for state, number in (("waiting", waiting), ("running", num_running), ("answered", num_answered)):
        family.add_metric([model_name, state], number)
    return _text_of(family)


def _text_of(family: Metric) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Only(family))
    return generate_latest(registry)


@dataclass(frozen=True, slots=True, eq=False)
class _Only(Collector):
    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


def busy_of(router: Router, drain: Drain, num_batch_lines: int = 0) -> Busy:
    waiting = router.num_waiting, router.admission.num_waiting_tokens
    return Busy(drain.num_running, router.num_streams, *waiting, num_batch_lines)


def metrics_of(
    instances: Sequence[Instance], model_name: str, told: AllStats, own: Busy, owner: Owner = ONLY_ONE
) -> bytes:
    """Returns the exposition text. An instance's counters restart when it does. `own`: this process's current work."""
    registry = CollectorRegistry()
    registry.register(_Cluster(instances, model_name, told, own, owner))
    return generate_latest(registry)


class _Cluster(Collector):
    def __init__(self, instances: Sequence[Instance], model_name: str, told: AllStats, own: Busy, owner: Owner) -> None:
        self._instances = instances
        self._model_name = model_name
        self._told = told
        self._own = own
        self._owner = owner

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "instance_id"]
        for of in tables.INSTANCE_GAUGES:
            yield self._of_instances(GaugeMetricFamily(of.name, of.text, labels=labels), of)
        for parts in tables.INSTANCE_PARTS:
            yield self._parts(parts)
        for steps in tables.INSTANCE_HISTOGRAMS:
            yield self._steps(steps)
        for of in tables.INSTANCE_COUNTERS:
            yield self._of_instances(CounterMetricFamily(of.name, of.text, labels=labels), of)
        for positions in tables.INSTANCE_POSITIONS:
            yield self._positions(positions)
        for counter in tables.REQUEST_COUNTERS:
            yield self._counter(counter, self._told.stats)
        for counter in tables.TENANT_COUNTERS:
            yield self._tenants(counter, self._told.stats)
        for histogram in tables.HISTOGRAMS:
            yield self._histogram(histogram, self._told.stats)
        yield self._cache_config()
        yield self._sleep_states()
        yield self._weights()
        yield self._units()
        yield self._states()
        yield self._backlog()
        own, others = self._own, self._told.others
        for each, value in (
            (tables.OPEN_STREAMS, own.num_streams + others.num_streams),
            (tables.QUEUED_REQUESTS, own.num_waiting + others.num_waiting),
            (tables.QUEUED_TOKENS, own.num_waiting_tokens + others.num_waiting_tokens),
            (tables.API_PROCESSES, self._told.num_api_processes),
        ):
            family = GaugeMetricFamily(each.name, each.text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        name, is_owner = self._owner
        family = GaugeMetricFamily(
            tables.OWNS_MEMBERSHIP.name, tables.OWNS_MEMBERSHIP.text, labels=["model_name", "scheduler"]
        )
        family.add_metric([self._model_name, name], int(is_owner))
        yield family

    def _of_instances(self, family: Family, of: OfInstance) -> Family:
        for instance in self._instances:
            if instance.is_ready:
                family.add_metric([self._model_name, instance.name], of.read(instance.load))
        return family

    def _parts(self, of: OfInstanceParts) -> GaugeMetricFamily:
        family = GaugeMetricFamily(of.name, of.text, labels=["model_name", "instance_id", of.label])
        for instance in self._instances:
            if instance.is_ready:
                for value, read in of.reads.items():
                    family.add_metric([self._model_name, instance.name, value], read(instance.load))
        return family

    def _positions(self, of: OfInstancePositions) -> CounterMetricFamily:
        family = CounterMetricFamily(of.name, of.text, labels=["model_name", "instance_id", of.label])
        for instance in self._instances:
            if instance.is_ready:
                for at, number in enumerate(of.read(instance.load)):
                    family.add_metric([self._model_name, instance.name, str(at)], number)
        return family

    def _steps(self, of: OfInstanceSteps) -> HistogramMetricFamily:
        family = HistogramMetricFamily(of.name, of.text, labels=["model_name", "instance_id"])
        for instance in self._instances:
            if instance.is_ready:
                tally = of.read(instance.load)
                labels = [self._model_name, instance.name]
                family.add_metric(labels, _buckets(of.bounds, tally.counts or [0] * (len(of.bounds) + 1)), tally.total)
        return family

    def _counter(self, of: OfRequests, stats: Stats) -> CounterMetricFamily:
        labels = ["model_name", of.label] if of.label else ["model_name"]
        family = CounterMetricFamily(of.name, of.text, labels=labels)
        for value, name in of.numbers.items():
            family.add_metric([self._model_name, value][: len(labels)], stats.counters.get(name, 0))
        return family

    def _tenants(self, of: OfRequests, stats: Stats) -> CounterMetricFamily:
        """Returns counts by tenant; empty without API keys."""
        labels = ["model_name", "tenant", *([of.label] if of.label else [])]
        family = CounterMetricFamily(of.name, of.text, labels=labels)
        for value, name in of.numbers.items():
            for tenant, number in by_tenant(stats.counters, name).items():
                family.add_metric([self._model_name, tenant, value][: len(labels)], number)
        return family

    def _histogram(self, of: OfRequests, stats: Stats) -> HistogramMetricFamily:
        family = HistogramMetricFamily(of.name, of.text, labels=["model_name"])
        for name in of.numbers.values():
            counted = stats.histograms.get(name, Buckets([0] * (len(BOUNDS[name]) + 1), 0))
            family.add_metric([self._model_name], _buckets(BOUNDS[name], counted.counts), counted.total_e6 / 1e6)
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        of = tables.CACHE_CONFIG
        of_cache = ["block_size", "num_gpu_blocks", "cache_dtype", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
        family = GaugeMetricFamily(of.name, of.text, labels=["model_name", "instance_id", *of_cache])
        for each in self._instances:
            if each.is_ready and each.info is not None and (layout := each.info.layout) is not None:
                num_tokens = each.info.num_blocks * layout.block_size
                values = (layout.block_size, each.info.num_blocks, layout.dtype, num_tokens)
                most = f"{num_tokens / max(1, each.info.max_model_len):.2f}"
                family.add_metric([self._model_name, each.name, *map(str, values), most], 1)
        return family

    def _sleep_states(self) -> GaugeMetricFamily:
        of = tables.SLEEP_STATE
        family = GaugeMetricFamily(of.name, of.text, labels=["model_name", "instance_id", "sleep_state"])
        for each in self._instances:
            if each.is_ready:
                for level, state in enumerate(tables.SLEEP_STATES):
                    is_it = each.load.sleep_level == level
                    family.add_metric([self._model_name, each.name, state], is_it)
        return family

    def _weights(self) -> GaugeMetricFamily:
        of = tables.WEIGHTS_EPOCH
        family = GaugeMetricFamily(of.name, of.text, labels=["model_name", "instance_id", "weight_version"])
        for each in self._instances:
            if each.is_ready:
                held = each.load.weights.held
                family.add_metric([self._model_name, each.name, held.name or "default"], held.epoch)
        return family

    def _units(self) -> GaugeMetricFamily:
        """Returns each instance's place in its unit, even while it is not ready."""
        of = tables.UNIT
        family = GaugeMetricFamily(
            of.name, of.text, labels=["model_name", "instance_id", "unit", "unit_rank", "unit_size"]
        )
        for each in self._instances:
            if each.unit:
                place = each.unit, str(each.unit_rank), str(each.unit_size)
                family.add_metric([self._model_name, each.name, *place], 1)
        return family

    @property
    def _roles(self) -> list[Role]:
        """Returns the roles to count; "encode" only if there are encoders, so that an alert on 0 makes sense."""
        return [role for role in ROLES if role != "encode" or any(each.role == role for each in self._instances)]

    def _states(self) -> GaugeMetricFamily:
        """Counts instances by role and state, including zeros: an alert needs an existing series."""
        of = tables.INSTANCES
        family = GaugeMetricFamily(of.name, of.text, labels=["model_name", "role", "state"])
        found = Counter[tuple[str, str]]((instance.role, instance.shown_state) for instance in self._instances)
        for role, state in itertools.product(self._roles, tables.STATES):
            family.add_metric([self._model_name, role, state], found[role, state])
        return family

    def _backlog(self) -> GaugeMetricFamily:
        of = tables.BACKLOG_TOKENS
        family = GaugeMetricFamily(of.name, of.text, labels=["model_name", "role"])
        for role in self._roles:
            ahead = sum(each.tokens_ahead for each in self._instances if each.role == role and each.is_ready)
            family.add_metric([self._model_name, role], ahead)
        return family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Returns bounds as Prometheus writes them, each with the count of all values up to it."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, itertools.accumulate(counts), strict=True))
