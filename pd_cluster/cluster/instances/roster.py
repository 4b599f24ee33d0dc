"""Keeps the instances that this process knows, with states derived from their connections. Runs on the event loop.

Subclasses decide which instances are listed, and their addresses: the scheduler asks the workers
(worker_membership.py), an API process receives the list from the scheduler (membership_mirror.py).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import KnownBlocks
from pd_cluster.process_messages import InstanceInfo, InstanceState

log = logging.getLogger(__name__)


class RosterFollower(Protocol):
    """Has requests at instances; the roster notifies it when requests must move elsewhere."""

    def on_lost(self, instance: Instance, reason: str) -> None:
        """Called when an open connection to a worker has closed."""

    def move_on(self, instance: Instance, why: str) -> None:
        """Moves the follower's requests away from a live instance that must be emptied."""


class Members(Protocol):
    """The part of a roster that routing needs."""

    instances: list[Instance]

    def watch(self, follower: RosterFollower) -> None: ...
    async def change(self) -> None: ...


class RosterMailbox(Protocol):
    """The part of the mailbox that a roster needs."""

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str: ...
    def disconnect(self, conn: str) -> None: ...


class Roster:
    def __init__(self, instances: list[Instance], lines: RosterMailbox) -> None:
        self.instances = instances
        self._lines = lines
        self._followers: list[RosterFollower] = []
        self._by_conn: dict[str, Instance] = {}
        self._open: set[str] = set()  # connections whose requests may have to move elsewhere
        self._changed = asyncio.Event()
        # name@epoch if this is one of several schedulers: workers report each scheduler's work under its key
        self.own_key = ""

    def watch(self, follower: RosterFollower) -> None:
        """Adds a follower, which is notified of losses."""
        self._followers.append(follower)

    def connect(self, instance: Instance, info: InstanceInfo) -> None:
        """Opens a connection to this life of the instance; the mailbox then calls `on_opened` or `on_closed`."""
        self.set_state(instance, "connecting", "")
        instance.conn = self._lines.connect(info.name, info.epoch, instance.host, info.control_port, info.public_key)
        self._by_conn[instance.conn] = instance

    # ---- the mailbox's events

    def on_opened(self, conn: str) -> None:
        instance = self._by_conn.get(conn)
        if instance is not None:
            self._open.add(conn)
            instance.ready_s = instance.heard_s = asyncio.get_running_loop().time()
            self.set_state(instance, "ready", "")
            self._on_ready(instance)

    def on_heartbeat(self, conn: str, load: wire.Load) -> None:
        instance = self._by_conn.get(conn)
        if instance is not None:
            instance.load = load
            if instance.info is not None and load.weights.held.digest != instance.info.numerics.weights:
                instance.info = _with_weights(instance.info, load.weights.held)
            if self.own_key:
                others = (tokens for scheduler, tokens in load.outstanding.items() if scheduler != self.own_key)
                instance.others_tokens = sum(others)
            instance.num_reported_sequences = instance.num_sequences
            instance.heard_s = asyncio.get_running_loop().time()
            instance.num_heartbeats += 1
            self.wake()

    def on_cache_keys(self, conn: str, news: wire.CacheKeys) -> None:
        instance = self._by_conn.get(conn)
        if instance is not None:
            instance.known_blocks.apply(news)

    def on_adapter_states(self, conn: str, states: wire.AdapterStates) -> None:
        """Does nothing, because only a membership sends lists of adapters."""

    def on_stale_order(self, conn: str, term: int) -> None:
        """Does nothing, because only a membership gives orders."""

    def on_weights_sought(self, conn: str, body: wire.SeekWeights | wire.WeightAddress) -> None:
        """Does nothing, because only a membership has versions of weights."""

    def on_closed(self, conn: str, reason: str) -> None:
        instance = self._by_conn.pop(conn, None)
        if instance is None:
            return
        was_open = conn in self._open  # even if another process has since reported a different state
        self._open.discard(conn)
        seen = f"it stopped as announced: {reason}" if instance.load.is_draining else reason
        self.set_state(instance, *self._state_after(instance, seen))
        instance.conn = ""
        instance.load, instance.num_reported_sequences = wire.Load(), 0
        if self.own_key:
            instance.others_tokens = 0
        instance.known_blocks = KnownBlocks()
        instance.adapters, instance.adapter_problems = frozenset(), {}
        if was_open:
            for follower in self._followers:
                follower.on_lost(instance, reason)
            self._on_unready(instance)

    def _state_after(self, instance: Instance, reason: str) -> tuple[InstanceState, str]:
        """Returns the instance's state after its connection closed for this reason, and why."""
        return "unreachable", reason

    def _on_ready(self, instance: Instance) -> None:
        """Called when an instance has become ready; a subclass may override this method."""

    def _on_unready(self, instance: Instance) -> None:
        """Called when an instance is no longer ready, after the followers were notified."""

    # ---- waiting

    async def change(self) -> None:
        """Waits for any change of any worker."""
        await self._changed.wait()

    def wake(self) -> None:
        """Wakes current waiters; later callers wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def set_state(self, instance: Instance, state: InstanceState, reason: str) -> None:
        if (instance.state, instance.reason) != (state, reason):
            level = logging.WARNING if state == "failed" else logging.INFO
            log.log(level, "%s is %s%s", instance.name, state, f": {reason}" if reason else "")
        instance.state, instance.reason = state, reason
        self.wake()


def _with_weights(info: InstanceInfo, version: wire.WeightVersion) -> InstanceInfo:
    """Returns the description of an instance whose weights were replaced: blocks of the old weights no longer match."""
    numerics = msgspec.structs.replace(info.numerics, weights=version.digest)
    return msgspec.structs.replace(info, numerics=numerics)
