"""The picker's gRPC server: Envoy's external processor, and gRPC's health service. The only module that knows grpc."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import grpc.aio

from pd_cluster.errors import ConfigError
from pd_cluster.gateway.choice import Choice
from pd_cluster.gateway.exchange import Exchange
from pd_cluster.gateway.messages import (
    HEALTH,
    NOT_SERVING,
    PROCESSOR,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from pd_cluster.gateway.watch import SchedulerWatch
from ranktable_tools.hosts import bracketed

log = logging.getLogger(__name__)

MOST_MESSAGE_NBYTES = 4 << 20
MOST_STREAMS = 16384
WATCH_S = 0.5
LIVENESS, READINESS = "liveness", "readiness"


class Listening(NamedTuple):
    """`pair`: private key and certificate chain in PEM; None: no TLS."""

    host: str
    port: int
    pair: tuple[bytes, bytes] | None = None


class Picker:
    """Answers every stream by its own `Exchange`. `handlers`: of the two services."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.is_ending = False
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        coded = HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        checks = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, *coded),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, *coded),
        }
        self.handlers = (
            grpc.method_handlers_generic_handler(PROCESSOR, {"Process": process}),
            grpc.method_handlers_generic_handler(HEALTH, checks),
        )

    async def _process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        exchange = Exchange(self._choice)
        async for request in requests:
            answer = exchange.answer(request)
            if answer is not None:
                yield answer
            if exchange.is_over:
                return

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return SERVING
        if service not in ("", READINESS, PROCESSOR):
            return SERVICE_UNKNOWN
        return SERVING if self._choice.is_ready and not self.is_ending else NOT_SERVING

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told = -1
        while True:
            if (status := self._status(request.service)) != told:
                told = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_S)


async def serve(watch: SchedulerWatch, choice: Choice, listening: Listening, drain_s: float) -> None:
    """Serves until SIGTERM or SIGINT, then for at most `drain_s` more. Raises ConfigError for a port it cannot bind."""
    picker = Picker(choice)
    server = grpc.aio.server(
        handlers=picker.handlers,
        options=(("grpc.max_receive_message_length", MOST_MESSAGE_NBYTES), ("grpc.so_reuseport", 0)),
        maximum_concurrent_rpcs=MOST_STREAMS,
    )
    where = f"{bracketed(listening.host)}:{listening.port}"
    try:
        if listening.pair is None:
            port = server.add_insecure_port(where)
        else:
            port = server.add_secure_port(where, grpc.ssl_server_credentials([listening.pair]))
    except RuntimeError as error:
        raise ConfigError(f"--port: {where} cannot be bound: {error}") from None
    loop, ends = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends.set)
    await server.start()
    log.info("picks endpoints at %s:%d", bracketed(listening.host), port)
    looking = asyncio.create_task(watch.run())
    waiting = asyncio.create_task(ends.wait())
    await asyncio.wait((looking, waiting), return_when=asyncio.FIRST_COMPLETED)
    picker.is_ending = True
    await server.stop(drain_s)
    for task in (looking, waiting):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking  # raises its error
