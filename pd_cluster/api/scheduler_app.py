"""The scheduler instance put together: who is in the cluster, and who serves requests. Never imports torch.

With one API process that is this one; with several they are children (cluster/api_processes.py), and this one asks the
workers, drains, changes roles, and answers at the admin port.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from msgspec.structs import replace

from pd_cluster.api.admin_app import AdminAccess, admin_app
from pd_cluster.api.drain import Drain
from pd_cluster.api.edge import Edge
from pd_cluster.api.public_app import public_app
from pd_cluster.api.server import bind_unix, make_server, serve_until_signal
from pd_cluster.api.timelines import LocalTimelines, RemoteTimelines, TimelineSource
from pd_cluster.cluster.api_processes import ApiProcesses
from pd_cluster.cluster.auto_role import AutoRole
from pd_cluster.cluster.elastic import Elastic, Tables
from pd_cluster.cluster.membership import Membership, instances_of
from pd_cluster.cluster.place import Place
from pd_cluster.config import ADMIN_CONNECTIONS, ApiConfig, ApiProcessConfig, Credentials
from pd_cluster.errors import Refused

log = logging.getLogger(__name__)

Server = tuple[uvicorn.Server, socket.socket]


class Scheduler:
    """`listeners`: a socket at the public port for each API process. Raises ConfigError."""

    def __init__(
        self,
        place: Place,
        credentials: Credentials,
        ports: list[int],
        config: ApiConfig,
        listeners: Sequence[socket.socket],
        tables: Tables,
        log_level: str,
    ) -> None:
        self._config = config
        self._edge = Edge(config, credentials)
        router = self._edge.router
        instances = instances_of(place, ports)
        identity = self._edge.checkpoint.identity
        overrides = self._edge.checkpoint.hf_overrides
        self.membership = Membership(
            place, instances, self._edge.mailbox, config.timeouts, identity, router.on_lost, overrides
        )
        self._edge.follow(self.membership)
        self._listeners = listeners
        self._processes: ApiProcesses | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if len(listeners) > 1:
            self._processes = self._several(credentials, log_level)
        move_on = router.move_on if self._processes is None else self._processes.move_on
        self.elastic = Elastic(self.membership, credentials, tables, move_on, config.timeouts.drain_timeout_s)

    async def run(self, admin_listener: socket.socket, access: AdminAccess, auto_role: AutoRole | None) -> None:
        """Serves until a signal. Raises ConfigError for ports in the wrong order."""
        self._edge.mailbox.start()
        try:
            app = admin_app(self.elastic, self._timelines(), access)
            admin = make_server(app, ADMIN_CONNECTIONS, tls=self._config.http.tls), admin_listener
            failure = _first_failure(self._watch(auto_role), self._edge.handler.fatal)
            if self._processes is not None:
                await serve_until_signal([admin], failure, self._processes.drain, self._processes)
                return
            await self._serve(admin, failure)
        finally:
            self._edge.mailbox.close()
            if self._folder is not None:
                self._folder.cleanup()

    async def _serve(self, admin: Server, failure: Awaitable[None]) -> None:
        """The public port, too, by this very process."""
        service = self._edge.over(self.membership)
        drain = Drain(self._config.timeouts.drain_timeout_s, self._edge.router.end_all)
        app = public_app(service, self.membership.instances, self._config.is_openai, drain, self._config.http)
        http = self._config.http
        public = make_server(app, http.connections, http.root_path, http.tls), self._listeners[0]
        try:
            await serve_until_signal([public, admin], failure, drain.begin, drain)
        finally:
            await service.close()

    def _several(self, credentials: Credentials, log_level: str) -> ApiProcesses:
        self._folder = tempfile.TemporaryDirectory(prefix="pd-cluster-api-")  # mode 0700
        configs = []
        http = self._config.http
        connections = http.connections.share(len(self._listeners))
        api = replace(self._config, http=replace(http, connections=connections))
        for index, listener in enumerate(self._listeners):
            admin = bind_unix(self._admin_path(index))
            configs.append(
                ApiProcessConfig(
                    index=index,
                    api=api,
                    credentials=replace(credentials, table=b""),  # only process 0 reads it again
                    listener_fd=listener.fileno(),
                    admin_fd=admin.detach(),
                    log_level=log_level,
                )
            )
        return ApiProcesses(configs, self._listeners, self.membership.instances, self._config.timeouts.drain_timeout_s)

    def _admin_path(self, index: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"api-{index}"

    def _timelines(self) -> TimelineSource:
        if self._processes is None:
            return LocalTimelines(self._edge.router.timelines)
        return RemoteTimelines([self._admin_path(index) for index in range(len(self._listeners))])

    async def _watch(self, auto_role: AutoRole | None) -> None:
        """Until cancelled, or one of them raises. SIGHUP reads the tables again."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            loop.add_signal_handler(signal.SIGHUP, lambda: group.create_task(_reload(self.elastic)))
            group.create_task(self.membership.run())
            group.create_task(self.elastic.run())
            if auto_role is not None:
                group.create_task(_change_roles(self.elastic, auto_role))
            if self._processes is not None:
                group.create_task(self._processes.run(self.membership.change))
            try:
                await asyncio.Event().wait()
            finally:
                loop.add_signal_handler(signal.SIGHUP, lambda: None)  # this process ends; there is nothing to read for


async def _reload(elastic: Elastic) -> None:
    try:
        log.info("SIGHUP: the rank table was read again; %s", await elastic.reload())
    except Refused as error:
        log.error("SIGHUP: %s", error)


async def _change_roles(elastic: Elastic, auto_role: AutoRole) -> None:
    while True:
        await asyncio.sleep(auto_role.rules.period_s)
        flip = auto_role.observe(time.monotonic(), elastic.instances)
        if flip is not None:
            log.warning("--auto-role: %s becomes %s: %s", flip.name, flip.role, flip.why)
            elastic.change_role(flip.name, flip.role)


async def _first_failure(running: Any, fatal: asyncio.Future[None]) -> None:
    """Ends with the first exception of the two; a lone error out of a task group comes as itself."""
    task = asyncio.ensure_future(running)
    try:
        await asyncio.wait({task, fatal}, return_when=asyncio.FIRST_COMPLETED)
        (fatal if fatal.done() else task).result()
    except ExceptionGroup as group:
        first: Exception = group
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
