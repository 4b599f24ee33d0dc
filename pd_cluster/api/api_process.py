"""One of several API processes: `python -m pd_cluster.api.api_process FD`.

FD is one end of a socket pair whose other end the scheduler holds. The process receives its configuration and the
instances, and reports its outstanding work (process_messages.py). It ends when the scheduler ends or asks it to.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec
import uvloop

from pd_cluster.api.admin.metrics_routes import MetricSources, busy_of
from pd_cluster.api.admin.timeline_routes import timeline_app
from pd_cluster.api.connections.http_server import make_server, serve_until_signal
from pd_cluster.api.files.files_api import most_nbytes_of
from pd_cluster.api.middleware.drain_middleware import Drain
from pd_cluster.api.middleware.file_keys import FileKeys, file_keys
from pd_cluster.api.public_app import in_background, public_app
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.members.membership_mirror import MembershipMirror
from pd_cluster.engine.start.rank_main import die_with_parent, leave_signals_to_parent
from pd_cluster.errors import PdClusterError
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.process_messages import ApiReport, Busy, Keys, PauseUpdate, Stop, ToApi
from pd_cluster.service.concurrency.interpreter_tuning import tune
from pd_cluster.service.serving_context import ServingContext
from pd_cluster.settings.process_configs import ApiProcessConfig
from pd_cluster.settings.routing_settings import ADMIN_CONNECTIONS

MAX_LINE_NBYTES = 16 << 20


async def serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel, limit=MAX_LINE_NBYTES)
    config = msgspec.json.decode(await reader.readline(), type=ApiProcessConfig)
    config.logs.begin()
    names = dict(config.adapters.names)  # the mirror changes it in place

    def roster_of(mailbox: Mailbox, checkpoint: Checkpoint) -> MembershipMirror:
        return MembershipMirror(mailbox, names, config.adapters.version)

    context = ServingContext(config.api, config.credentials, roster_of, config.index, names)
    mirror, service = context.roster, context.service()
    context.start()
    try:
        drain = Drain(config.api.timeouts.drain_timeout_s, context.router.end_all, stays=True)
        http, timelines = config.api.http, timeline_app(context.router.timelines, context.router.served)
        keys = None
        if config.keys is not None:
            keys = file_keys(config.keys, config.rates_fd, context.router.stats.tenants)
        app = public_app(service, mirror.instances, drain, keys, sources=MetricSources(lambda: mirror.totals))
        servers = [
            (
                make_server(
                    app, http.connections, http.root_path, http.tls, http.max_header_fields, most_nbytes_of(http)
                ),
                socket.socket(fileno=config.listener_fd),
            ),
            (make_server(timelines, ADMIN_CONNECTIONS), socket.socket(fileno=config.admin_fd)),
        ]
        stops: list[Callable[[], None]] = []

        def busy() -> Busy:
            return busy_of(context.router, drain, app.state.num_batch_lines())

        def own() -> ApiReport:
            return ApiReport(
                {},
                drain.is_idle,
                busy(),
                context.router.stats.snapshot(),
                context.router.adapters.use(),
                mirror.adapters_version,
                mirror.pause_version,
            )

        async def pause(news: PauseUpdate) -> None:
            await context.router.control_requests(news.gate, news.aborts, news.keeps)
            mirror.pause_version = news.version

        await pause(config.pause)
        listening = _listen(mirror, reader, stops, keys, pause)
        reporting = partial(
            mirror.run, own=own, busy=lambda: busy_of(context.router, drain, app.state.num_batch_lines())
        )
        until = _until(reporting, listening, writer, context.handler.fatal)
        async with in_background(app):
            await serve_until_signal(servers, until, drain.begin, drain, stops.append)
    finally:
        await service.close()
        context.mailbox.close()


async def _until(
    reporting: Callable[[Callable[[ApiReport], None]], Coroutine[Any, Any, None]],
    listening: Coroutine[Any, Any, None],
    writer: asyncio.StreamWriter,
    fatal: asyncio.Future[None],
) -> None:
    """Runs until `listening` ends, because the scheduler is gone, or until a part of this process fails."""

    def tell(report: ApiReport) -> None:
        writer.write(msgspec.json.encode(report) + b"\n")

    tasks = [asyncio.ensure_future(reporting(tell)), asyncio.ensure_future(listening)]
    try:
        done, _ = await asyncio.wait([*tasks, fatal], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(
    mirror: MembershipMirror,
    reader: asyncio.StreamReader,
    stops: Sequence[Callable[[], None]],
    keys: FileKeys | None,
    pause: Callable[[PauseUpdate], Awaitable[None]],
) -> None:
    """Applies the scheduler's messages until the scheduler is gone. A Stop message calls `stops`."""
    with contextlib.suppress(ConnectionError):
        while line := await reader.readline():
            news = msgspec.json.decode(line, type=ToApi)
            if isinstance(news, Stop):
                for stop in stops:
                    stop()
            elif isinstance(news, Keys):
                assert keys is not None, "keys received, but no key file is configured"
                keys.replace(news)
            elif isinstance(news, PauseUpdate):
                await pause(news)
            else:
                mirror.apply(news)


def main(fd: int) -> int:
    die_with_parent()
    leave_signals_to_parent()
    tune()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(socket.socket(fileno=fd)))
        except PdClusterError as error:
            print(f"pd-cluster: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
