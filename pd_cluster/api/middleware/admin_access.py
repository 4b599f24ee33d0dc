"""Checks access to the admin port, which local users may read without its token, and the host names of ports."""

from __future__ import annotations

import hmac
import reprlib
import socket
from dataclasses import dataclass

from fastapi import Request

from pd_cluster.errors import Forbidden, Unauthorized
from ranktable_tools.host_addresses import is_ip, is_loopback


@dataclass(frozen=True, slots=True)
class HostNames:
    """The host names under which a port answers browsers: those of this host, and `allowed` ones.

    A web page can make its own name resolve to a port's address and then read the answers (DNS rebinding), but cannot
    change the Host header that its browser sends. Two kinds of ports need no check: with TLS the browser compares the
    name with the certificate, and only a proxy can reach a Unix socket. `is_local`: the port is bound to loopback;
    other ports also answer under addresses and the machine's name, which no foreign page can have.
    """

    allowed: frozenset[str] = frozenset()
    is_local: bool = True

    def has(self, request: Request) -> bool:
        if request.url.scheme == "https" or request.scope.get("server") is None:
            return True
        host = _host_name(request.headers.get("host", ""))
        if is_loopback(host.strip("[]")) or host in self.allowed:
            return True
        return not self.is_local and (is_ip(host.strip("[]")) or host == socket.gethostname().lower())

    def check(self, request: Request, way_out: str = "") -> None:
        """Raises Forbidden. `way_out`: a further remedy to add to the message."""
        if not self.has(request):
            host = _host_name(request.headers.get("host", ""))
            raise Forbidden(
                f"Host {reprlib.repr(host)} is not a name of this port: use localhost, or allow the name with "
                f"--admin-allowed-hosts{way_out}"
            )


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """Commands need the token. Reading needs it, too, if users of other hosts can reach the port.

    Reading without the token requires a name of this host or of `allowed_hosts`: see HostNames.
    """

    token: str
    is_open_to_read: bool
    allowed_hosts: frozenset[str] = frozenset()

    def check(self, request: Request) -> None:
        """Raises Unauthorized and Forbidden."""
        if self.is_open_to_read and request.method == "GET":
            if self.hosts.has(request):
                return
            if "authorization" not in request.headers:
                self.hosts.check(request, ", or send the admin token")
        self.check_token(request)

    @property
    def hosts(self) -> HostNames:
        return HostNames(self.allowed_hosts, self.is_open_to_read)

    def check_token(self, request: Request) -> None:
        """Raises Unauthorized unless the request, even one that only reads, has the token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(token.strip().encode(), self.token.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Unauthorized(
                f"{request.method} {request.url.path} needs the admin token: send `Authorization: Bearer TOKEN`; "
                f"pd-cluster takes it from --admin-token-file, or from admin.token next to the global rank table "
                f"(GLOBAL_RANK_TABLE_FILE_PATH)",
                code="invalid_admin_token",
            )


def _host_name(host: str) -> str:
    """Returns the name without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
