"""The protocol of extras that add routes to a scheduler's admin port, and layers to its public port.

`extra_table.API_EXTENSIONS` names their classes. Each is made once, in the process that serves the admin port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from fastapi import APIRouter
from starlette.middleware import Middleware

from pd_cluster import extra_table
from pd_cluster.api.middleware.admin_access import AdminAccess
from pd_cluster.api.middleware.file_keys import FileKeys
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.settings.http_settings import HttpConfig
from ranktable_tools.host_addresses import bracketed

CONNECT_TIMEOUT_S = 5.0
ANY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # a bound address -> one to connect to


@dataclass(frozen=True, slots=True)
class PublicPort:
    """The public port's address from this host. `uds`: the path of its Unix socket, if it has one instead."""

    host: str
    port: int
    uds: str = ""
    is_tls: bool = False

    @property
    def url(self) -> str:
        scheme = "https" if self.is_tls else "http"
        return (
            f"{scheme}://localhost"
            if self.uds
            else f"{scheme}://{bracketed(ANY_ADDRESS.get(self.host, self.host))}:{self.port}"
        )

    def client(self) -> httpx.AsyncClient:
        """Makes a client without a read timeout, because the public port has a deadline for requests.

        The client does not check the certificate, which has the host name that clients use; the connection stays on
        this host.
        """
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=self.uds or None, verify=False),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The parts of a scheduler that an extension sees. `instances`: returns the entries of /instances."""

    overview: Overview
    instances: Callable[[], list[dict[str, Any]]]
    model: str
    http: HttpConfig
    access: AdminAccess
    public: PublicPort


class ApiExtension(Protocol):
    def admin_routes(self, seen: Sequence[APIRouter]) -> APIRouter:
        """Returns routes for the admin port, all of which check access.

        `seen`: routes to include, which do not check access themselves.
        """

    def public_layers(self, file_keys: FileKeys | None) -> Iterable[Middleware]:
        """Returns layers in front of the public port's API, innermost first. They also see requests without a key."""


def api_extensions(view: ClusterView) -> list[ApiExtension]:
    """Makes every extension that is installed."""
    return [extra_table.load(name)(view) for name in extra_table.API_EXTENSIONS if extra_table.is_installed(name)]
