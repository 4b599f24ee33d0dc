"""Messages by which processes find each other, say how they are, and part."""

from __future__ import annotations

import functools
from typing import Annotated, Literal

import msgspec

from pd_cluster.costs.linear_costs import HandoverCost, StepCost, StepWork
from pd_cluster.types import LinkState, Role, Tier
from pd_cluster.types.variants import ADAPTER
from pd_cluster.wire.link_messages import RuleName
from pd_cluster.wire.message_base import MOST_GROUPS, PROTOCOL_VERSION, Message, NodeProofs, PublicKey, ShortText

# Upper bounds of the buckets of a Load's tallies: vLLM's, since dashboards name them.
STEP_TOKENS_BOUNDS = (1, 8, *(1 << power for power in range(4, 15)))
PREEMPTIONS_BOUNDS = (1, 2, 3, 4, 5, 10, 20)


SleepLevel = Literal[0, 1, 2]  # 0: awake; 1: without KV cache; 2: without weights, too


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """How many whole numbers fell into each bucket, and their sum. Without counts there were none."""

    counts: tuple[int, ...] = ()
    total: int = 0


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Drafts since the start. `num_drafts` counts steps of sequences with drafts; `accepted_at`, by position."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    drafting_s: float = 0.0


class GroupLoad(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a further group of layers: of windows, or a state each. Cached states are checkpoints."""

    rule: RuleName
    num_free: int
    num_cached: int
    num_held: int

    @property
    def num_blocks(self) -> int:
        return self.num_free + self.num_cached + self.num_held


class Load(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A worker's figures, sent with every heartbeat. num_blocks = free + cached + held, of the first group.

    Rates are derived once: each request asks every instance for them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_expected: int = 0  # those whose prompts the other instance has not begun
    num_landing: int = 0
    num_exporting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_held_blocks: int = 0
    groups: Annotated[tuple[GroupLoad, ...], msgspec.Meta(max_length=MOST_GROUPS)] = ()  # of layers, but the first
    num_preemptions: int = 0
    num_swap_blocks: int = 0
    num_free_swap_blocks: int = 0
    num_prefix_query_tokens: int = 0  # prompt tokens of admitted requests
    num_prefix_hit_tokens: int = 0  # those of them that were in the prefix cache
    num_host_cache_blocks: int = 0  # evicted blocks that host memory has
    num_host_hit_tokens: int = 0  # prompt tokens whose blocks were loaded from there
    num_disk_cache_blocks: int = 0  # that the disk cache has
    num_disk_hit_tokens: int = 0  # tokens whose blocks came from there to host memory
    num_shared_hit_tokens: int = 0  # the same, from the shared store
    num_lower_written: int = 0  # blocks written to disk and to the shared store
    num_lower_dropped: int = 0  # those not written, because too many waited, or it failed
    num_lower_bad: int = 0  # those found there that were not what had been written
    tier_token_s: dict[Tier, float] = {}  # measured time to load a token's KV from there, where it is known
    num_queued_tokens: int = 0  # tokens of prompts that are here and not computed yet
    step_cost: StepCost = StepCost()  # fitted to recent steps; all zeros: none yet
    prompt_work: StepWork = StepWork()  # the mean of recent steps that computed prompts
    decode_work: StepWork = StepWork()  # the mean of recent steps that decoded
    handover_costs: dict[str, HandoverCost] = {}  # of recent handovers from here, by transports as LinkState.over
    tokens_per_step: float = 1.0  # recent average that a running sequence got in a step; above 1 with drafts
    drafts: DraftCounts = DraftCounts()
    num_steps: int = 0
    num_landings: int = 0
    num_rounds: int = 0  # steps of its unit that it took part in
    num_idle_rounds: int = 0  # those of them in which it had no rows of its own
    exchange_s: float = 0.0  # the seconds that these rounds spent on exchanging rows
    kv_sent_nbytes: int = 0
    kv_received_nbytes: int = 0
    num_dropped_kv_frames: int = 0  # replayed, forged, foreign, out of order or not decodable
    num_handed_over: int = 0  # transfers from here that the peer confirmed
    num_failed_handovers: int = 0  # transfers from here that ended with an error
    num_expired_credits: int = 0  # offers that the peer left waiting for too long
    num_expired_holds: int = 0  # transfers, from here or to here, that stood still for too long
    num_wanted_tokens: int = 0  # prompt tokens that were not in the prefix cache here and were asked of a peer
    num_landed_tokens: int = 0  # those of them whose KV cache has landed
    step_tokens: Tally = Tally()  # of every step, the tokens that it computed
    preemptions: Tally = Tally()  # of every sequence that ended here, how often it gave way to others
    num_encoded_images: int = 0  # by the vision tower, pairs of a video's frames included
    image_encode_s: float = 0.0  # the seconds that these took
    num_encoded_hits: int = 0  # images asked of this encoder that it had kept
    num_landed_images: int = 0  # whose features came here from encoders
    num_encoder_fallbacks: int = 0  # images asked of an encoder whose features did not come
    encoder_wait_s: float = 0.0  # the seconds from asking until features came, of all images that landed
    feature_nbytes: int = 0  # of features: sent by an encoder, received by others
    num_cache_resets: int = 0
    num_quarantined_blocks: int = 0  # of transfers that were given up, which may still be written
    num_leaked_blocks: int = 0  # lower bound of blocks held by no request; exact while there is none
    num_kv_event_batches: int = 0  # published for routers outside of the cluster
    num_kv_event_drops: int = 0  # those that found no room, and subscribers that became too slow
    is_draining: bool = False  # it takes no new requests
    sleep_level: SleepLevel = 0  # reached
    outstanding: dict[str, int] = {}  # by scheduler (name@epoch): the weights of its legs that have not ended here
    links: dict[str, LinkState] = {}  # by the peer's name@epoch; over a connection only those that have changed
    gone_links: tuple[str, ...] = ()  # those that are no more
    links_number: int = 0  # of this change of links on its connection: 1 tells all of them, 0 none
    adapters: tuple[str, ...] | None = None  # short names of the LoRA adapters in memory; None: all that there are

    def at_rates(self, *, prefill_tokens_per_s: float = 0.0, decode_step_s: float = 0.0) -> Load:
        """Returns this load with the same rates for all steps, which no real engine has; 0: unknown."""
        return msgspec.structs.replace(
            self,
            step_cost=StepCost(
                row_s=decode_step_s, prompt_token_s=1 / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
            ),
            prompt_work=StepWork(num_prompt_tokens=int(prefill_tokens_per_s > 0)),
            decode_work=StepWork(num_rows=int(decode_step_s > 0)),
        )

    @functools.cached_property
    def prefill_tokens_per_s(self) -> float:
        """Returns how quickly prompts have been computed of late; 0: none yet."""
        took_s = self.step_cost.seconds(self.prompt_work)
        return self.prompt_work.num_prompt_tokens / took_s if took_s else 0.0

    @functools.cached_property
    def beside_prompts_s(self) -> float:
        """Returns the time of a step that computes prompts, apart from what these cost."""
        beside = self.prompt_work._replace(num_prompt_tokens=0, num_prompt_pairs=0)
        return self.step_cost.seconds(beside) or self.step_cost.step_s

    @functools.cached_property
    def decode_step_s(self) -> float:
        """Returns the time of a step that decodes, of late; 0: none yet."""
        return self.step_cost.seconds(self.decode_work)

    @property
    def shown_now(self) -> tuple[object, ...]:
        """Returns the figures whose changes are reported at once; those of blocks by thousandths of the pool."""
        requests = self.num_running, self.num_waiting, self.num_expected, self.num_landing, self.num_exporting
        part = max(1, self.num_blocks // 1000)  # they grow with nearly every step
        used = self.num_held_blocks // part, self.num_cached_blocks // part, self.num_free_swap_blocks
        blocks = *used, self.num_leaked_blocks, self.num_quarantined_blocks
        groups = [each.num_held // max(1, each.num_blocks // 1000) for each in self.groups]
        return *requests, *blocks, *groups, self.num_cache_resets, self.adapters, self.outstanding

    @property
    def progress(self) -> int:
        """Returns a number that grows whenever the worker makes any progress."""
        return self.num_steps + self.num_landings + self.kv_sent_nbytes + self.kv_received_nbytes + self.feature_nbytes


class Heartbeat(Message, frozen=True):
    load: Load | None = None
    num_heard: int = 0  # messages received over this connection, apart from greetings and heartbeats


class Hello(Message, frozen=True):
    """Opens every connection; says what kind of peer connects. `node` and its proofs: of a worker with a node's key."""

    kind: Literal["scheduler", "worker"]
    version: int = PROTOCOL_VERSION
    term: int = 0  # the highest fencing number that a scheduler knows; 0: there is only one scheduler
    node: ShortText = ""
    node_proofs: NodeProofs = ()


class Welcome(Message, frozen=True):
    """The answer to a Hello, which opens the connection. `proof` is computed by peer_admission.py.

    `table`: a digest of the global rank table that the process was started with. `node` and its proofs: as in Hello.
    """

    proof: bytes
    table: bytes = b""
    node: ShortText = ""
    node_proofs: NodeProofs = ()


GIVEN_UP = "the other end has given the connection up"  # a process that lives says so
PAUSED = "this process itself stood still for too long"  # nothing is known against the other end


class Gone(Message, frozen=True):
    """The sender has given up this connection and ignores further messages on it. `reason`: "" for the usual ones."""

    reason: ShortText = ""


class Join(Message, frozen=True, kw_only=True):
    """A worker that is in no rank table says where it is. Its name and epoch are those of the connection's Hello.

    `host`: its numeric address. `port`: of its HTTP, where `/instance` is.
    """

    role: Role
    host: ShortText
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    device_ids: Annotated[list[ShortText], msgspec.Meta(max_length=1024)]
    model_identity: ShortText
    hf_overrides: Annotated[str, msgspec.Meta(max_length=1 << 20)] = "{}"


class JoinAnswer(Message, frozen=True):
    """`problem`: why the worker is not, or no longer, registered; "" if it is.

    `is_elsewhere`: nothing is against the worker; another of several schedulers admits workers, or none does now.
    """

    problem: str = ""
    is_elsewhere: bool = False


class Leave(Message, frozen=True):
    """The worker ends: its registration is over."""


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: its present state, its place and its public key. The host comes from the scheduler's list."""

    name: str
    epoch: int
    role: Role
    host: str
    control_port: int
    public_key: PublicKey
    tp_size: int = 1
    unit: ShortText = ""  # of the instances that compute experts together; "": it is in none
    unit_rank: int = 0
    is_forming: bool = False  # it has loaded its weights, and waits for its unit


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """An adapter (`digest`, of types/variants.py) and the folder where a worker finds it."""

    digest: Annotated[str, msgspec.Meta(pattern=ADAPTER)]
    path: Annotated[str, msgspec.Meta(max_length=4096)]


class WantedAdapters(Message, frozen=True):
    """Every adapter that the receiver shall have; it drops others once no request has them."""

    adapters: list[AdapterPlace]


class AdapterStates(Message, frozen=True):
    """Digests of the last `WantedAdapters` that requests may have now, and why others cannot be loaded."""

    loaded: list[str]
    problems: dict[str, str] = {}


class ResetCache(Message, frozen=True):
    """The receiver forgets which blocks hold which prefix; `num_cache_resets` of its load says when it has.

    `is_external`: it has the store that instances share emptied, too.
    """

    is_external: bool = False


class Sleep(Message, frozen=True):
    """How deeply the receiver shall sleep; `sleep_level` of its load says when it does. Level 0 wakes it up."""

    level: SleepLevel


class Peers(Message, frozen=True):
    """All live workers, including the receiver: roles may change. One that is absent or has a new epoch is dead.

    One that forms is named for its unit alone: no KV cache goes there or comes from there yet.

    `term`: the fencing number of the scheduler that owns membership; 0: there is only one scheduler. `number`: of this
    list on its connection and of its term. Only number 1 has all workers; a later one has those that have changed, and
    the name@epoch of those that are `gone`.
    """

    peers: list[PeerInfo]
    term: int = 0
    number: int = 1
    gone: list[str] = []


class StaleTerm(Message, frozen=True):
    """A `Peers` was refused: the receiver of this message was the owner of membership once, and `term` is newer."""

    term: int
