"""Pictures from other hosts and from files: addresses and paths that are never used."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.media import media_download
from pd_cluster.media.media_download import ANY_HOST, Downloads, downloaded, may_connect, target_of
from pd_cluster.media.media_fetch import VIDEO, Places, fetched

HOST = "pictures.example"
DOWNLOADS = Downloads((HOST,), (), 1000)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1", "::1", "::"),
        *("fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "2002:7f00:1::"),
        *("64:ff9b::7f00:1", "2001:0:7f00:1::", "fec0::2", "::127.0.0.1", "::ffff:0:127.0.0.1", "168.63.129.16"),
        "192.0.0.192",
        "8.8.4.4",  # an address of the cluster
    ],
)
def test_addresses_that_are_never_connected_to(address: str) -> None:
    assert not may_connect(address, ("8.8.4.4",))
    assert all(may_connect(each, ("8.8.4.4",)) for each in ("8.8.8.8", "2606:4700::1111"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://other.example/a", "other.example: not among the hosts"),
        ("http://127.0.0.1/a", "127.0.0.1: not among the hosts"),
        (f"http://{HOST}@127.0.0.1/a", "not a plain"),
        (f"http://127.0.0.1\\@{HOST}/a", "not a plain"),
        (f"http://{HOST}/a b", "not a plain"),
        (f"http://{HOST}:x/", "not a plain"),
        (f"http://{HOST}:99999/", "not a plain"),
        ("http://[::1]/", "::1: not among the hosts"),
        ("http://[fe80::1%25eth0]/", "not a plain"),
        ("http:///a", "not a plain"),
        (f"gopher://{HOST}/a", "not a plain"),
        (f"http://sub.{HOST}/", "not among the hosts"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        target_of(url, (HOST,))


def test_any_host_has_a_public_address_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_of("http://other.example/a", (ANY_HOST,)).host == "other.example"
    assert target_of(f"HTTPS://{HOST.upper()}./a?b=1#c", (HOST,)) == ("https", HOST, 443, "/a?b=1")
    resolve(monkeypatch, ["127.0.0.1"])
    for host in ("127.0.0.1", "[::1]", "a.example"):
        with pytest.raises(RequestError, match="its address is not public"):
            downloaded(f"http://{host}/a", Downloads((ANY_HOST,), (), 1000))


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        where = self.path.partition("?")[0]
        if where == "/again" or where.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", where.removeprefix("/to/"))
            self.end_headers()
        elif where == "/slow":
            self.send_response(200)
            self.end_headers()
            self.server.slow.wait(20)  # type: ignore[attr-defined]
        elif where == "/drips":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nA: ")
            with contextlib.suppress(OSError):
                while not self.server.slow.wait(0.02):  # type: ignore[attr-defined]
                    self.wfile.write(b"a")
        elif where == "/gone":
            self.send_error(404)
        else:
            size = 2000 if where == "/large" else 10
            self.send_response(200)
            if where == "/lies":
                self.send_header("Content-Length", "500")
            self.end_headers()
            self.wfile.write(self.headers["Host"].encode()[:10].ljust(size, b"."))

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Runs a server that counts as public, under the name HOST."""
    resolve(monkeypatch, ["127.0.0.1"])
    monkeypatch.setattr(media_download, "may_connect", lambda address, refused, allowed: address == "127.0.0.1")
    with serving() as port:
        yield port


@contextlib.contextmanager
def serving() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.slow = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.slow.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()
        thread.join(10)


