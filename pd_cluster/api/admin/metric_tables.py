"""Every metric's name, kind and meaning, and the source of its number. docs/metrics.md is written from this.

Independent of rendering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from pd_cluster.cluster.members.auto_role import Held, Needy
from pd_cluster.cluster.routing.stats import Refusal
from pd_cluster.cluster.tenancy.tenants import GENERATION_TOKENS, LIMITS, OUTCOMES, PROMPT_TOKENS
from pd_cluster.reports import InstanceState
from pd_cluster.wire import PREEMPTIONS_BOUNDS, STEP_TOKENS_BOUNDS, Load, RuleName, Tally

Read = Callable[[Load], float]


@dataclass(frozen=True, slots=True)
class OfInstance:
    """A number of each instance, from its heartbeat. A counter's name lacks its `_total`."""

    name: str
    text: str
    read: Read


@dataclass(frozen=True, slots=True)
class OfInstanceParts:
    """A gauge of each instance, in parts: the value of `label` -> its number."""

    name: str
    text: str
    reads: Mapping[str, Read]
    label: str


@dataclass(frozen=True, slots=True)
class OfInstancePositions:
    """Counters of each instance by position, from 0, as far as any was counted. The name lacks its `_total`."""

    name: str
    text: str
    read: Callable[[Load], Sequence[int]]
    label: str = "position"


@dataclass(frozen=True, slots=True)
class OfInstanceSteps:
    """A histogram of each instance."""

    name: str
    text: str
    bounds: Sequence[int]
    read: Callable[[Load], Tally]


@dataclass(frozen=True, slots=True)
class OfRequests:
    """Counters or a histogram of cluster/routing/stats.py. `numbers`: label value -> name there; "" without a label."""

    name: str
    text: str
    numbers: Mapping[str, str]
    label: str = ""


@dataclass(frozen=True, slots=True)
class OfCluster:
    name: str
    text: str


def _parts_of(rule: RuleName) -> dict[str, Callable[[Load], float]]:
    """Returns how many blocks of a group of layers are in each use."""

    def number(name: str, load: Load) -> float:
        return float(sum(getattr(each, name) for each in load.groups if each.rule == rule))

    return {use: partial(number, f"num_{use}") for use in ("held", "cached", "free")}


