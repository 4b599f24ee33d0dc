"""One API process of several: `python -m pd_cluster.api.api_process FD`.

FD is one end of a socket pair whose other end the scheduler holds: down come the configuration and who is in the
cluster, up goes what is outstanding (reports.py). It ends with the scheduler, or when it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec
import uvloop

from pd_cluster.api.drain import Drain
from pd_cluster.api.edge import Edge
from pd_cluster.api.interpreter import tune
from pd_cluster.api.metrics import busy_of
from pd_cluster.api.public_app import public_app
from pd_cluster.api.server import make_server, serve_until_signal
from pd_cluster.api.timelines import timeline_app
from pd_cluster.cluster.mirror import Mirror
from pd_cluster.config import ADMIN_CONNECTIONS, ApiProcessConfig
from pd_cluster.engine.process import die_with_parent
from pd_cluster.errors import PdClusterError
from pd_cluster.reports import ApiReport, Stop, ToApi

MAX_LINE_NBYTES = 16 << 20


async def serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel, limit=MAX_LINE_NBYTES)
    config = msgspec.json.decode(await reader.readline(), type=ApiProcessConfig)
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    edge = Edge(config.api, config.credentials, config.index)
    mirror = Mirror(edge.mailbox, edge.router.on_lost, edge.router.move_on)
    service = edge.over(mirror)
    edge.mailbox.start()
    try:
        drain = Drain(config.api.timeouts.drain_timeout_s, edge.router.end_all, stays=True)
        http, timelines = config.api.http, timeline_app(edge.router.timelines)
        app = public_app(service, mirror.instances, config.api.is_openai, drain, http, lambda: mirror.totals)
        servers = [
            (make_server(app, http.connections, http.root_path, http.tls), socket.socket(fileno=config.listener_fd)),
            (make_server(timelines, ADMIN_CONNECTIONS), socket.socket(fileno=config.admin_fd)),
        ]
        stops: list[Callable[[], None]] = []

        def own() -> ApiReport:
            return ApiReport({}, drain.is_idle, busy_of(edge.router, drain), edge.router.stats.snapshot())

        until = _until(mirror, reader, writer, edge.handler.fatal, own, stops)
        await serve_until_signal(servers, until, drain.begin, drain, stops.append)
    finally:
        await service.close()
        edge.mailbox.close()


async def _until(
    mirror: Mirror,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    fatal: asyncio.Future[None],
    own: Callable[[], ApiReport],
    stops: Sequence[Callable[[], None]],
) -> None:
    """Until the scheduler is gone, or something here has failed. `stops` are called when it says so."""

    def tell(report: ApiReport) -> None:
        writer.write(msgspec.json.encode(report) + b"\n")

    tasks = [
        asyncio.ensure_future(mirror.run(tell, own)),
        asyncio.ensure_future(_listen(mirror, reader, stops)),
    ]
    try:
        done, _ = await asyncio.wait([*tasks, fatal], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(mirror: Mirror, reader: asyncio.StreamReader, stops: Sequence[Callable[[], None]]) -> None:
    with contextlib.suppress(ConnectionError):
        while line := await reader.readline():
            news = msgspec.json.decode(line, type=ToApi)
            if isinstance(news, Stop):
                for stop in stops:
                    stop()
            else:
                mirror.hear(news)


def main(fd: int) -> int:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they reach whole groups; the scheduler decides
        signal.signal(number, signal.SIG_IGN)
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
