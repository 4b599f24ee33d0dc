"""What the scheduler knows of a worker. Plain state, read by policy, written by membership and router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pd_cluster.admission import peer_key
from pd_cluster.cluster.prefixes import KnownBlocks, Prompt
from pd_cluster.reports import InstanceInfo
from pd_cluster.types import Role
from pd_cluster.wire import Load, PeerInfo

Service = Literal["in", "out", "leaving"]
InstanceState = Literal["unreachable", "loading", "connecting", "ready", "failed", "misplaced"]


@dataclass(slots=True)
class Instance:
    """One entry of the global rank table; `info` is what its process said of itself, None while nobody answers.

    `role` is what it is now, whatever its name says; `service` and `next_role` are what an operator wants of it
    (elastic.py).
    """

    name: str
    role: Role
    host: str
    port: int
    device_ids: list[str]
    state: InstanceState = "unreachable"
    reason: str = ""
    info: InstanceInfo | None = None
    conn: str = ""
    ready_s: float = float("-inf")  # when this life of it was reached last, by the event loop's clock
    heard_s: float = float("-inf")  # when it last said that it lives, likewise
    load: Load = field(default_factory=Load)
    num_heartbeats: int = 0
    was_linked: bool = False  # it has been part of a pair, in this or an earlier life
    outstanding_tokens: int = 0  # of work that this scheduler has sent and not seen finished
    others_tokens: int = 0  # that other API processes have sent, as far as a heartbeat tells
    num_outstanding: int = 0
    known_blocks: KnownBlocks = field(default_factory=KnownBlocks)  # of its prefix cache
    service: Service = "in"
    next_role: Role | None = None  # what it changes to as soon as it is empty
    drain_deadline_s: float = 0.0  # until then what runs there may end there
    drain_timeout_s: float = 0.0  # how long that was when it began

    @property
    def epoch(self) -> int:
        return self.info.epoch if self.info is not None else 0

    @property
    def key(self) -> str:
        return peer_key(self.name, self.epoch)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.load.is_draining and self.service == "in" and self.next_role is None

    @property
    def is_empty(self) -> bool:
        """Nothing of this scheduler is on it, and it says so itself."""
        load = self.load
        busy = load.num_running + load.num_waiting + load.num_landing + load.num_exporting + load.num_held_blocks
        return not self.is_ready or not (self.num_outstanding or busy)

    @property
    def shown_state(self) -> str:
        if not self.is_ready:
            return self.state
        if self.service == "leaving":
            return "leaving"
        if self.next_role is not None:
            return "changing"
        if self.service == "out":
            return "drained" if self.is_empty else "draining"
        return "draining" if self.load.is_draining else self.state

    @property
    def tokens_ahead(self) -> int:
        """Of work that a new request finds there: what this process has sent, and others."""
        return self.outstanding_tokens + self.others_tokens

    def num_cached(self, prompt: Prompt) -> int:
        return prompt.num_cached(self.info, self.known_blocks)

    def linked_to(self, other: Instance) -> bool:
        """Whether KV cache can go from this prefill instance to that decode instance."""
        return self.load.links.get(other.key, "").startswith("up")

    def to_peer(self) -> PeerInfo:
        info = self.info
        return PeerInfo(
            name=self.name,
            epoch=self.epoch,
            role=self.role,
            host=self.host,
            control_port=info.control_port if info is not None else 0,
            public_key=info.public_key if info is not None else b"",
            tp_size=info.tp_size if info is not None else 1,
        )
