"""An unauthorized process on the network: `-m tests.support.outsider PID`.

Until it reads a line on its standard input, it repeatedly looks for torch's TCP stores at every port on which process
PID listens, reads their keys and overwrites them. Then it looks once more and prints one line of JSON: the tried
ports and the keys that it read.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import sys
from datetime import timedelta
from typing import Any

from tests.support.listeners import listeners

TIMEOUT = timedelta(seconds=5)
ANSWER_S = 0.3
BETWEEN_S = 0.01
HELLO = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 7)  # magic number and a ping: a store answers with four bytes
JUNK = b"\x02\x00" + bytes(126)


def is_store(host: str, port: int) -> bool:
    """Probes a port, because torch's own client waits forever for a listener of another kind."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=ANSWER_S) as connection:
        connection.sendall(HELLO)
        return len(connection.recv(64)) == 4
    return False


class Outsider:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.tried: set[int] = set()
        self.keys: set[str] = set()
        self._stores: dict[int, Any] = {}

    def look(self) -> None:
        ports = {each.port: each.host for each in listeners([self._pid])}
        for port in ports.keys() - self.tried:
            self.tried.add(port)
            if is_store(ports[port], port):
                from torch._C._distributed_c10d import TCPStore  # slow, so imported only if there is a store

                self._stores[port] = TCPStore(ports[port], port, is_master=False, timeout=TIMEOUT)
        for port, store in list(self._stores.items()):
            try:
                for key in store.list_keys():
                    self.keys.add(key)
                    store.set(key, JUNK)
            except RuntimeError:  # the store is gone
                del self._stores[port]


def main(pid: int) -> None:
    outsider = Outsider(pid)
    print("ready", flush=True)
    while True:
        outsider.look()
        if select.select([sys.stdin], [], [], BETWEEN_S)[0]:
            break
    outsider.look()  # once more, for stores that appeared since
    print(json.dumps({"ports": sorted(outsider.tried), "keys": sorted(outsider.keys)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
