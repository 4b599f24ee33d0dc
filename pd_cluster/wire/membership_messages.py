"""Messages by which processes find each other, report their state, and leave."""

from __future__ import annotations

import functools
from typing import Annotated, Literal, NamedTuple

import msgspec

from pd_cluster.costs.linear_costs import HandoverCost, StepCost, StepWork
from pd_cluster.types import LinkState, Role, Tier
from pd_cluster.types.variants import ADAPTER
from pd_cluster.wire.link_messages import RuleName
from pd_cluster.wire.message_base import MAX_GROUPS, PROTOCOL_VERSION, Message, NodeProofs, PublicKey, ShortText

# Upper bounds of the buckets of a Load's tallies. They equal vLLM's, because dashboards expect those.
STEP_TOKENS_BOUNDS = (1, 8, *(1 << power for power in range(4, 15)))
PREEMPTIONS_BOUNDS = (1, 2, 3, 4, 5, 10, 20)


SleepLevel = Literal[0, 1, 2]  # 0: awake; 1: without KV cache; 2: also without weights


class WeightVersion(msgspec.Struct, frozen=True, array_like=True):
    """The weights that an instance must have. `epoch` counts the cluster's changes; 0: the weights at the start.
    `name`: the version's name for clients. `digest`: the digest of all bytes of the files in the folder `path`.
    """

    epoch: int = 0
    name: ShortText = ""
    digest: ShortText = ""
    path: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class WeightStatus(msgspec.Struct, frozen=True, array_like=True):
    """`held`: the version that an instance computes with. `checked`: the last version whose files it has checked.

    `problem`: why it cannot load them; "" if it can. `lacks`: why it has not loaded the version that it must have.
    """

    held: WeightVersion = WeightVersion()
    checked: WeightVersion = WeightVersion()
    problem: str = ""
    lacks: str = ""


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """How many integers fell into each bucket, and their sum. `counts` is empty if nothing was counted."""

    counts: tuple[int, ...] = ()
    total: int = 0


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Drafts since the start.

    `num_drafts` counts each sequence's steps with drafts; `accepted_at` counts accepted drafts by position.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    drafting_s: float = 0.0


