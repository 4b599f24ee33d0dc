"""The instances that this process knows, and what their connections tell of them. On the event loop.

Who is in the list, and at which address, is decided by who inherits: the scheduler asks the workers (membership.py), an
API process is told by the scheduler (mirror.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance, InstanceState
from pd_cluster.cluster.prefixes import KnownBlocks
from pd_cluster.mailbox import Mailbox
from pd_cluster.reports import InstanceInfo

log = logging.getLogger(__name__)


class Roster:
    """`lost(instance, reason)` is called when an open connection to a worker has closed."""

    def __init__(self, instances: list[Instance], mailbox: Mailbox, lost: Callable[[Instance, str], None]) -> None:
        self.instances = instances
        self._mailbox = mailbox
        self._lost = lost
        self._by_conn: dict[str, Instance] = {}
        self._open: set[str] = set()  # connections: what was sent over them may have to go elsewhere
        self._changed = asyncio.Event()

    def connect(self, instance: Instance, info: InstanceInfo) -> None:
        """Opens a connection to this life of it; `on_opened` or `on_closed` follows."""
        self.set_state(instance, "connecting", "")
        instance.conn = self._mailbox.connect(info.name, info.epoch, instance.host, info.control_port, info.public_key)
        self._by_conn[instance.conn] = instance

    # ---- the mailbox's events

    def on_opened(self, conn: str) -> None:
        instance = self._by_conn.get(conn)
        if instance is not None:
            self._open.add(conn)
            instance.ready_s = instance.heard_s = asyncio.get_running_loop().time()
            self.set_state(instance, "ready", "")
            self._has_come(instance)

    def on_heartbeat(self, conn: str, load: wire.Load) -> None:
        instance = self._by_conn.get(conn)
        if instance is not None:
            instance.load = load
            instance.heard_s = asyncio.get_running_loop().time()
            instance.num_heartbeats += 1
            self._note_links(instance)
            self.wake()

    def on_cache_keys(self, conn: str, news: wire.CacheKeys) -> None:
        instance = self._by_conn.get(conn)
        if instance is not None:
            instance.known_blocks.hear(news)

    def on_closed(self, conn: str, reason: str) -> None:
        instance = self._by_conn.pop(conn, None)
        if instance is None:
            return
        was_open = conn in self._open  # whatever others have said of the instance meanwhile
        self._open.discard(conn)
        self.set_state(instance, *self._state_after(instance, reason))
        instance.conn = ""
        instance.load = wire.Load()
        instance.known_blocks = KnownBlocks()
        if was_open:
            self._lost(instance, reason)
            self._has_gone(instance)

    def _state_after(self, instance: Instance, reason: str) -> tuple[InstanceState, str]:
        """What it is, and why, now that its connection has closed for this reason."""
        return "unreachable", reason

    def _has_come(self, instance: Instance) -> None:
        """It is ready now."""

    def _has_gone(self, instance: Instance) -> None:
        """It was ready, and what ran there has been told."""

    def _note_links(self, prefill: Instance) -> None:
        for decode in self.instances:
            if decode.role == "decode" and prefill.linked_to(decode):
                prefill.was_linked = decode.was_linked = True

    # ---- who waits

    async def change(self) -> None:
        """Until anything is heard of any worker."""
        await self._changed.wait()

    def wake(self) -> None:
        """Whoever waits goes on; who waits from now on waits for the next time."""
        self._changed.set()
        self._changed = asyncio.Event()

    def set_state(self, instance: Instance, state: InstanceState, reason: str) -> None:
        if (instance.state, instance.reason) != (state, reason):
            level = logging.WARNING if state in ("failed", "misplaced") else logging.INFO
            log.log(level, "%s is %s%s", instance.name, state, f": {reason}" if reason else "")
        instance.state, instance.reason = state, reason
        self.wake()
