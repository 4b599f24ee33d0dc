"""Access to the admin port: for holders of its token; to read, also for users of this host."""

from __future__ import annotations

import hmac
import reprlib
from dataclasses import dataclass

from fastapi import Request

from pd_cluster.errors import Forbidden, Unauthorized
from ranktable_tools.hosts import is_loopback


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """Commands need the token; if users of other hosts can reach the port, so does reading.

    Open reading requires a name of this host or of `allowed_hosts`: a web page can have its own name resolve to
    127.0.0.1 and then read the answers there, but cannot change the Host header that its browser sends.
    """

    token: str
    is_open_to_read: bool
    allowed_hosts: frozenset[str] = frozenset()

    def check(self, request: Request) -> None:
        """Raises Unauthorized and Forbidden."""
        is_reading = self.is_open_to_read and request.method == "GET"
        host = _host_name(request.headers.get("host", ""))
        if is_reading and (is_loopback(host.strip("[]")) or host in self.allowed_hosts):
            return
        if is_reading and "authorization" not in request.headers:
            raise Forbidden(
                f"Host {reprlib.repr(host)} is no name of this port: ask for localhost, allow the name with "
                f"--admin-allowed-hosts, or send the admin token"
            )
        self.check_token(request)

    def check_token(self, request: Request) -> None:
        """Raises Unauthorized unless the request has the token, whatever it asks."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(token.strip().encode(), self.token.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Unauthorized(
                f"{request.method} {request.url.path} needs the admin token: send `Authorization: Bearer TOKEN`; "
                f"pd-cluster takes it from --admin-token-file, or from admin.token beside the global rank table "
                f"(GLOBAL_RANK_TABLE_FILE_PATH)",
                code="invalid_admin_token",
            )


def _host_name(host: str) -> str:
    """Returns the name without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