class GroupLoad(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a group of layers after the first: a window or state group. Cached states are checkpoints."""

    rule: RuleName
    num_free: int
    num_cached: int
    num_held: int

    @property
    def num_blocks(self) -> int:
        return self.num_free + self.num_cached + self.num_held


class PromptCosts(NamedTuple):
    """An instance's costs of computing prompts, from its recent steps. `step_tokens` 0: it has computed no prompts."""

    step_tokens: int  # prompt tokens of a step
    overhead_s: float  # the part of such a step's time that does not depend on its prompt tokens
    token_s: float
    pair_s: float
    num_earlier: float  # the mean number of tokens that a prompt token attends to


class Load(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A worker's figures, sent with every heartbeat. num_blocks = free + cached + held, of the first group.

    Rates are derived once and cached, because every request reads them for every instance.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_expected: int = 0  # requests whose prompts the other instance has not begun to compute
    num_landing: int = 0
    num_exporting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_held_blocks: int = 0
    groups: Annotated[tuple[GroupLoad, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()  # the groups after the first
    num_preemptions: int = 0
    num_swap_blocks: int = 0
    num_free_swap_blocks: int = 0
    num_prefix_query_tokens: int = 0  # prompt tokens of admitted requests
    num_prefix_hit_tokens: int = 0  # prompt tokens that were found in the prefix cache
    num_host_cache_blocks: int = 0  # evicted blocks that are in host memory
    num_host_hit_tokens: int = 0  # prompt tokens whose blocks were loaded from host memory
    num_disk_cache_blocks: int = 0  # blocks in the disk cache
    num_disk_hit_tokens: int = 0  # tokens whose blocks were loaded from disk to host memory
    num_shared_hit_tokens: int = 0  # tokens whose blocks were loaded from the shared store to host memory
    num_lower_written: int = 0  # blocks written to disk and to the shared store
    num_lower_dropped: int = 0  # blocks not written, because too many waited or writing failed
    num_lower_bad: int = 0  # blocks that a lower tier returned with content that was not written
    tier_token_s: dict[Tier, float] = {}  # measured time to load the KV of a token from each tier, where known
    num_queued_tokens: int = 0  # prompt tokens that wait here to be computed
    step_cost: StepCost = StepCost()  # fitted to recent steps; all zeros: no fit yet
    prompt_work: StepWork = StepWork()  # the mean of recent steps that computed prompts
    decode_work: StepWork = StepWork()  # the mean of recent steps that decoded
    handover_costs: dict[str, HandoverCost] = {}  # costs of recent handovers, by LinkState.over or `pull_over`
    tokens_per_step: float = 1.0  # recent mean of tokens per step of a running sequence; above 1 with drafts
    drafts: DraftCounts = DraftCounts()
    num_steps: int = 0
    num_landings: int = 0
    num_rounds: int = 0  # rounds of its unit in which it took part
    num_idle_rounds: int = 0  # rounds in which it had no rows to compute
    exchange_s: float = 0.0  # the seconds that these rounds spent exchanging rows
    kv_sent_nbytes: int = 0
    kv_received_nbytes: int = 0
    num_dropped_kv_frames: int = 0  # frames that were replayed, forged, foreign, out of order or not decodable
    num_handed_over: int = 0  # transfers from here that the peer confirmed
    num_failed_handovers: int = 0  # transfers from here that ended with an error
    num_expired_credits: int = 0  # offers that the peer did not answer in time
    num_expired_holds: int = 0  # transfers, from here or to here, that made no progress for too long
    num_wanted_tokens: int = 0  # prompt tokens that were not in the prefix cache here and were requested from a peer
    num_landed_tokens: int = 0  # requested tokens whose KV cache has landed
    num_pulled_tokens: int = 0  # prompt tokens whose KV cache came from another prefill instance's caches
    num_failed_pulls: int = 0  # pulls that brought nothing, so that this instance computed the tokens
    step_tokens: Tally = Tally()  # how many tokens each step computed
    preemptions: Tally = Tally()  # number of preemptions of each sequence that ended here
    num_encoded_images: int = 0  # images that the vision tower computed, including pairs of video frames
    image_encode_s: float = 0.0  # the seconds that computing these images took
    num_encoded_hits: int = 0  # requested images whose features this encoder had kept
    num_landed_images: int = 0  # images whose features arrived from encoders
    num_encoder_fallbacks: int = 0  # images requested from an encoder whose features did not arrive
    encoder_wait_s: float = 0.0  # the seconds from request to arrival, summed over all landed images
    feature_nbytes: int = 0  # bytes of features that an encoder sent, or another worker received
    num_cache_resets: int = 0
    num_quarantined_blocks: int = 0  # blocks of abandoned transfers that may still be written
    num_leaked_blocks: int = 0  # lower bound of blocks held by no request; exact while no request runs
    num_kv_event_batches: int = 0  # batches published for routers outside the cluster
    num_kv_event_drops: int = 0  # batches that found a full queue, and subscribers that were too slow
    is_draining: bool = False  # the worker takes no new requests
    sleep_level: SleepLevel = 0  # the level that the worker has reached
    weights: WeightStatus = WeightStatus()
    outstanding: dict[str, int] = {}  # by scheduler (name@epoch): the summed weights of its unfinished legs
    links: dict[str, LinkState] = {}  # by the peer's name@epoch; a message has only links that have changed
    gone_links: tuple[str, ...] = ()  # links that no longer exist
    links_number: int = 0  # the number of this change on its connection: 1 lists all links, 0 none
    adapters: tuple[str, ...] | None = None  # short names of the LoRA adapters in memory; None: all are in memory

    def at_rates(self, *, prefill_tokens_per_s: float = 0.0, decode_step_s: float = 0.0) -> Load:
        """Returns this load with constant rates for all steps, for tests; 0: unknown."""
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
        """Returns the recent rate at which prompts were computed; 0: unknown."""
        took_s = self.step_cost.seconds(self.prompt_work)
        return self.prompt_work.num_prompt_tokens / took_s if took_s else 0.0

    @functools.cached_property
    def prompt_costs(self) -> PromptCosts:
        """Returns the costs of computing prompts here, as one value, because predictions read it for every instance."""
        work, cost = self.prompt_work, self.step_cost
        overhead_s = cost.seconds(work._replace(num_prompt_tokens=0, num_prompt_pairs=0)) or cost.step_s
        num_earlier = work.num_prompt_pairs / work.num_prompt_tokens if work.num_prompt_tokens else 0.0
        return PromptCosts(work.num_prompt_tokens, overhead_s, cost.prompt_token_s, cost.prompt_pair_s, num_earlier)

    @functools.cached_property
    def decode_step_s(self) -> float:
        """Returns the recent time of a step that decodes; 0: unknown."""
        return self.step_cost.seconds(self.decode_work)

    @property
    def shown_now(self) -> tuple[object, ...]:
        """Returns the figures whose changes are reported at once; block counts are in thousandths of the pool."""
        requests = self.num_running, self.num_waiting, self.num_expected, self.num_landing, self.num_exporting
        part = max(1, self.num_blocks // 1000)  # exact block counts change in nearly every step
        used = self.num_held_blocks // part, self.num_cached_blocks // part, self.num_free_swap_blocks
        blocks = *used, self.num_leaked_blocks, self.num_quarantined_blocks
        groups = [each.num_held // max(1, each.num_blocks // 1000) for each in self.groups]
        return *requests, *blocks, *groups, self.num_cache_resets, self.adapters, self.outstanding

    @property
    def progress(self) -> int:
        """Returns a number that grows whenever the worker makes any progress."""
        return self.num_steps + self.num_landings + self.kv_sent_nbytes + self.kv_received_nbytes + self.feature_nbytes


def pull_over(transports: str) -> str:
    """Returns the key of pulls over these transports in `Load.handover_costs`."""
    return f"pull {transports}"


class Heartbeat(Message, frozen=True):
    load: Load | None = None
    num_heard: int = 0  # messages received over this connection, except greetings and heartbeats


class Hello(Message, frozen=True):
    """Opens every connection and names the kind of peer. `node` and its proofs come from a worker with a node key."""

    kind: Literal["scheduler", "worker"]
    version: int = PROTOCOL_VERSION
    term: int = 0  # the highest fencing number that a scheduler knows; 0: there is only one scheduler
    node: ShortText = ""
    node_proofs: NodeProofs = ()


class Welcome(Message, frozen=True):
    """Answers a Hello, which opens the connection. net/peer_admission.py computes `proof`.

    `table`: a digest of the global rank table that the process was started with. `node` and its proofs: as in Hello.
    """

    proof: bytes
    table: bytes = b""
    node: ShortText = ""
    node_proofs: NodeProofs = ()


GIVEN_UP = "the other end has given up the connection"  # sent by a process that is still alive
PAUSED = "this process itself was stalled for too long"  # the other end did nothing wrong


class Gone(Message, frozen=True):
    """The sender has given up this connection and ignores its further messages. `reason`: "" for the usual reasons."""

    reason: ShortText = ""


class Join(Message, frozen=True, kw_only=True):
    """A worker that is in no rank table sends its address. The connection's Hello has its name and epoch.

    `host`: its numeric address. `port`: its HTTP port, which serves `/instance`.
    """

    role: Role
    host: ShortText
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    device_ids: Annotated[list[ShortText], msgspec.Meta(max_length=1024)]
    model_identity: ShortText
    hf_overrides: Annotated[str, msgspec.Meta(max_length=1 << 20)] = "{}"


class JoinAnswer(Message, frozen=True):
    """`problem`: why the worker is not, or no longer, registered; "" if it is.

    `is_elsewhere`: the worker is acceptable, but another scheduler admits workers, or none does now.
    """

    problem: str = ""
    is_elsewhere: bool = False


class Leave(Message, frozen=True):
    """The worker ends: its registration is over."""


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: its present state, its address and its public key. The scheduler takes the host from its own list."""

    name: str
    epoch: int
    role: Role
    host: str
    control_port: int
    public_key: PublicKey
    tp_size: int = 1
    unit: ShortText = ""  # the unit of instances that share experts; "": the worker is in no unit
    unit_rank: int = 0
    is_forming: bool = False  # it has loaded its weights, and waits for its unit


class AdapterLocation(msgspec.Struct, frozen=True, array_like=True):
    """An adapter (`digest` as in types/variants.py) and the folder where a worker finds it."""

    digest: Annotated[str, msgspec.Meta(pattern=ADAPTER)]
    path: Annotated[str, msgspec.Meta(max_length=4096)]


class WantedAdapters(Message, frozen=True):
    """All adapters that the receiver must have; it drops its other adapters once no request uses them."""

    adapters: list[AdapterLocation]


class AdapterStates(Message, frozen=True):
    """The digests in the last `WantedAdapters` that requests may use now, and why other adapters cannot be loaded."""

    loaded: list[str]
    problems: dict[str, str] = {}


class ResetCache(Message, frozen=True):
    """The receiver empties its prefix cache; `num_cache_resets` in its load confirms this.

    `is_external`: the store that instances share is emptied, too.
    """

    is_external: bool = False


class Sleep(Message, frozen=True):
    """The sleep level that the receiver must reach; `sleep_level` in its load confirms it. Level 0 wakes the receiver
    up.
    """

    level: SleepLevel


class CheckWeights(Message, frozen=True):
    """The receiver checks the files of a version, without changing anything; `weights` in its load has the result."""

    version: WeightVersion


class ChangeWeights(Message, frozen=True):
    """The receiver loads this version once it has no requests; `weights` in its load confirms this."""

    version: WeightVersion


class Peers(Message, frozen=True):
    """Lists all live workers, including the receiver, whose role may have changed. If a worker is absent or has a new
    epoch, its earlier process is dead.

    A forming worker is listed only for its unit: it does not send or receive KV cache yet.

    `term`: the fencing number of the scheduler that owns membership; 0: there is only one scheduler. `number` counts
    the lists of this term on this connection. Only list 1 has all workers. A later list has the changed workers, and
    the name@epoch of workers that are `gone`.
    """

    peers: list[PeerInfo]
    term: int = 0
    number: int = 1
    gone: list[str] = []


class StaleTerm(Message, frozen=True):
    """The sender has refused a `Peers`: the receiver no longer owns membership, because `term` is newer."""

    term: int
