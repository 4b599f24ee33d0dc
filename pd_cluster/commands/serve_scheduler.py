"""`pd-cluster serve` as the scheduler: the public port, the admin port and the connections to workers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster import extra_table
from pd_cluster.cluster.members.cluster_credentials import admin_token_of, credentials_of
from pd_cluster.cluster.members.rank_table_place import (
    Place,
    check_ports,
    find_place,
    node_ports,
    use_openai,
)
from pd_cluster.commands.serve_start import Start
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.file_settings import KeptFiles
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.log_files import folder_of
from pd_cluster.settings.media_settings import MediaSettings
from pd_cluster.settings.process_configs import ApiConfig, Credentials
from pd_cluster.settings.resume_settings import ResumeSettings
from pd_cluster.settings.routing_settings import AdminSettings, AdmissionSettings
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.text.template_source import with_source
from ranktable_tools.host_addresses import bracketed, is_loopback
from ranktable_tools.ports import GivenPorts, outgoing_warnings, scheduler_ports

if TYPE_CHECKING:
    from pd_cluster.api.middleware.file_keys import KeySource
    from pd_cluster.api.scheduler_app import Extras
    from pd_cluster.cluster.members.shared_membership import Lease

log = logging.getLogger(__name__)

FOLDER_LEASE_S, KUBERNETES_LEASE_S = 1.5, 15.0


def run_scheduler(start: Start, credentials: Credentials, env: Mapping[str, str]) -> None:
    """Serves until a signal. Raises ConfigError, and OSError for a port that cannot be bound."""
    options, place, files = start.options, start.place, start.files
    frontend, admin = options.read(AdmissionSettings), options.read(AdminSettings)
    given = _own_ports(start, frontend, admin)
    ports = node_ports(env, place, given) if place.table.file else []
    if start.join.join_port is not None and files.derives:
        raise ConfigError("--join-port: workers outside of a rank table cannot derive a secret; drop --derive-secret")
    token = admin_token_of(place, files)
    config = _api_config(start, env)
    check_public_dashboard(config.http, start.process.host, frontend)
    if frontend.scheduler_lease:
        check_shared(start, frontend, admin)
    else:
        check_alone(frontend, start.timeouts)
    import uvloop

    from pd_cluster.api.api_extension import PublicPort
    from pd_cluster.api.connections.http_server import bind, bind_path, bind_several, raise_descriptor_limit
    from pd_cluster.api.middleware.admin_access import AdminAccess
    from pd_cluster.api.scheduler_app import KnownCluster, SchedulerServer
    from pd_cluster.cluster.members.rank_table_reader import RankTableFiles
    from pd_cluster.service.concurrency.interpreter_tuning import tune

    http = config.http
    raise_descriptor_limit(http.connections)
    served = [*config.model_names, start.engine.model, *start.engine.adapters.paths]
    may_grow, may_limit = bool(admin.lora_root), not frontend.scheduler_lease
    keys: KeySource | None = None
    if http.key_file:
        store = extra_table.load(extra_table.KEY_STORE, called("api_key_file"))
        keys = store(http, served, may_grow=may_grow, may_limit=may_limit)
    host, port, num = start.process.host, start.process.port, frontend.api_workers
    listeners = bind_path(frontend.uds, num) if frontend.uds else bind_several(host, port, num)
    admin_port = given.scheduler["--admin-port"]
    admin_listener = bind(admin.admin_host, admin_port, "--admin-port")
    public = frontend.uds or f"{host}:{port}"
    log.info("serving at %s, admin at %s:%d", public, admin.admin_host, admin_port)
    tables = RankTableFiles(
        lambda: find_place(env) if place.table.file else place,
        lambda place: _ports_of_file(env, place, given),
        lambda place: credentials_of(place, files),
    )
    tls = http.tls is not None
    extras = _extras(start, frontend, admin, f"http{'s' * tls}://{bracketed(admin.admin_host)}:{admin_port}", keys)
    access = AdminAccess(token, is_loopback(admin.admin_host), admin.admin_hosts)

    async def serve() -> None:
        known = KnownCluster(place, ports, credentials, tables)
        scheduler = SchedulerServer(known, config, listeners, start.process.logs, extras)
        public_port = PublicPort(host, port, frontend.uds, tls)
        await scheduler.run(admin_listener, access, frontend.auto_role, folder_of(place.folder), public_port)

    tune()
    with contextlib.ExitStack() as ending, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if frontend.uds:
            ending.callback(Path(frontend.uds).unlink, missing_ok=True)
        runner.run(serve())


def _api_config(start: Start, env: Mapping[str, str]) -> ApiConfig:
    """Returns the public port's configuration. Raises ConfigError for flags that contradict each other."""
    options, openai = start.options, use_openai(env)
    http = options.http(env)
    if http.allow_credentials and "*" in http.allowed_origins:
        log.warning("--allow-credentials: any web page may send its visitors' credentials; name --allowed-origins")
    if http.files.folder:
        check_files(http.files, openai)
    if http.responses.folder:
        if not openai:
            named = f"{called('response_store')} {http.responses.folder}"
            raise ConfigError(f"{named}: there is no /v1/responses with USE_OPENAI=0; leave it out")
        from pd_cluster.service.answers.response_store import ResponseStore

        ResponseStore(http.responses).close()  # an unusable folder raises an error here, before any port is open
    resume = options.read(ResumeSettings)
    if resume.window_s and not openai:
        named = f"{called('resume_window')} {resume.window_s:g}"
        raise ConfigError(f"{named}: streams of /generate cannot be resumed (USE_OPENAI=0); leave it out")
    if resume.window_s:
        extra_table.load("resumable_streams", called("resume_window"))
    if http.traces_endpoint:
        from pd_cluster.service.request_traces import check_packages

        check_packages(http.traces_endpoint)
    return options.read(
        ApiConfig,
        engine=start.engine,
        is_openai=openai,
        timeouts=start.timeouts,
        routing=start.routing,
        chat=with_source(options.chat()),
        media=options.read(MediaSettings),
        resume=resume,
        http=http,
    )