ADAPTERS = OfCluster(
    "vllm:lora_requests_info",
    "Only with --enable-lora, and without model_name. running_lora_adapters: names, separated by commas, of adapters "
    "with requests that have their first token; waiting_lora_adapters: with requests that have not; max_lora: "
    "--max-loras. The value is Unix time.",
)
INSTANCE_GAUGES = (
    OfInstance("vllm:num_requests_running", "Sequences that take part in steps.", lambda load: load.num_running),
    OfInstance("vllm:num_requests_waiting", "Requests that wait for room.", lambda load: load.num_waiting),
    OfInstance(
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that requests hold, 0 to 1.",
        lambda load: load.num_held_blocks / max(1, load.num_blocks),
    ),
    OfInstance(
        "vllm:gpu_cache_usage_perc",
        "The older name of vllm:kv_cache_usage_perc.",
        lambda load: load.num_held_blocks / max(1, load.num_blocks),
    ),
    OfInstance("pd_cluster:num_cached_blocks", "KV blocks kept for later requests.", lambda x: x.num_cached_blocks),
    OfInstance(
        "pd_cluster:host_cache_blocks",
        "Evicted KV blocks that host memory keeps, with --kv-host-cache.",
        lambda load: load.num_host_cache_blocks,
    ),
    OfInstance(
        "pd_cluster:disk_cache_blocks",
        "KV blocks in files, with --kv-disk-cache.",
        lambda load: load.num_disk_cache_blocks,
    ),
    OfInstance(
        "pd_cluster:num_swapped_blocks",
        "KV blocks of preempted requests in host memory.",
        lambda load: load.num_swap_blocks - load.num_free_swap_blocks,
    ),
    OfInstance(
        "pd_cluster:leases_held",
        "Sequences whose blocks stay until a peer has them or has filled them.",
        lambda load: load.num_exporting + load.num_landing,
    ),
    OfInstance(
        "pd_cluster:quarantined_blocks",
        "KV blocks of transfers that were given up, which may still be written: they wait for the peer.",
        lambda load: load.num_quarantined_blocks,
    ),
    OfInstance(
        "pd_cluster:leaked_blocks",
        "KV blocks held by no request, at the least; exact while the instance has none. Always 0, or a bug.",
        lambda load: load.num_leaked_blocks,
    ),
)
INSTANCE_PARTS = (
    OfInstanceParts(
        "vllm:num_requests_waiting_by_reason",
        "The same by what they wait for: room here (capacity), or the prompt's computation elsewhere (deferred).",
        {"capacity": lambda load: load.num_waiting - load.num_expected, "deferred": lambda load: load.num_expected},
        "reason",
    ),
    OfInstanceParts(
        "pd_cluster:window_blocks",
        "KV blocks of the layers that see a window, where these have blocks of their own: held by requests, kept for "
        "later ones, or free.",
        _parts_of("window"),
        "use",
    ),
    OfInstanceParts(
        "pd_cluster:states",
        "States of the layers that keep one for a sequence: held by requests, kept for later ones (checkpoints), or "
        "free.",
        _parts_of("state"),
        "use",
    ),
)
INSTANCE_HISTOGRAMS = (
    OfInstanceSteps(
        "vllm:iteration_tokens_total",
        "Tokens that a step computed.",
        STEP_TOKENS_BOUNDS,
        lambda load: load.step_tokens,
    ),
    OfInstanceSteps(
        "vllm:request_num_preemptions",
        "How often a sequence gave way to older ones here; one that is handed over counts on both sides.",
        PREEMPTIONS_BOUNDS,
        lambda load: load.preemptions,
    ),
)
INSTANCE_COUNTERS = (
    OfInstance(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda load: load.num_prefix_query_tokens,
    ),
    OfInstance(
        "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda load: load.num_prefix_hit_tokens
    ),
    OfInstance(
        "vllm:gpu_prefix_cache_queries",
        "The older name of vllm:prefix_cache_queries_total.",
        lambda load: load.num_prefix_query_tokens,
    ),
    OfInstance(
        "vllm:gpu_prefix_cache_hits",
        "The older name of vllm:prefix_cache_hits_total.",
        lambda load: load.num_prefix_hit_tokens,
    ),
    OfInstance(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that a decode instance did not have cached and asked of a prefill instance.",
        lambda load: load.num_wanted_tokens,
    ),
    OfInstance(
        "vllm:external_prefix_cache_hits",
        "Those of them whose KV cache has arrived.",
        lambda load: load.num_landed_tokens,
    ),
    OfInstance(
        "pd_cluster:host_cache_hit_tokens",
        "Tokens whose KV blocks were loaded from host memory instead of being computed or handed over.",
        lambda load: load.num_host_hit_tokens,
    ),
    OfInstance(
        "pd_cluster:disk_cache_hit_tokens",
        "Tokens whose KV blocks came from the disk cache to host memory.",
        lambda load: load.num_disk_hit_tokens,
    ),
    OfInstance(
        "pd_cluster:shared_cache_hit_tokens",
        "Tokens whose KV blocks came from the shared store to host memory.",
        lambda load: load.num_shared_hit_tokens,
    ),
    OfInstance(
        "pd_cluster:kv_tier_blocks_written",
        "KV blocks written to the disk cache and to the shared store.",
        lambda load: load.num_lower_written,
    ),
    OfInstance(
        "pd_cluster:kv_tier_blocks_dropped",
        "KV blocks not written there, or not read, because too many waited or it failed.",
        lambda load: load.num_lower_dropped,
    ),
    OfInstance(
        "pd_cluster:kv_tier_blocks_bad",
        "KV blocks found there that were not what had been written; they are never used.",
        lambda load: load.num_lower_bad,
    ),
    OfInstance(
        "pd_cluster:kv_event_batches",
        "Batches of KV events that were published (--kv-events-config).",
        lambda load: load.num_kv_event_batches,
    ),
    OfInstance(
        "pd_cluster:kv_event_batches_dropped",
        "Those not sent (too many waited, or a fault), and the times that a subscriber was too slow and missed some.",
        lambda load: load.num_kv_event_drops,
    ),
    OfInstance(
        "pd_cluster:unit_rounds",
        "Steps of its unit that an instance took part in; 0 without a unit.",
        lambda load: load.num_rounds,
    ),
    OfInstance(
        "pd_cluster:unit_idle_rounds",
        "Those of them in which it had no rows of its own.",
        lambda load: load.num_idle_rounds,
    ),
    OfInstance(
        "pd_cluster:unit_exchange_seconds",
        "Seconds of these steps in which it waited for its unit, to agree on rows and, on CPUs, to exchange them.",
        lambda load: load.exchange_s,
    ),
    OfInstance("vllm:num_preemptions", "Requests that gave way to older ones.", lambda load: load.num_preemptions),
    OfInstance(
        "pd_cluster:images_encoded",
        "Images that the vision tower has computed, pairs of a video's frames included; those that are kept are not.",
        lambda load: load.num_encoded_images,
    ),
    OfInstance(
        "pd_cluster:image_encode_seconds",
        "Seconds in which the vision tower computed them, on rank 0 until all ranks' images were there; on "
        "accelerators, in which the host submitted them.",
        lambda load: load.image_encode_s,
    ),
    OfInstance(
        "pd_cluster:encoder_cache_hits",
        "Images asked of this encoder that it had kept.",
        lambda load: load.num_encoded_hits,
    ),
    OfInstance(
        "pd_cluster:images_from_encoders",
        "Images whose features came to this prefill instance from encoders.",
        lambda load: load.num_landed_images,
    ),
    OfInstance(
        "pd_cluster:encoder_fallbacks",
        "Images asked of an encoder that this prefill instance computed itself: it died, refused, or was late.",
        lambda load: load.num_encoder_fallbacks,
    ),
    OfInstance(
        "pd_cluster:encoder_wait_seconds",
        "Seconds from asking an encoder until the features were here, of all images that came.",
        lambda load: load.encoder_wait_s,
    ),
    OfInstance(
        "pd_cluster:feature_bytes",
        "Features of images: handed out by an encoder, or received from encoders.",
        lambda load: load.feature_nbytes,
    ),
    OfInstance(
        "vllm:spec_decode_num_drafts",
        "Drafts: what was guessed behind a sequence's last token and verified in one step.",
        lambda load: load.drafts.num_drafts,
    ),
    OfInstance("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.", lambda load: load.drafts.num_tokens),
    OfInstance(
        "vllm:spec_decode_num_accepted_tokens",
        "Those of them that were right; neither the token in place of a wrong one nor the one behind all of them.",
        lambda load: load.drafts.num_accepted,
    ),
    OfInstance(
        "pd_cluster:spec_decode_drafting_seconds",
        "Seconds in which steps waited until tokens were guessed.",
        lambda load: load.drafts.drafting_s,
    ),
    OfInstance("pd_cluster:kv_sent_bytes", "KV cache sent to decode instances.", lambda load: load.kv_sent_nbytes),
    OfInstance(
        "pd_cluster:kv_received_bytes", "KV cache received from prefill instances.", lambda x: x.kv_received_nbytes
    ),
    OfInstance(
        "pd_cluster:kv_frames_dropped",
        "KV headers that were replayed, forged, out of order or not decodable.",
        lambda load: load.num_dropped_kv_frames,
    ),
    OfInstance(
        "pd_cluster:handovers_finished",
        "Prompts whose KV cache a decode instance has confirmed, counted where it came from.",
        lambda load: load.num_handed_over,
    ),
    OfInstance(
        "pd_cluster:handovers_failed",
        "Prompts whose KV cache could not be handed over, counted where it came from; aborted ones are not.",
        lambda load: load.num_failed_handovers,
    ),
    OfInstance(
        "pd_cluster:credit_leases_expired",
        "Offers that a decode instance did not take within --credit-timeout.",
        lambda load: load.num_expired_credits,
    ),
    OfInstance(
        "pd_cluster:hold_leases_expired",
        "Transfers that stood still for --transfer-timeout, on either side.",
        lambda load: load.num_expired_holds,
    ),
)
INSTANCE_POSITIONS = (
    OfInstancePositions(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were right, by their position in the draft.",
        lambda load: load.drafts.accepted_at,
    ),
)
REQUEST_COUNTERS = (
    *(
        OfRequests(f"pd_cluster:arrived_{name}", text, {"": f"arrived_{name}"})
        for name, text in (
            ("requests", "Requests that came, before they waited for anything; those refused later, too."),
            ("prompt_tokens", "Tokens of their prompts."),
            ("prompt_pairs", "Pairs of a token of their prompts with one before it: the work of attention."),
            ("answers", "Sequences that they ask for."),
            ("max_tokens", "Output tokens that these may have."),
        )
    ),
    OfRequests(
        "pd_cluster:role_changes",
        "Changes of an instance's role that --auto-role has made, by the new role.",
        {role: f"role_changes_{role}" for role in get_args(Needy)},
        "role",
    ),
    OfRequests(
        "pd_cluster:roles_kept",
        "Looks of --auto-role=cost, one a second, that left the roles as they were, by the reason "
        "(docs/protocol/membership.md, Automatic roles).",
        {why: f"roles_kept_{why}" for why in get_args(Held)},
        "reason",
    ),
    OfRequests(
        "vllm:prompt_tokens",
        "Tokens of prompts whose first output token has come; of n sequences once.",
        {"": "prompt_tokens"},
    ),
    OfRequests(
        "vllm:prompt_tokens_cached", "Tokens of prompts whose KV cache was there.", {"": "prompt_tokens_cached"}
    ),
    OfRequests(
        "vllm:prompt_tokens_by_source",
        "Tokens of prompts by where their KV cache came from: computed for the request, or from a prefix cache.",
        {"local_compute": "prompt_tokens_computed", "local_cache_hit": "prompt_tokens_cached"},
        "source",
    ),
    OfRequests("vllm:generation_tokens", "Output tokens, of all sequences.", {"": "generation_tokens"}),
    OfRequests(
        "vllm:request_success",
        "Sequences that ended, whatever the name says: also those whose client left (abort) and failed ones (error).",
        {reason: f"finished_{reason}" for reason in ("stop", "length", "abort", "error")},
        "finished_reason",
    ),
    *(
        OfRequests(
            f"pd_cluster:{kind}s",
            f"{kind.capitalize()}s of prompts, by what became of them: decoded and resized (read), or answered with a "
            f"400 (refused).",
            {outcome: f"{kind}s_{outcome}" for outcome in ("read", "refused")},
            "outcome",
        )
        for kind in ("image", "video")
    ),
    OfRequests(
        "vllm:mm_cache_queries",
        "Images and videos by data: URL that were looked for among those read earlier.",
        {"": "kept_media_queries"},
    ),
    OfRequests("vllm:mm_cache_hits", "Those of them that were found.", {"": "kept_media_hits"}),
    OfRequests(
        "pd_cluster:replays",
        "Attempts after a request's first: an instance was lost (death), an attempt failed (fault), an instance was "
        "to be empty (moved), or others' requests had filled it (full).",
        {cause: f"replays_{cause}" for cause in ("death", "fault", "moved", "full")},
        "cause",
    ),
    OfRequests(
        "vllm:admission_rejections",
        "The same as pd_cluster:requests_refused_total.",
        {why: f"refused_{why}" for why in get_args(Refusal)},
        "reason",
    ),
    OfRequests(
        "pd_cluster:requests_refused",
        "Requests that nothing was done for: 429, a goal would be missed (slo) or the wait too long (queue); 503, no "
        "instances (unavailable).",
        {why: f"refused_{why}" for why in get_args(Refusal)},
        "reason",
    ),
)
HISTOGRAMS = (
    OfRequests(
        "vllm:request_time_per_output_token_seconds",
        "Decode time of a request over the tokens of its longest sequence after the first.",
        {"": "token_s"},
    ),
    OfRequests(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that no prefix cache had.",
        {"": "num_computed_tokens"},
    ),
    OfRequests(
        "vllm:time_to_first_token_seconds",
        "From a request's arrival until its first output token was here.",
        {"": "first_token_s"},
    ),
    OfRequests(
        "vllm:inter_token_latency_seconds",
        "Between two output tokens of a sequence, evenly where many come together; none of a beam search.",
        {"": "inter_token_s"},
    ),
    OfRequests(
        "vllm:time_per_output_token_seconds",
        "The older name of vllm:inter_token_latency_seconds.",
        {"": "inter_token_s"},
    ),
    OfRequests(
        "vllm:e2e_request_latency_seconds", "From a request's arrival until its last output token.", {"": "whole_s"}
    ),
    OfRequests(
        "vllm:request_queue_time_seconds",
        "From a request's arrival until a prefill instance had room for it.",
        {"": "queue_s"},
    ),
    OfRequests(
        "vllm:request_prefill_time_seconds", "From there until the first output token was here.", {"": "prefill_s"}
    ),
    OfRequests("vllm:request_decode_time_seconds", "From the first output token until the last.", {"": "decode_s"}),
    OfRequests("vllm:request_inference_time_seconds", "Prefill and decode time together.", {"": "inference_s"}),
    OfRequests("vllm:request_prompt_tokens", "Prompt tokens of a request.", {"": "num_prompt_tokens"}),
    OfRequests("vllm:request_generation_tokens", "Output tokens of a sequence.", {"": "num_output_tokens"}),
    OfRequests(
        "vllm:request_max_num_generation_tokens",
        "Output tokens of a request's longest sequence.",
        {"": "most_output_tokens"},
    ),
    OfRequests("vllm:request_params_n", "Sequences of a request.", {"": "num_sequences"}),
    OfRequests("vllm:request_params_max_tokens", "Output tokens that a sequence might have had.", {"": "max_tokens"}),
    OfRequests(
        "pd_cluster:handover_seconds",
        "From the offer of a prompt's KV cache to its confirmation, as the decode instance sees it.",
        {"": "handover_s"},
    ),
    OfRequests(
        "pd_cluster:media_fetch_seconds",
        "Getting an image's or video's file: a download, a file, or decoding its data: URL.",
        {"": "media_fetch_s"},
    ),
    OfRequests(
        "pd_cluster:media_decode_seconds",
        "Decoding and resizing an image or the chosen frames of a video.",
        {"": "media_decode_s"},
    ),
)
TENANT_COUNTERS = (
    OfRequests(
        "pd_cluster:tenant_requests",
        "Requests to routes that read a body: answered in full (finished), left by the client (aborted), ended by an "
        "error of the server (failed), 4xx or 503 (refused), over a limit of their key (limited).",
        {outcome: f"tenant_{outcome}" for outcome in OUTCOMES},
        "outcome",
    ),
    OfRequests(
        "pd_cluster:tenant_prompt_tokens", "Tokens of prompts that were sent to an instance.", {"": PROMPT_TOKENS}
    ),
    OfRequests("pd_cluster:tenant_generation_tokens", "Output tokens, of all sequences.", {"": GENERATION_TOKENS}),
    OfRequests(
        "pd_cluster:tenant_limited",
        "Requests that got a 429, by the limit that they were over.",
        {limit: f"tenant_limited_by_{limit}" for limit in LIMITS},
        "limit",
    ),
)
CACHE_CONFIG = OfCluster("vllm:cache_config_info", "Always 1; the labels say what an instance's KV cache is made of.")
UNIT = OfCluster(
    "pd_cluster:unit_info",
    "Always 1; the labels say which unit an instance of one is in, its rank there, and the unit's size.",
)
INSTANCES = OfCluster("pd_cluster:instances", "Instances of the rank table, by role and state.")
OPEN_STREAMS = OfCluster("pd_cluster:open_streams", "Requests that have been routed and have not ended.")
QUEUED_REQUESTS = OfCluster("pd_cluster:queued_requests", "Requests that wait for room, before they are routed.")
QUEUED_TOKENS = OfCluster("pd_cluster:queued_tokens", "Tokens of these: prompts, and the answers that are expected.")
BACKLOG_TOKENS = OfCluster(
    "pd_cluster:backlog_tokens",
    "Tokens of requests at instances of a role that these have still to compute: what an autoscaler divides.",
)
API_PROCESSES = OfCluster("pd_cluster:api_processes_alive", "Processes that serve the public port.")
OWNS_MEMBERSHIP = OfCluster(
    "pd_cluster:owns_membership",
    "1 if the scheduler that answers (label scheduler) decides which instances there are, otherwise 0.",
)
CLUSTER_GAUGES = (
    *(CACHE_CONFIG, UNIT, INSTANCES, BACKLOG_TOKENS, OPEN_STREAMS, QUEUED_REQUESTS, QUEUED_TOKENS, API_PROCESSES),
    OWNS_MEMBERSHIP,
)

ShownState = Literal["leaving", "changing", "draining", "drained"]
STATES: tuple[str, ...] = (*get_args(InstanceState), *get_args(ShownState))
