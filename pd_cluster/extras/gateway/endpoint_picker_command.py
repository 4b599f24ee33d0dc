"""`pd-cluster endpoint-picker`: its signature. Imports nothing heavy, like cli.py."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Annotated

import typer

from pd_cluster.errors import ConfigError
from ranktable_tools.host_addresses import is_host

DEFAULT_PORT = 9002  # the port of the gateway extension's own picker
MOST_FALLBACKS = 8


def endpoint_picker(
    schedulers: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of public ports (plain HTTP), separated by commas; a name means all its addresses."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to bind gRPC to.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="gRPC port.")] = DEFAULT_PORT,
    interval: Annotated[float, typer.Option(min=0.05, max=60, help="Seconds between queries of the schedulers.")] = 0.5,
    timeout: Annotated[float, typer.Option(min=0.05, max=60, help="Seconds for a scheduler to answer a query.")] = 1.0,
    max_requests: Annotated[
        int, typer.Option(min=0, help="Maximum requests in flight at one scheduler; if all are full, 429. 0: no limit.")
    ] = 0,
    fallbacks: Annotated[
        int, typer.Option(min=0, max=MOST_FALLBACKS, help="Fallback endpoints in an answer, for gateways that retry.")
    ] = 0,
    metrics_key: Annotated[str, typer.Option(help="The schedulers' --metrics-key, if they have API keys.")] = "",
    ssl_certfile: Annotated[
        str, typer.Option(help="Certificate chain (PEM) for gRPC over TLS; read again when it changes.")
    ] = "",
    ssl_keyfile: Annotated[str, typer.Option(help="The certificate's private key (PEM).")] = "",
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for open streams after SIGTERM; a second SIGTERM ends them.")
    ] = 30.0,
    log_format: Annotated[str, typer.Option(help="Format of log lines: text or json.")] = "text",
) -> None:
    """Choose schedulers for gateways (Envoy's ext_proc).

    Prefer PD_CLUSTER_ENDPOINT_PICKER_METRICS_KEY to --metrics-key, because process lists show flags.
    """
    from pd_cluster.extras.gateway.picker_certificate import Certificate
    from pd_cluster.settings.http_settings import check_keys
    from pd_cluster.settings.log_setup import Logs

    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format {log_format!r}: expected text or json")
    addresses = [_address(each.strip()) for each in schedulers.split(",")]
    if bool(ssl_certfile) != bool(ssl_keyfile):
        raise ConfigError("--ssl-certfile and --ssl-keyfile: give both or neither")
    if metrics_key:
        check_keys("--metrics-key", [metrics_key])
    certificate = Certificate(ssl_certfile, ssl_keyfile) if ssl_keyfile else None
    if find_spec("grpc") is None or find_spec("google") is None or find_spec("google.protobuf") is None:
        raise ConfigError("endpoint-picker: grpcio is not installed; pip install 'pd-cluster[gateway]'")
    from pd_cluster.extras.gateway.picker_server import ListenAddress, serve
    from pd_cluster.extras.gateway.scheduler_choice import SchedulerChoice
    from pd_cluster.extras.gateway.scheduler_watch import SchedulerWatch

    Logs("INFO", "", "json" if log_format == "json" else "text").begin()
    choice = SchedulerChoice(max_requests, fallbacks)
    watch = SchedulerWatch(choice, addresses, interval, timeout, metrics_key)
    asyncio.run(serve(watch, choice, ListenAddress(host, port, certificate), drain_timeout))


def _address(written: str) -> tuple[str, int]:
    host, _, port = written.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--schedulers {written[:300]!r}: expected HOST:PORT of a scheduler's public port")
    if "%" in host:
        raise ConfigError(f"--schedulers {written[:300]!r}: gateways cannot use a scoped address; give another address")
    return host, int(port)
