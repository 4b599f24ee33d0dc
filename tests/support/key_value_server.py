"""A real server of the Redis protocol: the installed one, or Debian's package unpacked into the test's folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from pd_cluster.cluster.processes.port_reservations import free_port_pair

SERVERS = ("valkey-server", "redis-server")
LIBRARIES = ("libjemalloc2", "liblzf1", "liblua5.1-0", "lua-bitop", "lua-cjson", "libatomic1")
START_S = 20.0


def server_command(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns a server's command and environment; skips the test if no server is available."""
    found = next((path for name in SERVERS if (path := shutil.which(name))), None)
    if found is not None:
        return [found], {}
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("no valkey-server or redis-server, and no Debian to get one from")
    for tools in (("valkey-server", "valkey-tools"), ("redis-server", "redis-tools")):
        got = subprocess.run(
            ["apt-get", "download", "-q", *tools, *LIBRARIES], cwd=folder, capture_output=True, timeout=120
        )
        if got.returncode == 0:
            for package in folder.glob("*.deb"):
                subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True, timeout=60)
            program = next(path for name in SERVERS if (path := folder / "usr" / "bin" / name).exists())
            libraries = ":".join(str(path) for path in (folder / "usr" / "lib").iterdir() if path.is_dir())
            return [str(program)], {"LD_LIBRARY_PATH": libraries}
    pytest.skip("Debian's packages of a server cannot be downloaded")


class KeyValueServer:
    """`with KeyValueServer(folder) as server:`; serves at the loopback address and writes nothing to disk."""

    def __init__(self, folder: Path) -> None:
        import redis

        command, env = server_command(folder)
        self.port = free_port_pair()
        self.url = f"redis://127.0.0.1:{self.port}"
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [*command, *options, "--dir", str(folder)], env={**os.environ, **env}, stdout=subprocess.DEVNULL
        )
        self.client = redis.Redis.from_url(self.url, socket_timeout=10)

    def __enter__(self) -> KeyValueServer:
        import redis

        stop_s = time.monotonic() + START_S
        while True:
            try:
                self.client.ping()
                return self
            except redis.RedisError:
                if time.monotonic() > stop_s or self.process.poll() is not None:
                    self.__exit__()
                    raise
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(10)
