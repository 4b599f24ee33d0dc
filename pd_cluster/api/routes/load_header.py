"""The header of answers that tells load balancers the cluster's load, in ORCA's format.

The load includes other clients' requests, so the header is left out if /metrics is closed.
"""

from __future__ import annotations

import msgspec
from fastapi import Request

from pd_cluster.service.text_service import TextService

FORMAT_HEADER, LOAD_HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"


def load_header(http: Request, service: TextService) -> dict[str, str]:
    """Returns the header in the format that the request asks for, TEXT or JSON; empty for other requests."""
    form, settings = http.headers.get(FORMAT_HEADER), service.settings.http
    if form is None or settings.has_keys or settings.metrics_key or form.upper() not in ("TEXT", "JSON"):
        return {}
    loads = [each.load for each in service.router.membership.instances if each.is_ready]
    numbers = {
        "kv_cache_usage_perc": max((load.num_held_blocks / max(1, load.num_blocks) for load in loads), default=0.0),
        "num_requests_waiting": sum(load.num_waiting for load in loads) + service.router.admission.num_waiting,
    }
    if form.upper() == "JSON":
        return {LOAD_HEADER: f"JSON {msgspec.json.encode({'named_metrics': numbers}).decode()}"}
    return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in numbers.items())}
