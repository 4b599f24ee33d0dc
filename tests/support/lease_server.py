"""A Kubernetes API server with Lease objects only, over HTTP or HTTPS on loopback.

To a client of leases it behaves like the real one: resourceVersions, 409 for a stale version or an earlier object's
uid, 401 without a known token, 403 without permission, 404, 422 for too large annotations, 429 with Retry-After.
It can be slow, lose a response after the change, send a wrong response, or be down.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.certificates import Certificate

PATH = "/apis/coordination.k8s.io/v1/namespaces/"
MOST_ANNOTATION_NBYTES = 256 << 10
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "DELETE": "delete"}


class Status(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        self.code = code
        self.body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
        self.body["code"] = code


class LeaseServer:
    """`rights`: token -> permitted verbs. The attributes after it are faults that a test can switch on."""

    def __init__(self) -> None:
        self.rights: dict[str, set[str]] = {}
        self.delay_s = 0.0
        self.drip_s = 0.0  # pause between the bytes of a response
        self.is_endless = False  # sends a response head that never ends, byte by byte
        self.loses_answers = False
        self.answers: tuple[int, bytes] | None = None
        self.url = ""
        self.asked: Counter[str] = Counter()
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._version = 100
        self._lock = threading.Lock()

    def object(self, namespace: str, name: str) -> dict[str, Any]:
        with self._lock:
            found: dict[str, Any] = json.loads(json.dumps(self._objects[namespace, name]))
            return found

    def put(self, namespace: str, name: str, changed: dict[str, Any]) -> None:
        """Changes a lease as another client with all permissions would."""
        with self._lock:
            self._store((namespace, name), changed)

    def remove(self, namespace: str, name: str) -> None:
        with self._lock:
            del self._objects[namespace, name]

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        namespace, kind, *names = path.removeprefix(PATH).split("/")
        if not path.startswith(PATH) or kind != "leases" or len(names) != (method != "POST"):
            raise Status(404, "NotFound", "the server could not find the requested resource")
        if token not in self.rights:
            raise Status(401, "Unauthorized", "Unauthorized")
        if VERBS[method] not in self.rights[token]:
            raise Status(403, "Forbidden", f"cannot {VERBS[method]} leases in the namespace {namespace!r}")
        with self._lock:
            if method == "GET":
                return 200, self._found((namespace, names[0]))
            new = json.loads(body)
            key = namespace, new["metadata"]["name"]
            self._check(key, new, names)
            old = self._objects.get(key)
            if method == "POST":
                if old is not None:
                    raise Status(409, "AlreadyExists", f'leases "{key[1]}" already exists')
                if new["metadata"].get("resourceVersion"):
                    raise Status(400, "BadRequest", "resourceVersion should not be set on objects to be created")
                return 201, self._store(key, new)
            old = self._found(key)
            for field in ("resourceVersion", "uid"):
                if new["metadata"].get(field, old["metadata"][field]) != old["metadata"][field]:
                    raise Status(409, "Conflict", f"the object has been modified: {field}")
            return 200, self._store(key, new)

    def _found(self, key: tuple[str, str]) -> dict[str, Any]:
        if key not in self._objects:
            raise Status(404, "NotFound", f'leases.coordination.k8s.io "{key[1]}" not found')
        return self._objects[key]

    def _check(self, key: tuple[str, str], new: dict[str, Any], names: list[str]) -> None:
        metadata = new["metadata"]
        if (new["apiVersion"], new["kind"]) != ("coordination.k8s.io/v1", "Lease") or metadata["namespace"] != key[0]:
            raise Status(400, "BadRequest", "it is another object")
        if names and names != [metadata["name"]]:
            raise Status(400, "BadRequest", "the name of the object does not match the name on the URL")
        nbytes = sum(len(name) + len(value) for name, value in metadata.get("annotations", {}).items())
        if nbytes > MOST_ANNOTATION_NBYTES:
            raise Status(422, "Invalid", "metadata.annotations: Too long: may not be more than 262144 bytes")

    def _store(self, key: tuple[str, str], new: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        uid = self._objects[key]["metadata"]["uid"] if key in self._objects else str(uuid.uuid4())
        metadata = {**new["metadata"], "name": key[1], "namespace": key[0], "uid": uid}
        self._objects[key] = stored = {**new, "metadata": {**metadata, "resourceVersion": str(self._version)}}
        return stored


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # sends a response in one packet
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: Any) -> None: ...

    def _serve(self) -> None:
        leases = self.server.leases
        leases.asked[self.command] += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if leases.delay_s:
            time.sleep(leases.delay_s)  # the slowness that a test switched on
        code, sent = 200, b""
        try:
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            code, found = leases.answer(self.command, self.path, token, body)
            sent = json.dumps(found).encode()
        except Status as status:
            code, sent = status.code, json.dumps(status.body).encode()
        if leases.answers is not None:
            code, sent = leases.answers
        if leases.loses_answers:
            self.close_connection = True
            return
        if leases.is_endless:
            self._drip_on()
            return
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if not leases.drip_s:
            self.wfile.write(sent)
            return
        with contextlib.suppress(OSError):
            for byte in sent:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(leases.drip_s)

    def _drip_on(self) -> None:
        """Sends a byte every `drip_s` until the client disconnects."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-More: ")
            while True:
                self.wfile.write(b"a")
                self.wfile.flush()
                time.sleep(0.02)

    do_GET = do_POST = do_PUT = _serve


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, leases: LeaseServer, port: int) -> None:
        self.leases = leases
        self._open: set[Any] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Closes the connections that clients keep open."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Ignores clients that close their connections."""


@contextlib.contextmanager
def serving(leases: LeaseServer, certificate: Certificate | None = None, port: int = 0) -> Iterator[LeaseServer]:
    """Serves these leases until the block ends; the lease objects remain."""
    server = _Server(leases, port)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certfile, certificate.keyfile)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    leases.url = f"http{'s' * (certificate is not None)}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield leases
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        server.hang_up()


def make_account(folder: Path, certificate: Certificate, token: str) -> Path:
    """Writes a service account's files as the kubelet mounts them; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(token, encoding="ascii")
    (folder / "ca.crt").write_bytes(certificate.certfile.read_bytes())
    return folder
