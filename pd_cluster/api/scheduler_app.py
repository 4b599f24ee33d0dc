"""Assembles the scheduler, which manages the cluster's membership and serves requests. Never imports torch.

With one API process, the scheduler's own process serves requests. Several API processes are its children
(cluster/processes/api_processes.py); the scheduler queries the workers, drains, changes roles, and answers at the admin
port.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from msgspec.structs import replace

from pd_cluster.api.admin.admin_app import ShownCluster, admin_app, describe
from pd_cluster.api.admin.control_routes import control_routes
from pd_cluster.api.admin.metrics_routes import ONLY_ONE, MetricSources, Owner
from pd_cluster.api.admin.server_info import info_of
from pd_cluster.api.admin.timeline_routes import LocalTimelines, RemoteTimelines, TimelineSource
from pd_cluster.api.admin.weight_routes import weight_routes
from pd_cluster.api.api_extension import ApiExtension, ClusterView, PublicPort, api_extensions
from pd_cluster.api.connections.http_server import bind_unix, make_server, serve_until_signal
from pd_cluster.api.files.files_api import most_nbytes_of
from pd_cluster.api.middleware.admin_access import AdminAccess
from pd_cluster.api.middleware.drain_middleware import Drain
from pd_cluster.api.middleware.file_keys import FileKeys, KeySource
from pd_cluster.api.public_app import in_background, public_app
from pd_cluster.cluster.members.adapter_registry import AdapterBook, AdapterRules
from pd_cluster.cluster.members.cluster_control import ClusterControl
from pd_cluster.cluster.members.elastic_membership import ElasticMembership
from pd_cluster.cluster.members.join_registrar import JoinPort
from pd_cluster.cluster.members.rank_table_place import Place
from pd_cluster.cluster.members.rank_table_reader import RankTableFiles
from pd_cluster.cluster.members.shared_membership import Lease, SharedMembership
from pd_cluster.cluster.members.worker_membership import membership_of
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.processes.api_processes import ApiProcesses
from pd_cluster.cluster.roles.auto_role import RoleChooser
from pd_cluster.cluster.roles.role_costs import RoleGoals
from pd_cluster.cluster.roles.roles_by_cost import role_chooser
from pd_cluster.cluster.weights.weight_updates import WeightRules, WeightUpdates
from pd_cluster.errors import ConfigError, Refused, Unavailable
from pd_cluster.process_messages import AdapterNames, Busy, Stats
from pd_cluster.service.serving_context import ServingContext
from pd_cluster.settings.log_setup import Logs
from pd_cluster.settings.process_configs import ApiConfig, ApiProcessConfig, Credentials
from pd_cluster.settings.routing_settings import ADMIN_CONNECTIONS

log = logging.getLogger(__name__)

Server = tuple[uvicorn.Server, socket.socket]


@dataclass(frozen=True, slots=True)
class KnownCluster:
    """The rank tables and secrets at the start, and how to read them again."""

    place: Place
    ports: list[int]
    credentials: Credentials
    tables: RankTableFiles


@dataclass(frozen=True, slots=True)
class Extras:
    """The optional parts of a scheduler."""

    join: tuple[str, int] | None = None  # the address and port where workers in no table register
    lora_root: str = ""  # the folder below which adapters can be loaded at run time; "": none can
    # the folder below which other weights may be loaded, and the trainers' addresses; "": weights cannot be replaced
    weights: tuple[str, frozenset[str]] = ("", frozenset())
    lease: Lease | None = None  # only for one of several schedulers
    keys: KeySource | None = None  # the keys of --api-key-file


NOTHING_MORE = Extras()


class SchedulerServer:
    """`listeners`: one socket at the public port for each API process. Raises ConfigError."""

    def __init__(
        self,
        known: KnownCluster,
        config: ApiConfig,
        listeners: Sequence[socket.socket],
        logs: Logs,
        extras: Extras = NOTHING_MORE,
    ) -> None:
        lease, credentials, timeouts = extras.lease, known.credentials, config.timeouts
        self._config, self._keys, self._listeners = config, extras.keys, listeners
        self._file_keys: FileKeys | None = None  # set if this process itself serves requests
        roster_of = partial(membership_of, known.place, known.ports, timeouts)
        self._edge = (
            ServingContext(config, credentials, roster_of)
            if lease is None
            else ServingContext(config, credentials, roster_of, lease.index, is_scheduler=True)
        )
        self.membership = self._edge.roster
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes = self._several(credentials, logs) if len(listeners) > 1 else None
        serving = self._edge.router if self._processes is None else self._processes
        self.elastic = ElasticMembership(
            self.membership, credentials, known.tables, serving.move_on, timeouts.drain_timeout_s
        )
        self._shared = (
            SharedMembership(lease, self.membership, self.elastic, self._edge.mailbox) if lease is not None else None
        )
        standing = self._shared.standing if self._shared is not None else dict
        self._overview = Overview(self.membership, self._figures, config.routing, standing)
        self._join_port = (
            JoinPort(self.membership, credentials, timeouts, *extras.join) if extras.join is not None else None
        )
        self._weights = extras.weights
        self._book = self._adapter_book(extras.lora_root) if extras.lora_root else None

    async def run(
        self,
        admin_listener: socket.socket,
        access: AdminAccess,
        auto_role: str,
        logs: Path,
        public: PublicPort,
    ) -> None:
        """Serves until a signal. Raises ConfigError for ports in the wrong order.

        `auto_role`: the rule for automatic role changes; "": none. `logs`: the folder of the processes' logs that
        `pd-cluster up` keeps. `public`: the public port's address from this host.
        """
        self._edge.start()
        try:
            control = self._control()
            commands = control_routes(control, info_of(self._config))
            if self._weights[0]:
                commands.include_router(weight_routes(self._weight_updates(control)))
            extensions = api_extensions(self._view(access, public))
            shown = ShownCluster(self._overview, self._model_name, logs, extensions, self._owner()[0])
            app = admin_app(self.elastic, self._timelines(), access, self._book, commands, shown)
            admin = make_server(app, ADMIN_CONNECTIONS, tls=self._config.http.tls), admin_listener
            failure = _first_failure(self._watch(self._role_chooser(auto_role), control), self._edge.handler.fatal)
            if self._processes is not None:
                await serve_until_signal([admin], failure, self._processes.drain, self._processes)
                return
            await self._serve(admin, failure, extensions)
        finally:
            self._edge.mailbox.close()
            if self._join_port is not None:
                self._join_port.close()
            if self._folder is not None:
                self._folder.cleanup()

    async def _serve(self, admin: Server, failure: Awaitable[None], extensions: Sequence[ApiExtension]) -> None:
        """Serves the public port in this process, too."""
        service = self._edge.service()
        drain = Drain(self._config.timeouts.drain_timeout_s, self._edge.router.end_all)
        http = self._config.http
        if self._keys is not None:
            self._file_keys = self._keys.at_port(self._edge.router.stats.tenants)
        instances, keys = self.membership.instances, self._file_keys
        app = public_app(service, instances, drain, keys, extensions, MetricSources(owner=self._owner))
        public = (
            make_server(app, http.connections, http.root_path, http.tls, http.max_header_fields, most_nbytes_of(http)),
            self._listeners[0],
        )
        try:
            async with in_background(app):
                await serve_until_signal([public, admin], failure, drain.begin, drain)
        finally:
            await service.close()

    def _owner(self) -> Owner:
        return ONLY_ONE if self._shared is None else (self._shared.name, self._shared.is_owner)

    @property
    def _model_name(self) -> str:
        return self._config.model_names[0]

    def _view(self, access: AdminAccess, public: PublicPort) -> ClusterView:
        return ClusterView(
            self._overview,
            lambda: [describe(each) for each in self.elastic.instances],
            self._model_name,
            self._config.http,
            access,
            public,
        )

    def _figures(self) -> tuple[Stats, Busy]:
        if self._processes is not None:
            return self._processes.stats, self._processes.busy
        router = self._edge.router
        return router.stats.snapshot(), Busy(0, router.num_streams, router.admission.num_waiting)

    def _role_chooser(self, kind: str) -> RoleChooser | None:
        routing = self._config.routing
        goals = RoleGoals(routing.slo_ttft_s, routing.slo_tpot_s)
        return role_chooser(kind, self._figures, goals, self._config.timeouts.drain_timeout_s)

    def _control(self) -> ClusterControl:
        serving = self._edge.router if self._processes is None else self._processes
        timeout_s = self._config.timeouts.request_timeout_s
        return ClusterControl(self.membership, self._edge.mailbox, serving, timeout_s, may_sleep=self._shared is None)

    def _weight_updates(self, control: ClusterControl) -> WeightUpdates:
        root, hosts = self._weights
        rules = WeightRules(Path(root), self._edge.checkpoint.path, hosts, may_change=self._shared is None)
        self.membership.weight_sources.send_from(Path(root).resolve())
        return WeightUpdates(self.membership, self._edge.mailbox.send, control, rules)

    def _adapter_book(self, root: str) -> AdapterBook:
        """Raises ConfigError."""
        engine = self._config.engine
        if not engine.adapters.are_wanted:
            raise ConfigError("--allow-runtime-lora: needs --enable-lora, here and in the workers")
        own, timeout_s = (engine.model, *self._config.model_names), self._config.timeouts.drain_timeout_s
        rules = AdapterRules(engine.adapters, root, own, timeout_s)
        users = self._edge.router.adapters if self._processes is None else self._processes
        return AdapterBook(self.membership, users, self._edge.adapters, rules)

    def _several(self, credentials: Credentials, logs: Logs) -> ApiProcesses:
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
                    logs=logs,
                    adapters=AdapterNames(dict(self._edge.adapters), 0),
                    keys=self._keys.keys if self._keys is not None else None,
                    rates_fd=self._keys.rates_fd if self._keys is not None else -1,
                )
            )
        drain_timeout_s = self._config.timeouts.drain_timeout_s
        own = self._edge.router.stats
        return ApiProcesses(configs, self._listeners, self.membership.instances, drain_timeout_s, own)

    def _admin_path(self, index: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"api-{index}"

    def _timelines(self) -> TimelineSource:
        if self._processes is None:
            return LocalTimelines(self._edge.router.timelines, self._edge.router.served)
        return RemoteTimelines([self._admin_path(index) for index in range(len(self._listeners))])

    async def _watch(self, auto_role: RoleChooser | None, control: ClusterControl) -> None:
        """Runs until cancelled, or until a part raises. SIGHUP reads the keys and the tables again."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:

            def hang_up() -> None:
                self._reload_keys()
                group.create_task(_reload(self.elastic))

            loop.add_signal_handler(signal.SIGHUP, hang_up)
            group.create_task(self.membership.run())
            group.create_task(self.elastic.run())
            group.create_task(control.cluster_sleep.run())
            group.create_task(self._overview.run())
            if self._shared is not None:
                group.create_task(self._shared.run())
            if self._book is not None:
                group.create_task(self._book.run())
            if self._join_port is not None:
                group.create_task(self._join_port.run())
            if auto_role is not None:
                group.create_task(self._change_roles(auto_role))
            if self._processes is not None:
                group.create_task(self._processes.run(self.membership.change))
            try:
                await asyncio.Event().wait()
            finally:
                loop.add_signal_handler(signal.SIGHUP, lambda: None)  # ignored while this process ends

    async def _change_roles(self, auto_role: RoleChooser) -> None:
        while True:
            await asyncio.sleep(auto_role.period_s)
            flip = auto_role.observe(time.monotonic(), self.elastic.instances)
            if not self.elastic.is_owner:
                self._overview.considered_roles(None, None)
                continue
            if flip is not None:
                try:
                    self.elastic.change_role(flip.name, flip.role)
                except Refused as error:
                    log.warning("--auto-role: %s does not become %s: %s", flip.name, flip.role, error)
                    flip = None
                else:
                    log.warning("--auto-role: %s becomes %s: %s", flip.name, flip.role, flip.why)
            self._edge.router.stats.considered_roles(auto_role.last, flip)
            self._overview.considered_roles(auto_role.last, flip)

    def _reload_keys(self) -> None:
        """Reads the keys again, for later requests. An error is logged in one line, and changes nothing."""
        if self._keys is None:
            return
        try:
            keys = self._keys.reload()
        except ConfigError as error:
            log.error("SIGHUP: the API keys stay as they are: %s", error)
            return
        except Unavailable as error:  # clearing the records of removed keys may have failed
            log.error("SIGHUP: not all API keys could be changed: %s; send it again", error)
            return
        if self._file_keys is not None:
            self._file_keys.replace(keys)
        if self._processes is not None:
            self._processes.set_keys(keys)
        log.info("SIGHUP: the API keys were read again: %d in %s", len(keys.keys), self._config.http.key_file)


async def _reload(elastic: ElasticMembership) -> None:
    try:
        log.info("SIGHUP: the rank table was read again; %s", await elastic.reload())
    except Refused as error:
        log.error("SIGHUP: %s", error)


async def _first_failure(running: Any, fatal: asyncio.Future[None]) -> None:
    """Raises the first exception of `running` and `fatal`; for a task group's error, the first exception in it."""
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
