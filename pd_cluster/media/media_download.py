"""Downloads files from allowed hosts, and from private addresses only if the address itself is allowed.

A name is resolved once, all its addresses are checked, and the connection uses one of these addresses, so DNS rebinding
has no effect. Redirects are checked the same way. Ignores the environment's proxies. Blocks; runs in a child process.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import reprlib
import socket
import ssl
import threading
import time
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from pd_cluster.errors import RequestError

TIMEOUT_S = 10.0  # the time for a whole download
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
ANY_HOST = "*"  # any host name; addresses are still checked
HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
PLAIN_URL = re.compile(r"[\x21-\x7e]+")
PIECE_NBYTES = 1 << 16
# IPv6 addresses that contain IPv4 addresses: 6to4, NAT64 and Teredo
TRANSLATED = tuple(map(ipaddress.ip_network, ("2002::/16", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32")))
UNICAST = ipaddress.ip_network("2000::/3")  # all public IPv6 addresses; `is_global` is also true for some others
OF_CLOUDS = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24")))  # services inside clouds


class Downloads(NamedTuple):
    """`domains`: hosts by name or address, or ANY_HOST for all public addresses.

    `refused`: the cluster's own addresses, which may be public.
    """

    domains: tuple[str, ...]
    refused: tuple[str, ...]
    max_nbytes: int
    kind: str = "image"  # first part of the expected media type


class MediaTarget(NamedTuple):
    """A URL whose host is allowed."""

    scheme: str
    host: str
    port: int
    path: str


def downloaded(url: str, downloads: Downloads) -> bytes:
    """Returns the body. Raises RequestError."""
    until_s = time.monotonic() + TIMEOUT_S
    for _ in range(MAX_REDIRECTS + 1):
        target = target_of(url, downloads.domains)
        try:
            body, location = _get(target, downloads, until_s)
        except (OSError, http.client.HTTPException, ValueError):
            raise RequestError(f"{target.host}: the {downloads.kind} could not be fetched; check its URL") from None
        if location is None:
            return body
        url = urljoin(url, location)
    raise RequestError(f"more than {MAX_REDIRECTS} redirects; give the {downloads.kind}'s own URL")


def target_of(url: str, domains: tuple[str, ...]) -> MediaTarget:
    """Parses a URL strictly; only the result is checked and used afterwards. Raises RequestError."""
    wrong = RequestError(f"{reprlib.repr(url[:60])}: not a plain http(s) URL; send another one")
    if not PLAIN_URL.fullmatch(url) or "\\" in url:
        raise wrong
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in PORTS or "@" in parts.netloc or not (HOST.fullmatch(host) or _is_bracketed(parts.netloc)):
        raise wrong
    host = next(iter(addresses_in((host,))), host)
    if ANY_HOST not in domains and host not in {domain.lower() for domain in domains} | addresses_in(domains):
        raise RequestError(f"{host}: not among the hosts of the server's --allowed-media-domains")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return MediaTarget(parts.scheme, host, PORTS[parts.scheme] if port is None else port, path)


def _is_bracketed(netloc: str) -> bool:
    """Whether the host is an IPv6 address without a scope; urlsplit has checked its form."""
    return netloc.startswith("[") and "%" not in netloc


def addresses_in(domains: tuple[str, ...]) -> set[str]:
    """Returns those hosts that are addresses, in canonical form."""
    found = set()
    for domain in domains:
        with contextlib.suppress(ValueError):
            found.add(str(ipaddress.ip_address(domain.strip("[]"))))
    return found


def may_connect(address: str, refused: tuple[str, ...], allowed: Collection[str] = ()) -> bool:
    """Whether an address is public or among `allowed`, and is not an address of the cluster."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if str(found) in allowed:
        return str(found) not in refused
    if any(found in network for network in (*TRANSLATED, *OF_CLOUDS)):
        return False
    if isinstance(found, ipaddress.IPv6Address) and found not in UNICAST:
        return False
    return found.is_global and not found.is_multicast and str(found) not in refused


def _address_of(target: MediaTarget, downloads: Downloads) -> str:
    """Resolves a host. Raises RequestError if any of its addresses is not allowed."""
    allowed = addresses_in(downloads.domains)
    entries = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in entries]
    if not addresses or not all(may_connect(address, downloads.refused, allowed) for address in addresses):
        raise RequestError(f"{target.host}: its address is not public, and not listed in --allowed-media-domains")
    return addresses[0]


class _Connection(http.client.HTTPConnection):
    """Connects to a checked address, but sends the host's name."""

    def __init__(self, target: MediaTarget, address: str, until_s: float) -> None:
        super().__init__(target.host, target.port)
        self._target, self._address, self._until_s = target, address, until_s

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self._target.port), _left(self._until_s))
        if self._target.scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._target.host)

    def end(self) -> None:
        """Ends blocked reads and writes, with an OSError or an end of file. Callable from any thread."""
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


def _get(target: MediaTarget, downloads: Downloads, until_s: float) -> tuple[bytes, str | None]:
    """Returns the body or a redirect's target. Raises RequestError, OSError and HTTPException."""
    connection = _Connection(target, _address_of(target, downloads), until_s)
    late = threading.Timer(_left(until_s), connection.end)  # the socket's timeout covers only one piece of headers
    late.daemon = True
    late.start()
    try:
        connection.request("GET", target.path, headers={"Accept": f"{downloads.kind}/*", "User-Agent": "pd-cluster"})
        answer = connection.getresponse()
        _left(until_s)  # raises if `late` caused the end of file
        if answer.status in REDIRECTS and (location := answer.getheader("Location")):
            return b"", location
        if answer.status != 200:
            raise RequestError(f"{target.host}: it answers {answer.status}; check the {downloads.kind}'s URL")
        body = bytearray()
        while piece := _piece(connection, answer, until_s):
            body += piece
            if len(body) > downloads.max_nbytes:
                raise RequestError(f"a file has at most {downloads.max_nbytes} bytes; send a smaller one")
        _left(until_s)
        if answer.length:  # the body is shorter than announced
            raise http.client.IncompleteRead(bytes(body), answer.length)
        return bytes(body), None
    finally:
        late.cancel()
        connection.close()


def _piece(connection: _Connection, answer: http.client.HTTPResponse, until_s: float) -> bytes:
    if connection.sock is not None:
        connection.sock.settimeout(_left(until_s))
    return answer.read1(PIECE_NBYTES)


def _left(until_s: float) -> float:
    """Returns the remaining seconds. Raises TimeoutError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
