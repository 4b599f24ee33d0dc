"""Checks that connections leave nothing behind at a real listener."""

from __future__ import annotations

import asyncio
import gc

import uvloop
from starlette.types import Receive, Scope, Send

from pd_cluster.api.connections.http_protocol import GuardedProtocol
from pd_cluster.api.connections.http_server import bind, make_server
from tests.support.until import until


def test_a_connection_that_has_ended_leaves_nothing_for_the_collector() -> None:
    """A closed connection must not need the garbage collector, which runs so rarely that tens of MB would pile up."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})

    async def visit(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"hi")
        writer.close()
        await writer.wait_closed()

    def protocols() -> list[GuardedProtocol]:
        return [each for each in gc.get_objects() if type(each) is GuardedProtocol]

    async def test() -> None:
        listener = bind("127.0.0.1", 0)
        server = make_server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started, 0.001)
            gc.collect()
            gc.disable()
            before = len(protocols())
            for _ in range(20):
                await visit(listener.getsockname()[1])
            await until(lambda: not server.limiter.num_open, 0.001)
            await asyncio.sleep(0)
            assert len(protocols()) <= before + 1  # the event loop may still refer to the last one
        finally:
            gc.enable()
            server.should_exit = True
            await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 20))
