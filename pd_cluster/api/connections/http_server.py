"""Runs uvicorn servers on sockets that are bound beforehand: a port in use then gives one clear line and exit code 1.

Accepts connections itself, because the event loop would accept all waiting connections before examining any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from pd_cluster import host
from pd_cluster.api.connections.connection_limiter import ConnectionLimiter
from pd_cluster.api.connections.http_protocol import MAX_FIELDS, GuardedProtocol, RequestLimits, probes_under
from pd_cluster.api.connections.listener import Listener
from pd_cluster.api.connections.refusals import RefusalLog
from pd_cluster.errors import ConfigError, called, listening_fault
from pd_cluster.net.tls_files import TlsFiles
from pd_cluster.service.concurrency.fair_thread_pool import FairThreadPool
from pd_cluster.settings.http_settings import Tls
from pd_cluster.settings.routing_settings import ConnectionLimits

BACKLOG = 2048
NUM_FAIR_THREADS = 8  # threads for blocking calls, most of which only wait
DEFAULT_LIMITS = ConnectionLimits()
CLOSE_TIMEOUT_S = 3  # the time that connections have to close after the listener
TICKS_A_SECOND = 10  # uvicorn's rate
NUM_OWN_DESCRIPTORS = 192  # descriptors for the process itself, in addition to those for connections
UNREAD_TIMEOUT_S = 120  # a client that reads nothing for this long loses its connection

log = logging.getLogger(__name__)


def bind_several(host: str, port: int, count: int) -> list[socket.socket]:
    """Binds several sockets to one port, one per process; the kernel spreads connections. Raises ConfigError."""
    if count == 1:
        return [bind(host, port)]
    bind(host, port).close()  # raises if the port is in use, which the shared sockets below would not notice
    return [bind(host, port, is_shared=True) for _ in range(count)]


def bind_unix(path: Path) -> socket.socket:
    """Returns a listening Unix socket, open to all users who may enter its folder. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ConfigError(f"cannot listen at {path}: {error}; is TMPDIR too long?") from None
    listener.listen(BACKLOG)
    return listener


def bind_path(path: str, count: int) -> list[socket.socket]:
    """Returns Unix sockets at this path, one per process, which share a queue of connections. Raises ConfigError.

    Replaces a stale socket at this path.
    """
    where = f"{called('uds')} {path}"
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            if not stat.S_ISSOCK(Path(path).stat().st_mode):
                raise ConfigError(f"{where}: an existing file is not a socket; choose another path") from None
            Path(path).unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"{where}: cannot listen there: {error}") from None
        else:
            raise ConfigError(f"{where}: another process listens there; stop it or choose another path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError as error:
        raise ConfigError(f"{where}: cannot listen there: {error}") from None
    listener.listen(BACKLOG)
    return [listener, *(listener.dup() for _ in range(count - 1))]


def bind(host: str, port: int, flag: str = "--port", is_shared: bool = False) -> socket.socket:
    """Returns a listening TCP socket. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
    # Connections inherit both options. Without TCP_NODELAY each token may wait for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_S * 1000)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"{flag} {port}: cannot listen at {host}: {listening_fault(error)}") from None
    return listener


class Finishing(Protocol):
    """Work that the server finishes after the first signal."""

    async def finish(self, hurry: asyncio.Event) -> None:
        """Waits until all work is done, or until shortly after `hurry` is set."""


class Server(uvicorn.Server):
    """Leaves signals to `serve_until_signal`, and admission to a connection limiter."""

    def __init__(
        self,
        config: uvicorn.Config,
        limiter: ConnectionLimiter,
        limits: RequestLimits,
        tls: TlsFiles | None,
    ) -> None:
        super().__init__(config)
        self.limiter = limiter
        self._refusals = RefusalLog()
        self._limits = limits
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(FairThreadPool(NUM_FAIR_THREADS, name="requests"))  # clients take turns
        accepting = [
            Listener(listener, self._protocol, self.limiter, self._refusals, self._tls, loop)
            for listener in sockets or ()
        ]
        self.servers = accepting  # type: ignore[assignment]  # uvicorn only closes these
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if not counter % TICKS_A_SECOND:
            self.limiter.sweep()
            self._refusals.tell()
            if self._tls is not None:
                self._tls.refresh()
        return await super().on_tick(counter)

    def _protocol(self) -> GuardedProtocol:
        return GuardedProtocol(
            self.limiter,
            self._refusals,
            self._limits,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


def make_server(
    app: ASGIApp,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    root_path: str = "",
    tls: Tls | None = None,
    most_fields: int = MAX_FIELDS,
    uploads: Mapping[bytes, int] = MappingProxyType({}),
) -> Server:
    """Creates a server. Raises ConfigError for unusable TLS files."""
    config = uvicorn.Config(
        app,
        loop="none",  # the caller chooses the loop
        http=GuardedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        log_config=None,  # its warnings go to this process's log
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # no code uses forwarded addresses
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        timeout_keep_alive=75,
    )
    num_descriptors, _ = host.open_files()
    files = TlsFiles(tls) if tls is not None else None
    requests = RequestLimits(probes_under(root_path), most_fields, uploads)
    return Server(config, ConnectionLimiter(limits, num_descriptors), requests, files)


def raise_descriptor_limit(limits: ConnectionLimits) -> None:
    """Raises the limit of open files as far as needed and allowed. Child processes inherit it."""
    needed = limits.total + limits.spare + limits.num_kept_descriptors + NUM_OWN_DESCRIPTORS
    if (allowed := host.raise_open_files(needed)) < needed:
        log.warning(
            "--max-connections %d: this process may open only %d files, so it admits fewer; raise the hard limit "
            "(ulimit -Hn %d)",
            limits.total,
            allowed,
            needed,
        )


def _listen_to_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def serve_until_signal(
    servers: Sequence[tuple[uvicorn.Server, socket.socket]],
    until: Awaitable[None] | None = None,
    signalled: Callable[[], None] = lambda: None,
    drain: Finishing | None = None,
    listen: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then keeps listening until `drain` has finished; a second signal ends at once.

    With `listen` the caller handles signals: `listen` gets the function that must be called for each signal.
    `signalled` is called at the first signal. When `until` ends, everything ends at once, and its exception is raised.
    """
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        if not stopping.is_set():
            signalled()
            stopping.set()
            return
        hurry.set()
        for server, _ in servers:
            server.force_exit = server.should_exit  # it is already closing

    (listen or _listen_to_signals)(stop)
    serving = [asyncio.ensure_future(server.serve(sockets=[listener])) for server, listener in servers]
    watched = [asyncio.ensure_future(until)] if until is not None else []
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([stopped, *watched, *serving], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.is_set():
            hurry.set()
        if drain is not None:
            await _finish(drain, hurry, watched)
    finally:
        for server, _ in servers:
            server.force_exit = hurry.is_set() or not stopping.is_set()
            server.should_exit = True
        for task in (stopped, *watched):
            task.cancel()
        await asyncio.gather(*serving)
        results = await asyncio.gather(*watched, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _finish(drain: Finishing, hurry: asyncio.Event, watched: Sequence[asyncio.Future[None]]) -> None:
    finishing = asyncio.ensure_future(drain.finish(hurry))
    await asyncio.wait([finishing, *watched], return_when=asyncio.FIRST_COMPLETED)
    if not finishing.done():
        hurry.set()
    await finishing
