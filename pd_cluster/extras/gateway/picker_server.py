"""The picker's gRPC server: Envoy's external processor, and gRPC's health service. No other module imports grpc."""

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
from pd_cluster.extras.gateway.envoy_names import HEALTH, NOT_SERVING, PROCESSOR, SERVICE_UNKNOWN, SERVING
from pd_cluster.extras.gateway.messages_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from pd_cluster.extras.gateway.picker_certificate import Certificate, Pair
from pd_cluster.extras.gateway.picker_exchange import Exchange
from pd_cluster.extras.gateway.scheduler_choice import SchedulerChoice
from pd_cluster.extras.gateway.scheduler_watch import SchedulerWatch
from ranktable_tools.host_addresses import bracketed

log = logging.getLogger(__name__)

MOST_MESSAGE_NBYTES = 4 << 20
MOST_STREAMS, MOST_WATCHES = 16384, 1024
WATCH_S = 0.5
LIVENESS, READINESS = "liveness", "readiness"


class ListenAddress(NamedTuple):
    """The address to listen at. Without a certificate, TLS is off."""

    host: str
    port: int
    certificate: Certificate | None = None

    def add_to(self, server: grpc.aio.Server) -> int:
        """Adds the port and returns it. Raises ConfigError if it cannot be bound."""
        where = f"{bracketed(self.host)}:{self.port}"
        try:
            if self.certificate is None:
                return int(server.add_insecure_port(where))
            return int(server.add_secure_port(where, _credentials(self.certificate)))
        except RuntimeError as error:
            raise ConfigError(f"--port: {where} cannot be bound: {error}") from None


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Returns credentials that ask for a renewed certificate at each handshake."""

    def configured(pair: Pair | None) -> Any:
        return None if pair is None else grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(configured(certificate.pair), lambda: configured(certificate.renewed()))


class Picker:
    """Answers each stream with its own `Exchange`. `handlers`: the handlers of the two services."""

    def __init__(self, choice: SchedulerChoice) -> None:
        self._choice = choice
        self._num_streams = self._num_watches = 0
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
        if self._num_streams >= MOST_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_STREAMS} streams are open")
        self._num_streams += 1
        try:
            exchange = Exchange(self._choice)
            async for request in requests:
                answer = exchange.answer(request)
                if answer is not None:
                    yield answer
                if exchange.is_over:
                    return
        finally:
            self._num_streams -= 1

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
        if self._num_watches >= MOST_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHES} watches are open")
        self._num_watches += 1
        try:
            told, is_last = -1, False
            while not is_last:
                is_last = self.is_ending  # read before the status is sent, because ending may begin while it is sent
                if (status := self._status(request.service)) != told:
                    told = status
                    yield HealthCheckResponse(status=status)
                if not is_last:  # the drain must not wait for health watches
                    await asyncio.sleep(WATCH_S)
        finally:
            self._num_watches -= 1


async def serve(watch: SchedulerWatch, choice: SchedulerChoice, listening: ListenAddress, drain_s: float) -> None:
    """Serves until SIGTERM or SIGINT, then for at most `drain_s` more, or until a second signal.

    Raises ConfigError for a port that cannot be bound. If an error ends the watch, stops and raises that error.
    """
    picker = Picker(choice)
    server = grpc.aio.server(
        handlers=picker.handlers,
        options=(("grpc.max_receive_message_length", MOST_MESSAGE_NBYTES), ("grpc.so_reuseport", 0)),
    )
    port = listening.add_to(server)
    loop, signals = asyncio.get_running_loop(), asyncio.Semaphore(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.release)
    await server.start()
    log.info("picks endpoints at %s:%d", bracketed(listening.host), port)
    looking = asyncio.create_task(watch.run())
    await _ended_or_signalled(looking, signals)
    picker.is_ending = True
    if not looking.done():
        await _ended_or_signalled(asyncio.create_task(server.stop(drain_s)), signals)
    await server.stop(None)
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking  # re-raises its error


async def _ended_or_signalled(task: asyncio.Task[Any], signals: asyncio.Semaphore) -> None:
    """Waits for the task's end or for one signal; a second signal stays available for the next call."""
    told = asyncio.create_task(signals.acquire())
    await asyncio.wait((task, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