def resolve(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> list[str]:
    """Makes all names resolve to these addresses; returns the list of resolved names."""
    asked: list[str] = []

    def found(host: str, port: int, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return asked


def test_a_download(port: int) -> None:
    assert downloaded(f"http://{HOST}:{port}/a", DOWNLOADS) == b"pictures.e"
    assert downloaded(f"http://{HOST}:{port}/to//a", DOWNLOADS) == b"pictures.e"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/large", "at most 1000 bytes"),
        ("/gone", "it answers 404"),
        ("/lies", "could not be fetched"),
        ("/again", "more than 3 redirects"),
        ("/to/http://169.254.169.254/latest", "169.254.169.254: not among the hosts"),
        ("/to/file:///etc/passwd", "not a plain"),
        (f"/to/http://{HOST}:1/", "could not be fetched"),
    ],
)
def test_downloads_that_fail(port: int, path: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        downloaded(f"http://{HOST}:{port}{path}", DOWNLOADS)


@pytest.mark.parametrize("path", ["slow", "drips"])
def test_a_slow_server(port: int, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Covers a server that never ends its headers but sends bytes within the socket's timeout."""
    monkeypatch.setattr(media_download, "TIMEOUT_S", 0.3)
    with pytest.raises(RequestError, match="could not be fetched"):
        downloaded(f"http://{HOST}:{port}/{path}", DOWNLOADS)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], []])
def test_a_name_with_a_private_address(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """A name with any private address is refused without connecting, even if it also has public ones."""
    asked = resolve(monkeypatch, addresses)

    def connect(*_: object) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RequestError, match="its address is not public"):
        downloaded(f"http://{HOST}/a", DOWNLOADS)
    assert asked == [HOST]


def test_an_address_that_is_itself_allowed() -> None:
    """An allowed address may be private if it is not the cluster's; others stay refused, also after redirects."""
    with serving() as port:
        url = f"http://127.0.0.1:{port}/a"
        for domains in (("127.0.0.1",), (ANY_HOST, "127.0.0.1")):
            assert downloaded(url, Downloads(domains, (), 1000)) == b"127.0.0.1:"
        for domains, refused in (((ANY_HOST,), ()), (("127.0.0.1",), ("127.0.0.1",)), ((ANY_HOST, "10.0.0.5"), ())):
            with pytest.raises(RequestError, match="its address is not public"):
                downloaded(url, Downloads(domains, refused, 1000))
        with pytest.raises(RequestError, match=r"10.0.0.5: its address is not public"):
            downloaded(f"http://127.0.0.1:{port}/to/http://10.0.0.5/", Downloads((ANY_HOST, "127.0.0.1"), (), 1000))
    assert may_connect("fd00::1", (), {"fd00::1"})
    assert target_of("http://[FD00:0::1]:8/a", ("fd00::1",)) == ("http", "fd00::1", 8, "/a")


def test_the_address_that_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves differently the next time gains nothing."""
    asked, connected = resolve(monkeypatch, ["8.8.8.8"]), []

    def connect(place: tuple[str, int], timeout_s: float) -> None:
        connected.append(place)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RequestError, match="could not be fetched"):
        downloaded(f"https://{HOST}/a", DOWNLOADS)
    assert (asked, connected) == ([HOST], [("8.8.8.8", 443)])


def test_files_below_the_root_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    (root / "a b").write_bytes(b"inside")
    outside.write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "a b")
    os.mkfifo(root / "pipe")
    places = Places(local_root=str(root))
    assert fetched(f"file://{root}/a%20b", places) == fetched(f"file://{root}/inner", places) == b"inside"
    for path in (outside, root, root / "link", root / "pipe", root / "no", f"{root}/../outside", "host/a", f"{root}\0"):
        with pytest.raises(RequestError, match="must name a file below the server's"):
            fetched(f"file://{path}", places)
    with monkeypatch.context() as patch:  # a link that changes after it was checked
        patch.setattr(os.path, "realpath", lambda path: os.fsencode(root) if isinstance(path, bytes) else str(root))
        with pytest.raises(RequestError, match="must name a file below the server's"):
            fetched(f"file://{root}/link", places)
    with pytest.raises(RequestError, match="a video's file has at most 5 bytes"):
        fetched(f"file://{root}/a%20b", places, (), VIDEO._replace(max_nbytes=5))
    for url, flag in (("file:///a", "--allowed-local-media-path"), ("https://a/b", "--allowed-media-domains")):
        with pytest.raises(
            RequestError, match=f"images come as data: URLs; send one of these; the server's {flag} would"
        ):
            fetched(url, Places())
