"""Adds the dashboard's pages to a scheduler's admin port, and with --public-dashboard to its public port."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter
from starlette.middleware import Middleware

from pd_cluster.api.api_extension import ClusterView
from pd_cluster.api.middleware.admin_access import HostNames
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.api.middleware.http_bodies import guarded_by
from pd_cluster.extras.dashboard.dashboard_routes import DATA, PageView, PublicLinks, SessionGuard, dashboard_routes
from pd_cluster.extras.dashboard.dashboard_sessions import Sessions
from pd_cluster.extras.dashboard.playground_routes import playground_routes
from pd_cluster.extras.dashboard.public_dashboard import PublicDashboard, PublicView, public_pages
from ranktable_tools.host_addresses import is_loopback


class Dashboard:
    def __init__(self, view: ClusterView, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self.public_sessions = Sessions(clock)  # codes for these sessions are made at the admin port

    def admin_routes(self, seen: Sequence[APIRouter]) -> APIRouter:
        view, routes = self._view, APIRouter()
        guard = SessionGuard(Sessions(), PageView(), view.access.hosts)
        for each in (*seen, playground_routes(view.public)):
            routes.include_router(each, prefix=DATA, dependencies=[guarded_by(guard.check)])
        http, links = view.http, None
        if http.has_public_dashboard:
            links = PublicLinks(self.public_sessions, f"{view.public.url}{http.root_path}")
        routes.include_router(dashboard_routes(guard, view.access, links))
        return routes

    def public_layers(self, file_keys: FileKeys | None) -> list[Middleware]:
        view, http = self._view, self._view.http
        if not http.has_public_dashboard:
            return []
        hosts = HostNames(view.access.allowed_hosts, is_loopback(view.public.host))
        shown = PublicView(view.overview, view.instances, view.model, self.public_sessions, http.root_path, hosts)
        pages = public_pages(shown, http.api_keys, file_keys)
        return [Middleware(PublicDashboard, pages=pages, root_path=http.root_path)]
