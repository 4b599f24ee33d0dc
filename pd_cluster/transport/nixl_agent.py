"""The NIXL agent of a process: its registered memory, the remote agents that it reads from, and the reads' states.

Only this module imports NIXL. All memory is registered before the metadata is sent, and stays registered, because
reloading an agent's metadata would lose track of the reads under way. Knows nothing of blocks, links or layouts.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pd_cluster.devices.device_streams import poll
from pd_cluster.errors import LinkError, first_line
from pd_cluster.transport.nixl_network import bind_ucx
from pd_cluster.transport.nixl_offer import DEVICE, HOST, ByteRanges

log = logging.getLogger(__name__)

API = "nixl_cu13._api"
BACKEND = "UCX"
NUM_SLOTS = 32
ASK_S = 0.5  # between two checks whether an agent is alive
DISCONNECT = "nixlRemoteDisconnectError"


@dataclass(frozen=True, slots=True)
class Ranges:
    """Memory ranges of one process, all of one kind. `rows` [num_ranges, 3]: address, number of bytes, device."""

    kind: str
    rows: np.ndarray[Any, np.dtype[np.uint64]]


def ranges_at(base: int, places: ByteRanges, kind: str, device: int) -> Ranges:
    """Returns the memory ranges for byte ranges that count from a base address."""
    rows = np.array([(base + offset, nbytes, device) for offset, nbytes in places], dtype=np.uint64)
    return Ranges(kind, rows.reshape(-1, 3))


class ReadState(enum.Enum):
    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class RemoteAgent:
    """Another process's agent. It is removed once no read from it is under way and it is gone or has no lane left.

    `is_gone`: the channel to the agent is torn down, so nothing can arrive from it any more. An error of a read alone
    does not prove that, and neither releasing a read nor removing an agent tears the channel down.
    """

    name: str
    metadata: bytes
    num_lanes: int = 0
    reads: set[Read] = field(default_factory=set)
    has_failed: bool = False
    is_gone: bool = False
    is_removed: bool = False
    asked_s: float = 0.0  # when this process last checked whether the agent is alive


@dataclass(eq=False, slots=True)
class Read:
    """A read from another agent's memory into this process's memory."""

    peer: RemoteAgent
    handle: Any
    state: ReadState = ReadState.UNDER_WAY

    @property
    def is_over(self) -> bool:
        """Whether the read can no longer write anything."""
        is_cut_off = self.peer.is_gone and self.peer.is_removed
        return self.state is ReadState.DONE or (self.state is ReadState.FAILED and is_cut_off)


class ReadBuffers:
    """Buffers in registered host memory, [num_slots, slot_nbytes]. Release a buffer only once no read writes to it."""

    def __init__(self, slot_nbytes: int, is_pinned: bool) -> None:
        self.buffers = torch.empty(NUM_SLOTS, slot_nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.nbytes = slot_nbytes
        self._free = list(range(NUM_SLOTS))
        self._lock = threading.Lock()

    def take(self, timeout_s: float) -> int:
        """Takes a free buffer. Raises LinkError if none becomes free in time."""
        found: list[int] = []
        if not poll(lambda: self._take_into(found), timeout_s):
            raise LinkError(f"all {NUM_SLOTS} buffers for converted KV cache are in use", retry=True)
        return found[0]

    def release(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def ranges(self, slot: int, places: ByteRanges) -> Ranges:
        """Returns the memory ranges for byte ranges within a buffer."""
        return ranges_at(self.buffers[slot].data_ptr(), places, HOST, 0)

    def _take_into(self, found: list[int]) -> bool:
        with self._lock:
            if self._free:
                found.append(self._free.pop(0))
        return bool(found)


def make_agent(name: str) -> Any:
    """Returns a bare agent over UCX. Its errors have no common base class."""
    api = importlib.import_module(API)
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[], sync_mode=sync))
    agent.create_backend(BACKEND, {})
    return agent


class Agent:
    """This process's NIXL agent. The threads of all links may use it."""

    def __init__(self, host: str, pool: Sequence[torch.Tensor], slots: ReadBuffers) -> None:
        """`pool`: the allocations from which other processes read, and to which reads write. Raises LinkError."""
        bind_ucx(host)
        self.name = secrets.token_hex(16)
        self.slots = slots
        self._lock = threading.Lock()
        self._peers: dict[str, RemoteAgent] = {}
        self._awaited: set[bytes] = set()
        try:
            self._agent = make_agent(self.name)
            for part in (*pool, slots.buffers):
                on_host = part.device.type == "cpu"
                row = (part.data_ptr(), part.nbytes, 0 if on_host else part.device.index, "")
                self._agent.register_memory([row], HOST if on_host else DEVICE)
            self.metadata = bytes(self._agent.get_agent_metadata())
        except Exception as error:
            raise LinkError(f"NIXL does not start: {first_line(error)}") from error

    # ---- remote agents

    def attach(self, name: str, metadata: bytes) -> RemoteAgent:
        """Adds a lane from the agent with this name. Raises LinkError."""
        if name.encode() not in metadata:
            raise LinkError("the name of the prefill instance's agent is not the one in its metadata")
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                try:
                    loaded = self._agent.add_remote_agent(metadata)
                except Exception as error:
                    raise LinkError(f"the prefill instance's agent: {first_line(error)}", retry=True) from error
                if loaded not in (name, name.encode()):
                    raise LinkError("the name of the prefill instance's agent is not the one in its metadata")
                peer = self._peers[name] = RemoteAgent(name, metadata)
            if peer.has_failed:
                raise LinkError("the connection to the prefill instance's agent is being closed", retry=True)
            if peer.metadata != metadata:
                raise LinkError("the prefill instance's agent has changed its metadata")
            peer.num_lanes += 1
            return peer

    def detach(self, peer: RemoteAgent) -> None:
        """Ends a lane that has no read under way."""
        with self._lock:
            peer.num_lanes -= 1
            self._tidy(peer)

    def read(self, peer: RemoteAgent, remote: Ranges, local: Ranges, notice: bytes) -> Read:
        """Begins a read. When it is done, the other agent gets the notice, unless the notice is empty.

        Raises LinkError if the read cannot begin; later failures appear in the read's state.
        """
        agent = self._agent
        with self._lock:
            if peer.has_failed or peer.is_removed:
                raise LinkError("the connection to the prefill instance's agent has failed", retry=True)
            try:
                sides = (agent.get_xfer_descs(each.rows, each.kind) for each in (local, remote))
                handle = agent.initialize_xfer("READ", *sides, peer.name, notice)
            except Exception as error:
                raise LinkError(f"reading KV cache failed: {first_line(error)}", retry=True) from error
            read = Read(peer, handle)
            peer.reads.add(read)
        try:
            agent.transfer(handle)
        except Exception as error:
            log.warning("a read of KV cache has failed: %s", first_line(error))
            self._end(read, ReadState.FAILED, self._is_disconnect(error))
        return read

    def look_at(self, read: Read) -> ReadState:
        """Returns the state of a read, and records its end."""
        if read.state is ReadState.FAILED:
            self._ask(read.peer)
        elif read.state is ReadState.UNDER_WAY:
            is_gone = False
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:
                log.warning("a read of KV cache has failed: %s", first_line(error))
                state, is_gone = "ERR", self._is_disconnect(error)
            if state != "PROC":
                self._end(read, ReadState.DONE if state == "DONE" else ReadState.FAILED, is_gone)
        return read.state

    def _ask(self, peer: RemoteAgent) -> None:
        """Checks, after a read from a peer has failed, whether the peer is gone."""
        with self._lock:
            now_s = time.monotonic()
            if peer.is_gone or peer.is_removed or now_s < peer.asked_s + ASK_S:
                return
            peer.asked_s = now_s
            try:
                self._agent.send_notif(peer.name, b"")
            except Exception as error:
                peer.is_gone = self._is_disconnect(error)
            self._tidy(peer)

    def _is_disconnect(self, error: Exception) -> bool:
        return type(error).__name__ == DISCONNECT

    def _end(self, read: Read, state: ReadState, is_gone: bool = False) -> None:
        with contextlib.suppress(Exception):  # releasing a failed read may fail
            read.handle.release()
        with self._lock:
            peer = read.peer
            read.state = state
            peer.reads.discard(read)
            peer.has_failed |= state is ReadState.FAILED
            peer.is_gone |= is_gone
            self._tidy(peer)

    def _tidy(self, peer: RemoteAgent) -> None:
        is_unused = peer.is_gone or (not peer.num_lanes and not peer.has_failed)
        if not peer.reads and not peer.is_removed and is_unused:
            with contextlib.suppress(Exception):  # the agent may already be gone
                self._agent.remove_remote_agent(peer.name)
            peer.is_removed = True
            del self._peers[peer.name]

    # ---- notices of other agents' reads

    def await_notice(self, notice: bytes) -> None:
        """Registers a notice, so that `was_noticed` can report its arrival."""
        with self._lock:
            self._awaited.add(notice)

    def forget_notice(self, notice: bytes) -> None:
        with self._lock:
            self._awaited.discard(notice)

    def was_noticed(self, notice: bytes) -> bool:
        """Whether a registered notice has arrived. Raises LinkError."""
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:
            raise LinkError(f"NIXL does not deliver notices: {first_line(error)}", retry=True) from error
        with self._lock:
            for notices in arrived.values():
                self._awaited.difference_update(notices)
            return notice not in self._awaited

    def notice(self, peer: RemoteAgent, notice: bytes) -> None:
        """Sends a notice without a read. Raises LinkError."""
        try:
            self._agent.send_notif(peer.name, notice)
        except Exception as error:
            raise LinkError(f"cannot notify the prefill instance's agent: {first_line(error)}", retry=True) from error
