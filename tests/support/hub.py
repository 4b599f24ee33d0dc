"""A local Hugging Face hub with the endpoints that huggingface_hub needs to download a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

JSON = "application/json"


class Hub:
    """`models`: name -> revision -> folder. `asked`: all requested paths. `broken`: files whose download breaks off."""

    def __init__(self, models: Mapping[str, Mapping[str, Path]]) -> None:
        self.models = models
        self.asked: list[str] = []
        self.broken: set[str] = set()
        self.gated: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def environment(self, home: Path) -> dict[str, str]:
        """Returns variables with which a process downloads models from this hub into `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *_: Any) -> None: ...

        return Handler

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(request.path).partition("?")[0]
        self.asked.append(path)
        parts = path.strip("/").split("/")
        is_listing = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_listing else parts[:2])
        revisions = self.models.get(name)
        if revisions is None:
            _send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif name in self.gated:
            _send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif (revision := _revision(revisions, parts[5] if is_listing else parts[3])) is None:
            _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif is_listing:
            files = [file for file in sorted(revisions[revision].iterdir()) if file.is_file()]
            listing: Any = {"id": name, "sha": _commit(revision)}
            listing["siblings"] = [{"rfilename": file.name} for file in files]
            if parts[4] == "tree":
                listing = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)} for f in files]
            _send(request, 200, json.dumps(listing).encode(), {})
        else:
            self._send_file(request, revisions[revision] / parts[4], _commit(revision))

    def _send_file(self, request: BaseHTTPRequestHandler, file: Path, commit: str) -> None:
        if not file.exists():
            _send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        _send(request, 200, content, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": commit}, file.name in self.broken)


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _revision(revisions: Mapping[str, Path], asked: str) -> str | None:
    return next((name for name in revisions if asked in (name, _commit(name))), None)


def _commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str], is_broken: bool = False
) -> None:
    request.send_response(status)
    for name, value in {"Content-Type": JSON, **headers, "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[: len(body) // 2] if is_broken else body)
    if is_broken:
        request.close_connection = True
