"""Runs uvicorn servers on sockets that are bound first, so that a taken port is one clear line and exit code 1."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Awaitable, Callable, Generator

import uvicorn
from fastapi import FastAPI

from pd_cluster.errors import ConfigError

BACKLOG = 2048
UNREAD_TIMEOUT_S = 120  # a client that takes nothing of what was sent to it for so long loses its connection


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that say they are TCP; without it each token may wait for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_S * 1000)  # connections inherit it
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is taken; stop what listens there or choose another" if taken else str(error)
        raise ConfigError(f"{flag} {port}: cannot listen at {host}: {reason}") from None
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to `serve_until_signal`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_server(app: FastAPI, drain_timeout_s: float) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        loop="none",  # whoever serves has chosen it
        http="httptools",
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # nobody asks who the client is
        timeout_graceful_shutdown=int(drain_timeout_s) + 2,  # after `drained` has ended the streams in-band
        timeout_keep_alive=75,
    )
    return _Server(config)


async def serve_until_signal(
    servers: list[tuple[uvicorn.Server, socket.socket]],
    until: Awaitable[None] | None = None,
    drained: Callable[[], None] = lambda: None,
    drain_timeout_s: float = 0.0,
    signalled: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests end; a second signal ends at once.

    `signalled` is called at the first signal, `drained` when the drain's time is up: it must end what still runs.
    `until` ends all of it at once, and may raise.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(now: bool = False) -> None:
        if not stopping.is_set():
            loop.call_later(drain_timeout_s, drained)
            if not now:
                signalled()
        for server, _ in servers:
            server.force_exit = now or stopping.is_set()
            server.should_exit = True
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    serving = [asyncio.ensure_future(server.serve(sockets=[listener])) for server, listener in servers]
    watched = [asyncio.ensure_future(until)] if until is not None else []
    waiting = [asyncio.ensure_future(stopping.wait()), *watched]
    try:
        await asyncio.wait([*waiting, *serving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not stopping.is_set():
            drained()
            stop(now=True)
        for task in waiting:
            if not task.done():
                task.cancel()
        await asyncio.gather(*serving)
        results = await asyncio.gather(*watched, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