def check_files(files: KeptFiles, openai: bool) -> None:
    """Raises ConfigError for a folder that cannot be used, before any port is open."""
    named = f"{called('files_dir')} {files.folder}"
    if not openai:
        raise ConfigError(f"{named}: there is no /v1/files with USE_OPENAI=0; leave it out")
    if importlib.util.find_spec("python_multipart") is None:
        raise ConfigError(f"{named}: uploads need the package python-multipart; pip install 'pd-cluster[files]'")
    from pd_cluster.service.files.file_store import FileStore

    FileStore(files).close()


def check_public_dashboard(http: HttpConfig, host: str, frontend: AdmissionSettings) -> None:
    """Raises ConfigError if a session's cookie would be sent over a network in plain text, or to another process."""
    flag = called("public_dashboard")
    if not http.has_public_dashboard:
        return
    extra_table.load("dashboard", flag)
    if frontend.api_workers > 1:
        count = f"{called('api_workers')} {frontend.api_workers}"
        raise ConfigError(f"{flag}: not with {count}, whose processes share no sessions; leave one of the two out")
    if http.tls is None and not frontend.uds and not is_loopback(host):
        ways = f"{called('ssl_certfile')} FILE, or {called('host')} 127.0.0.1 behind a proxy with TLS"
        raise ConfigError(f"{flag}: {called('host')} {host} is reached without TLS; give {ways}")


def _extras(
    start: Start, frontend: AdmissionSettings, admin: AdminSettings, admin_url: str, keys: KeySource | None
) -> Extras:
    """Returns the optional parts. Raises ConfigError for a folder that cannot be shared."""
    from pd_cluster.api.scheduler_app import Extras

    join = (start.process.host, start.join.join_port) if start.join.join_port is not None else None
    lease = _lease(start, frontend, admin, admin_url) if frontend.scheduler_lease else None
    return Extras(join, admin.lora_root, (admin.weights_dir, admin.weight_update_hosts), lease, keys)


def _lease(start: Start, frontend: AdmissionSettings, admin: AdminSettings, admin_url: str) -> Lease:
    """Returns the lease. Raises ConfigError for a folder that cannot be shared, or for a Kubernetes lease outside of a
    pod.
    """
    from pd_cluster.cluster.leases.lease_folder import LeaseFolder
    from pd_cluster.cluster.leases.lease_kubernetes import KubernetesLease, place_of_lease
    from pd_cluster.cluster.members.shared_membership import Lease

    index, given_s, takeover_timeout_s = (
        frontend.scheduler_index,
        start.timeouts.lease_duration_s,
        start.timeouts.connect_timeout_s,
    )
    place = place_of_lease(frontend.scheduler_lease)
    if place is None:
        folder = LeaseFolder(Path(frontend.scheduler_lease))
        folder.take(index)
        return Lease(index, folder, admin_url, given_s or FOLDER_LEASE_S, takeover_timeout_s)
    duration_s = given_s or KUBERNETES_LEASE_S
    where = f"{admin_url} in {socket.gethostname()}" if is_loopback(admin.admin_host) else admin_url
    return Lease(index, KubernetesLease.in_pod(*place, duration_s), where, duration_s, takeover_timeout_s)


def check_shared(start: Start, frontend: AdmissionSettings, admin: AdminSettings) -> None:
    """Raises ConfigError for settings that only a single scheduler supports."""
    lease = f"{called('scheduler_lease')} {frontend.scheduler_lease}"
    if frontend.api_workers > 1:
        count = f"{called('api_workers')} {frontend.api_workers}"
        raise ConfigError(f"{lease}: not with {count}; start more schedulers, each of which is one process")
    if admin.weights_dir:
        raise ConfigError(f"{lease}: not with {called('weights_dir')}: other schedulers would send requests meanwhile")
    if admin.lora_root:
        raise ConfigError(
            f"{lease}: not with {called('allow_runtime_lora')}: other schedulers would not learn of adapters"
        )


def check_alone(frontend: AdmissionSettings, timeouts: Timeouts) -> None:
    """Raises ConfigError for settings that have an effect only with --scheduler-lease."""
    for name, given, usual in (
        ("scheduler_index", frontend.scheduler_index, AdmissionSettings().scheduler_index),
        ("lease_duration", timeouts.lease_duration_s, Timeouts().lease_duration_s),
    ):
        if given != usual:
            raise ConfigError(f"{called(name)} {given:g}: only with {called('scheduler_lease')}")


def _own_ports(start: Start, frontend: AdmissionSettings, admin: AdminSettings) -> GivenPorts:
    """Returns the scheduler's ports. Raises ConfigError if they conflict."""
    port, join_port = start.process.port, start.join.join_port
    ports = scheduler_ports(port, admin.admin_port, join_port)
    if frontend.uds:
        del ports["--port"]
    given = GivenPorts(ports)
    check_ports(start.place, given)
    for warning in outgoing_warnings(ports):
        log.warning("%s", warning)
    return given


def _ports_of_file(env: Mapping[str, str], place: Place, given: GivenPorts) -> list[int] | None:
    """Reads NODE_PORTS_FILE again, if it is set; NODE_PORTS cannot change while a process runs. Raises ConfigError."""
    return node_ports(env, place, given) if env.get("NODE_PORTS_FILE", "").strip() else None
