"""Serves a folder as a model of a Hugging Face hub: what huggingface_hub asks of one, on a port of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@contextmanager
def local_hub(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the hub's address and the list of the files that it has given out."""
    given: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(is_whole=False)

        def do_GET(self) -> None:
            self._answer(is_whole=True)

        def _answer(self, is_whole: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{name}"):
                files = sorted(folder.iterdir())
                found: object = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file.name} for file in files]}
                if "/tree/" in path:
                    found = [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
                        for file in files
                    ]
                self._send(json.dumps(found).encode(), is_whole)
                return
            file = folder / path.rpartition("/")[2]
            if not path.startswith(f"/{name}/resolve/") or not file.is_file():
                self.send_error(404)
                return
            if is_whole:
                given.append(file.name)
            self._send(file.read_bytes(), is_whole)

        def _send(self, content: bytes, is_whole: bool) -> None:
            self.send_response(200)
            for header, value in (
                ("Content-Length", str(len(content))),
                ("ETag", f'"{hashlib.sha256(content).hexdigest()}"'),
                ("X-Repo-Commit", COMMIT),
                ("Content-Type", "application/json"),
            ):
                self.send_header(header, value)
            self.end_headers()
            if is_whole:
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", given
        finally:
            server.shutdown()
            thread.join()
