"""The scheduler's view of a worker. Plain state, read by policy, written by membership and router."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pd_cluster.cluster.instances.known_prefixes import KnownBlocks, PoolKind, Prompt, pool_kind_of
from pd_cluster.cluster.instances.peer_links import NO_LINKS, PeerLinks
from pd_cluster.engine.scheduling.step_share import long_prompt_from
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.process_messages import InstanceInfo, InstanceState, Service
from pd_cluster.types import LinkState, Role
from pd_cluster.types.variants import short_name
from pd_cluster.wire import GIVEN_UP, PAUSED, Load, PeerInfo


@dataclass(slots=True)
class Instance:
    """One entry of the global rank table, or a worker that registered itself (then `joined_as` is set; see
    join_registrar.py).

    `info` is its process's own description; None while it does not answer.

    `role` is its current role, whatever its name says; `service` and `next_role` are the operator's requests
    (elastic_membership.py).
    """

    name: str
    role: Role
    host: str
    port: int
    device_ids: list[str]
    joined_as: Role | None = None
    state: InstanceState = "unreachable"
    reason: str = ""
    info: InstanceInfo | None = None
    conn: str = ""
    ready_s: float = float("-inf")  # when this life was last reached, by the event loop's clock
    heard_s: float = float("-inf")  # when it last sent a heartbeat, by the same clock
    load: Load = field(default_factory=Load)
    num_heartbeats: int = 0
    outstanding_tokens: int = 0  # sent by this scheduler and not known to have finished
    others_tokens: int = 0  # sent by other API processes, as last reported
    num_outstanding: int = 0
    num_long: int = 0  # outstanding long prompts, which give way to shorter prompts (engine/scheduling/step_share)
    long_tokens: int = 0  # the part of outstanding_tokens that belongs to long prompts
    num_sequences: int = 0  # sent by this scheduler for decode and not known to have finished
    num_reported_sequences: int = 0  # num_sequences when it last reported its load
    known_blocks: KnownBlocks = field(default_factory=KnownBlocks)  # blocks in its prefix cache
    service: Service = "in"
    next_role: Role | None = None  # its role once it is drained
    drain_deadline_s: float = 0.0  # its requests may finish until this time
    drain_timeout_s: float = 0.0  # the time that the drain may take
    adapters: frozenset[str] = frozenset()  # digests of the wanted adapters that it has reported as loaded
    adapter_problems: dict[str, str] = field(default_factory=dict)
    _pool: tuple[InstanceInfo | None, PoolKind | None] = field(
        default=(None, None), init=False, repr=False, compare=False
    )
    _links: PeerLinks = field(default=NO_LINKS, init=False, repr=False, compare=False)

    @property
    def links(self) -> PeerLinks:
        """Its links to other instances, as last reported with its load."""
        if self._links.states is not self.load.links:
            self._links = PeerLinks.of(self.load.links)
        return self._links

    @property
    def is_registered(self) -> bool:
        return self.joined_as is not None

    @property
    def epoch(self) -> int:
        return self.info.epoch if self.info is not None else 0

    @property
    def key(self) -> str:
        return peer_key(self.name, self.epoch)

    @property
    def unit(self) -> str:
        """The unit of its last known life; "" if it is in none."""
        return self.info.unit if self.info is not None else ""

    @property
    def unit_rank(self) -> int:
        return self.info.unit_rank if self.info is not None else 0

    @property
    def unit_size(self) -> int:
        return self.info.unit_size if self.info is not None else 1

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_reached(self) -> bool:
        """Whether a connection to this life is open or opening."""
        return self.state in ("connecting", "forming", "ready")

    @property
    def is_returning(self) -> bool:
        """Whether it may soon be ready: it is starting, or its connection was closed although its process is alive."""
        is_alive = self.state == "unreachable" and self.reason in (GIVEN_UP, PAUSED)
        return is_alive or self.state in ("loading", "forming", "connecting")

    @property
    def takes_requests(self) -> bool:
        if self.state != "ready" or self.service != "in" or self.next_role is not None:
            return False
        load = self.load
        return not (load.is_draining or load.sleep_level)

    @property
    def is_empty(self) -> bool:
        """Whether it is not ready, or has no work from this scheduler and reports none from others."""
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
        if self.load.sleep_level:
            return "asleep"
        return "draining" if self.load.is_draining else self.state

    @property
    def tokens_ahead(self) -> int:
        """Tokens of its outstanding work, sent by this process and others."""
        return self.outstanding_tokens + self.others_tokens

    @property
    def prompt_tokens_ahead(self) -> int:
        """Prompt tokens that it still has to compute.

        A decode instance's outstanding tokens belong mostly to sequences that already decode, so its own report is
        used.
        """
        if self.role == "prefill":
            return self.outstanding_tokens + self.others_tokens
        return self.load.num_queued_tokens

    def prompt_tokens_before(self, num_tokens: int) -> int:
        """Returns the number of prompt tokens that it computes before a prompt of this length."""
        ahead = self.prompt_tokens_ahead
        return max(0, ahead - self.long_tokens) if self.num_long and num_tokens <= self.long_from else ahead

    @property
    def long_from(self) -> float:
        """The length, in tokens, above which a prompt gives way to shorter ones there; infinite if unknown."""
        most = self.info.max_num_batched_tokens if self.info is not None else 0
        return long_prompt_from(most) if most else math.inf

    @property
    def num_sent_since(self) -> int:
        """The number of sequences sent since it last reported its load, minus those that ended since; may be
        negative.
        """
        return self.num_sequences - self.num_reported_sequences

    @property
    def num_current_sequences(self) -> int:
        """The number of sequences that it reported, corrected by those sent and ended since."""
        load = self.load
        return max(0, load.num_running + load.num_landing + load.num_waiting + self.num_sent_since)

    @property
    def num_slots(self) -> int:
        """The maximum number of sequences in one of its steps; 0: unknown."""
        return self.info.max_num_seqs if self.info is not None else 0

    def lacks_adapter(self, digest: str) -> bool:
        """Whether it must load this LoRA adapter into memory first; False for ""."""
        present = self.load.adapters
        return bool(digest) and present is not None and short_name(digest) not in present

    def num_cached(self, prompt: Prompt) -> int:
        """Returns how many of the prompt's tokens its caches have. Must be fast: runs per instance and request."""
        known = self.known_blocks
        if not known.tiers:
            return 0
        pool = self._pool[1] if self._pool[0] is self.info else self.pool_kind  # quicker than a property
        if pool is None or prompt.keys[pool][0] not in known.tiers:
            return 0
        return prompt.num_cached(pool, known, self.load)

    @property
    def pool_kind(self) -> PoolKind | None:
        if self._pool[0] is not self.info:
            self._pool = self.info, pool_kind_of(self.info)
        return self._pool[1]

    def num_held(self, prompt: Prompt) -> int:
        """Returns how many of the prompt's first tokens its device or host memory has, so that a peer can pull them."""
        pool = self.pool_kind
        return 0 if pool is None else prompt.num_held(pool, self.known_blocks)

    def linked_to(self, other: Instance) -> bool:
        """Whether this prefill instance has a usable link to the other instance."""
        return other.key in self.links.up

    def link_to(self, other: Instance) -> LinkState:
        """Returns the last reported state of its link to the other instance."""
        return self.links.to(other.key)

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
            unit=self.unit,
            unit_rank=self.unit_rank,
            is_forming=not self.is_ready,
        )
