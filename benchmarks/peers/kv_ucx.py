"""Plain UCX between two processes, through bare agents of NIXL: one range is read in large payloads."""

from __future__ import annotations

import secrets
import time
from collections import deque
from typing import Any

import msgspec

from benchmarks.kv.spec import Answer, OpenUcx, Ucx
from benchmarks.peers.kv_lane import HOST
from pd_cluster.devices.streams import poll
from pd_cluster.errors import LinkError
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.nixl_agent import make_agent
from pd_cluster.transport.nixl_network import bind_ucx

DEADLINE_S = 60.0
NUM_UNDER_WAY = 2
KIND = "DRAM"


class Address(msgspec.Struct, frozen=True):
    name: str
    metadata: bytes
    base: int


class UcxPeer:
    """One end. The reader's own memory is its pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._peer: Address | None = None
        self._agent: Any = None

    def open(self, command: OpenUcx) -> Answer:
        bind_ucx(HOST)
        name = secrets.token_hex(8)
        self._agent = make_agent(name)
        whole = self._pool.flat()
        self._agent.register_memory([(whole.data_ptr(), whole.nbytes, 0, "")], KIND)
        if command.address:
            self._peer = msgspec.msgpack.decode(command.address, type=Address)
            self._agent.add_remote_agent(self._peer.metadata)
        own = Address(name, bytes(self._agent.get_agent_metadata()), whole.data_ptr())
        return Answer(address=msgspec.msgpack.encode(own))

    def read(self, command: Ucx) -> Answer:
        assert self._peer is not None
        size, whole = command.payload_nbytes, self._pool.flat()
        most = self._pool.nbytes // size
        start_s = time.monotonic()
        under_way: deque[Any] = deque()
        for at in range(command.nbytes // size):
            if len(under_way) == NUM_UNDER_WAY:
                self._finish(under_way.popleft())
            offset = at % most * size
            to, of = ([(base + offset, size, 0)] for base in (whole.data_ptr(), self._peer.base))
            sides = (self._agent.get_xfer_descs(each, KIND) for each in (to, of))
            handle = self._agent.initialize_xfer("READ", *sides, self._peer.name)
            self._agent.transfer(handle)
            under_way.append(handle)
        for handle in under_way:
            self._finish(handle)
        return Answer(took_s=time.monotonic() - start_s)

    def _finish(self, handle: Any) -> None:
        if not poll(lambda: self._agent.check_xfer_state(handle) != "PROC", DEADLINE_S):
            raise LinkError(f"a plain read was not done within {DEADLINE_S:g} s")
        handle.release()
