"""Runs a program on a simulated host whose network has only one server, with a public name and address.

    unshare --net --mount python public_host.py FOLDER NAME PROGRAM

FOLDER has the certificate `server.pem`, its key `server.key`, and the files to serve. The server appends each requested
path as a line to FOLDER/asked.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ADDRESS = "8.8.8.8"  # reaches no real host, because this network is isolated


class Server(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        with Path("asked").open("a", encoding="utf-8") as file:
            file.write(f"{self.path}\n")
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


def main(folder: str, name: str, program: str) -> int:
    for arguments in ("ip link set lo up", f"ip addr add {ADDRESS}/32 dev lo"):
        subprocess.run(arguments.split(), check=True, timeout=10)
    os.chdir(folder)
    Path("hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {name}\n", encoding="utf-8")
    subprocess.run(["mount", "--bind", "hosts", "/etc/hosts"], check=True, timeout=10)
    server = ThreadingHTTPServer((ADDRESS, 443), Server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("server.pem", "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    trusted = {"SSL_CERT_FILE": f"{folder}/server.pem", "REQUESTS_CA_BUNDLE": f"{folder}/server.pem"}
    return subprocess.run([sys.executable, program], env={**os.environ, **trusted}).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
