"""Every metric's name, kind and meaning, and the source of its value. docs/metrics.md is generated from it.

Does not render them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from pd_cluster.cluster.records.request_stats import Refusal
from pd_cluster.cluster.roles.auto_role import Held, Needy
from pd_cluster.cluster.tenancy.tenant_counts import GENERATION_TOKENS, LIMITS, OUTCOMES, PROMPT_TOKENS
from pd_cluster.process_messages import InstanceState
from pd_cluster.wire import PREEMPTIONS_BOUNDS, STEP_TOKENS_BOUNDS, Load, RuleName, Tally

Read = Callable[[Load], float]


@dataclass(frozen=True, slots=True)
class OfInstance:
    """A value of each instance, from its heartbeat. The name of a counter is given without `_total`."""

    name: str
    text: str
    read: Read


@dataclass(frozen=True, slots=True)
class OfInstanceParts:
    """A gauge of each instance, split by a label: the label's value -> the gauge's value."""

    name: str
    text: str
    reads: Mapping[str, Read]
    label: str


@dataclass(frozen=True, slots=True)
class OfInstancePositions:
    """Counters of each instance by position, from 0 to the last counted one. The name is given without `_total`."""

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
    """Counters or a histogram from cluster/records/request_stats.py. `numbers`: label value, or "" -> name there."""

    name: str
    text: str
    numbers: Mapping[str, str]
    label: str = ""


@dataclass(frozen=True, slots=True)
class OfCluster:
    name: str
    text: str


def _parts_of(rule: RuleName) -> dict[str, Callable[[Load], float]]:
    """Maps each use of blocks to a function that counts such blocks in layer groups of this rule."""

    def number(name: str, load: Load) -> float:
        return float(sum(getattr(each, name) for each in load.groups if each.rule == rule))

    return {use: partial(number, f"num_{use}") for use in ("held", "cached", "free")}


ADAPTERS = OfCluster(
    "vllm:lora_requests_info",
    "Only with --enable-lora. running_lora_adapters and waiting_lora_adapters: adapters whose requests have their "
    "first token, and those whose requests wait for it; max_lora: --max-loras. The value is Unix time.",
)
BATCH_LINES = OfCluster(
    "pd_cluster:batch_lines",
    "Only with --files-dir. Lines of unfinished batches of /v1/batches by state: waiting, running or answered.",
)
INSTANCE_GAUGES = (
    OfInstance("vllm:num_requests_running", "Running sequences, which steps compute.", lambda load: load.num_running),
    OfInstance("vllm:num_requests_waiting", "Requests that wait for capacity.", lambda load: load.num_waiting),
    OfInstance(
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks that requests hold, 0 to 1.",
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
        "KV blocks in host memory (--kv-host-cache).",
        lambda load: load.num_host_cache_blocks,
    ),
    OfInstance(
        "pd_cluster:disk_cache_blocks",
        "KV blocks in files (--kv-disk-cache).",
        lambda load: load.num_disk_cache_blocks,
    ),
    OfInstance(
        "pd_cluster:num_swapped_blocks",
        "KV blocks of preempted requests in host memory.",
        lambda load: load.num_swap_blocks - load.num_free_swap_blocks,
    ),
    OfInstance(
        "pd_cluster:leases_held",
        "Sequences whose blocks wait for a peer.",
        lambda load: load.num_exporting + load.num_landing,
    ),
    OfInstance(
        "pd_cluster:quarantined_blocks",
        "KV blocks of abandoned transfers that a peer may still write.",
        lambda load: load.num_quarantined_blocks,
    ),
    OfInstance(
        "pd_cluster:leaked_blocks",
        "KV blocks marked as held although no request holds them. Above 0 is a bug.",
        lambda load: load.num_leaked_blocks,
    ),
)
INSTANCE_PARTS = (
    OfInstanceParts(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests by reason: capacity, or computation elsewhere (deferred).",
        {"capacity": lambda load: load.num_waiting - load.num_expected, "deferred": lambda load: load.num_expected},
        "reason",
    ),
    OfInstanceParts(
        "pd_cluster:window_blocks",
        "KV blocks in pools of windows: held, cached or free.",
        _parts_of("window"),
        "use",
    ),
    OfInstanceParts(
        "pd_cluster:states",
        "States of sequences: held, kept for later requests, or free.",
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
        "Preemptions of a sequence; a sequence that is handed over counts on both sides.",
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
        "Prompt tokens whose KV cache a decode instance requested from a prefill instance.",
        lambda load: load.num_wanted_tokens,
    ),
    OfInstance(
        "vllm:external_prefix_cache_hits",
        "Requested prompt tokens whose KV cache has arrived.",
        lambda load: load.num_landed_tokens,
    ),
    OfInstance(
        "pd_cluster:pulled_tokens",
        "Prompt tokens whose KV cache came from another prefill instance's caches.",
        lambda load: load.num_pulled_tokens,
    ),
    OfInstance(
        "pd_cluster:failed_pulls",
        "Pulls that brought nothing, so that the instance computed the tokens.",
        lambda load: load.num_failed_pulls,
    ),
    OfInstance(
        "pd_cluster:host_cache_hit_tokens",
        "Tokens whose KV blocks were loaded from host memory.",
        lambda load: load.num_host_hit_tokens,
    ),
    OfInstance(
        "pd_cluster:disk_cache_hit_tokens",
        "Tokens whose KV blocks came from disk.",
        lambda load: load.num_disk_hit_tokens,
    ),
    OfInstance(
        "pd_cluster:shared_cache_hit_tokens",
        "Tokens whose KV blocks came from the shared store.",
        lambda load: load.num_shared_hit_tokens,
    ),
    OfInstance(
        "pd_cluster:kv_tier_blocks_written",
        "KV blocks written to disk and to the shared store.",
        lambda load: load.num_lower_written,
    ),
    OfInstance(
        "pd_cluster:kv_tier_blocks_dropped",
        "KV blocks not written because too many waited, or not written or read because of a fault.",
        lambda load: load.num_lower_dropped,
    ),
    OfInstance(
        "pd_cluster:kv_tier_blocks_bad",
        "KV blocks read back with wrong content, which are not used.",
        lambda load: load.num_lower_bad,
    ),
    OfInstance(
        "pd_cluster:kv_event_batches",
        "Batches of KV events that were published.",
        lambda load: load.num_kv_event_batches,
    ),
    OfInstance(
        "pd_cluster:kv_event_batches_dropped",
        "Batches not sent, plus the number of times a subscriber's queue was full.",
        lambda load: load.num_kv_event_drops,
    ),
    OfInstance(
        "pd_cluster:unit_rounds",
        "Steps of its unit in which an instance took part.",
        lambda load: load.num_rounds,
    ),
    OfInstance(
        "pd_cluster:unit_idle_rounds",
        "Steps of its unit in which an instance had no rows.",
        lambda load: load.num_idle_rounds,
    ),
    OfInstance(
        "pd_cluster:unit_exchange_seconds",
        "Seconds that an instance waited for its unit in the unit's steps.",
        lambda load: load.exchange_s,
    ),
    OfInstance("vllm:num_preemptions", "Preemptions.", lambda load: load.num_preemptions),
    OfInstance(
        "pd_cluster:images_encoded",
        "Images, and pairs of a video's frames, that the vision tower computed.",
        lambda load: load.num_encoded_images,
    ),
    OfInstance(
        "pd_cluster:image_encode_seconds",
        "Seconds of the vision tower's computation; on accelerators, of its submission by the host.",
        lambda load: load.image_encode_s,
    ),
    OfInstance(
        "pd_cluster:encoder_cache_hits",
        "Images that this encoder had cached.",
        lambda load: load.num_encoded_hits,
    ),
    OfInstance(
        "pd_cluster:images_from_encoders",
        "Images whose features came from encoders.",
        lambda load: load.num_landed_images,
    ),
    OfInstance(
        "pd_cluster:encoder_fallbacks",
        "Images that this instance computed because an encoder died, refused or was late.",
        lambda load: load.num_encoder_fallbacks,
    ),
    OfInstance(
        "pd_cluster:encoder_wait_seconds",
        "Seconds from asking an encoder to receiving the features.",
        lambda load: load.encoder_wait_s,
    ),
    OfInstance(
        "pd_cluster:feature_bytes",
        "Bytes of features that an encoder sent or an instance received.",
        lambda load: load.feature_nbytes,
    ),
    OfInstance(
        "vllm:spec_decode_num_drafts",
        "Drafts: guesses that one step verified.",
        lambda load: load.drafts.num_drafts,
    ),
    OfInstance("vllm:spec_decode_num_draft_tokens", "Tokens of verified drafts.", lambda load: load.drafts.num_tokens),
    OfInstance(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        lambda load: load.drafts.num_accepted,
    ),
    OfInstance(
        "pd_cluster:spec_decode_drafting_seconds",
        "Seconds that steps waited for drafts.",
        lambda load: load.drafts.drafting_s,
    ),
    OfInstance(
        "pd_cluster:kv_sent_bytes", "Bytes of KV cache sent to decode instances.", lambda load: load.kv_sent_nbytes
    ),
    OfInstance(
        "pd_cluster:kv_received_bytes",
        "Bytes of KV cache received from prefill instances.",
        lambda x: x.kv_received_nbytes,
    ),
    OfInstance(
        "pd_cluster:kv_frames_dropped",
        "KV headers that were replayed, forged, out of order or undecodable.",
        lambda load: load.num_dropped_kv_frames,
    ),
    OfInstance(
        "pd_cluster:handovers_finished",
        "Prompts whose KV cache a decode instance confirmed, counted at the sender.",
        lambda load: load.num_handed_over,
    ),
    OfInstance(
        "pd_cluster:handovers_failed",
        "Prompts whose handover failed, counted at the sender; without aborts.",
        lambda load: load.num_failed_handovers,
    ),
    OfInstance(
        "pd_cluster:credit_leases_expired",
        "Offers without a credit within --credit-timeout.",
        lambda load: load.num_expired_credits,
    ),
    OfInstance(
        "pd_cluster:hold_leases_expired",
        "Transfers without progress for --transfer-timeout, on either side.",
        lambda load: load.num_expired_holds,
    ),
)
INSTANCE_POSITIONS = (
    OfInstancePositions(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by their position.",
        lambda load: load.drafts.accepted_at,
    ),
)
REQUEST_COUNTERS = (
    *(
        OfRequests(f"pd_cluster:arrived_{name}", text, {"": f"arrived_{name}"})
        for name, text in (
            ("requests", "Requests that arrived, including those refused later."),
            ("prompt_tokens", "Prompt tokens of arrived requests."),
            ("prompt_pairs", "Token pairs of arrived prompts, which measure attention's work."),
            ("answers", "Sequences that arrived requests ask for."),
            ("max_tokens", "Sum of maximum output tokens (max_tokens) of arrived requests' sequences."),
        )
    ),
    OfRequests(
        "pd_cluster:role_changes",
        "Role changes by --auto-role, by the new role.",
        {role: f"role_changes_{role}" for role in get_args(Needy)},
        "role",
    ),
    OfRequests(
        "pd_cluster:roles_kept",
        "Decisions of --auto-role=cost, one a second, that kept the roles, by reason.",
        {why: f"roles_kept_{why}" for why in get_args(Held)},
        "reason",
    ),
    OfRequests(
        "vllm:prompt_tokens",
        "Tokens of prompts that have their first output token.",
        {"": "prompt_tokens"},
    ),
    OfRequests("vllm:prompt_tokens_cached", "Prompt tokens found in a cache.", {"": "prompt_tokens_cached"}),
    OfRequests(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by source: computed, or cached.",
        {"local_compute": "prompt_tokens_computed", "local_cache_hit": "prompt_tokens_cached"},
        "source",
    ),
    OfRequests("vllm:generation_tokens", "Output tokens, of all sequences.", {"": "generation_tokens"}),
    OfRequests(
        "vllm:request_success",
        "Sequences that ended, including aborted and failed ones.",
        {reason: f"finished_{reason}" for reason in ("stop", "length", "abort", "error")},
        "finished_reason",
    ),
    *(
        OfRequests(
            f"pd_cluster:{kind}s",
            f"{kind.capitalize()}s of prompts: read, or refused with a 400.",
            {outcome: f"{kind}s_{outcome}" for outcome in ("read", "refused")},
            "outcome",
        )
        for kind in ("image", "video")
    ),
    OfRequests(
        "vllm:mm_cache_queries",
        "Images and videos by data: URL that were looked up in the cache.",
        {"": "kept_media_queries"},
    ),
    OfRequests("vllm:mm_cache_hits", "Images and videos found in the cache.", {"": "kept_media_hits"}),
    OfRequests(
        "pd_cluster:replays",
        "Further attempts by reason: an instance was lost (death), an attempt failed (fault), an instance was "
        "drained (moved), or an instance was full (full).",
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
        "Requests refused before any work: 429 by a goal (slo) or the queue (queue); 503 without "
        "instances (unavailable).",
        {why: f"refused_{why}" for why in get_args(Refusal)},
        "reason",
    ),
)
HISTOGRAMS = (
    OfRequests(
        "vllm:request_time_per_output_token_seconds",
        "Decode time of a request, divided by its longest sequence's tokens after the first token.",
        {"": "token_s"},
    ),
    OfRequests(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were computed.",
        {"": "num_computed_tokens"},
    ),
    OfRequests(
        "vllm:time_to_first_token_seconds",
        "From arrival to the first output token.",
        {"": "first_token_s"},
    ),
    OfRequests(
        "vllm:inter_token_latency_seconds",
        "Between two output tokens of a sequence, except in beam searches.",
        {"": "inter_token_s"},
    ),
    OfRequests(
        "vllm:time_per_output_token_seconds",
        "The older name of vllm:inter_token_latency_seconds.",
        {"": "inter_token_s"},
    ),
    OfRequests("vllm:e2e_request_latency_seconds", "From arrival to the last output token.", {"": "whole_s"}),
    OfRequests(
        "vllm:request_queue_time_seconds",
        "From arrival until a prefill instance had capacity.",
        {"": "queue_s"},
    ),
    OfRequests(
        "vllm:request_prefill_time_seconds",
        "From a prefill instance's capacity to the first output token.",
        {"": "prefill_s"},
    ),
    OfRequests("vllm:request_decode_time_seconds", "From the first output token to the last.", {"": "decode_s"}),
    OfRequests("vllm:request_inference_time_seconds", "Prefill and decode time together.", {"": "inference_s"}),
    OfRequests("vllm:request_prompt_tokens", "Prompt tokens of a request.", {"": "num_prompt_tokens"}),
    OfRequests("vllm:request_generation_tokens", "Output tokens of a sequence.", {"": "num_output_tokens"}),
    OfRequests(
        "vllm:request_max_num_generation_tokens",
        "Output tokens of a request's longest sequence.",
        {"": "most_output_tokens"},
    ),
    OfRequests("vllm:request_params_n", "Sequences of a request.", {"": "num_sequences"}),
    OfRequests("vllm:request_params_max_tokens", "Maximum output tokens of a sequence.", {"": "max_tokens"}),
    OfRequests(
        "pd_cluster:handover_seconds",
        "From a prompt's offer to its confirmation, at the decode instance.",
        {"": "handover_s"},
    ),
    OfRequests(
        "pd_cluster:media_fetch_seconds",
        "Getting the file of an image or a video.",
        {"": "media_fetch_s"},
    ),
    OfRequests(
        "pd_cluster:media_decode_seconds",
        "Decoding and resizing an image or a video's frames.",
        {"": "media_decode_s"},
    ),
)
TENANT_COUNTERS = (
    OfRequests(
        "pd_cluster:tenant_requests",
        "Requests by outcome: finished, aborted by the client, failed by the server, refused (4xx, 503), "
        "limited (429 by the key).",
        {outcome: f"tenant_{outcome}" for outcome in OUTCOMES},
        "outcome",
    ),
    OfRequests("pd_cluster:tenant_prompt_tokens", "Prompt tokens sent to an instance.", {"": PROMPT_TOKENS}),
    OfRequests("pd_cluster:tenant_generation_tokens", "Output tokens.", {"": GENERATION_TOKENS}),
    OfRequests(
        "pd_cluster:tenant_limited",
        "Answers with status 429, by the exceeded limit.",
        {limit: f"tenant_limited_by_{limit}" for limit in LIMITS},
        "limit",
    ),
)
CACHE_CONFIG = OfCluster("vllm:cache_config_info", "Always 1; labels describe an instance's KV cache.")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # vLLM's names, by the level of /sleep
SLEEP_STATE = OfCluster(
    "vllm:engine_sleep_state",
    "1 for an instance's state, 0 for the others: awake, weights_offloaded (asleep at level 1), discard_all (level 2).",
)
WEIGHTS_EPOCH = OfCluster(
    "pd_cluster:weights_epoch", "Number of weight updates up to an instance's version; 0: the original weights."
)
UNIT = OfCluster(
    "pd_cluster:unit_info",
    "Always 1; labels: an instance's unit, its rank there, the unit's size.",
)
INSTANCES = OfCluster("pd_cluster:instances", "Instances by role and state.")
OPEN_STREAMS = OfCluster("pd_cluster:open_streams", "Requests that are routed and have not ended.")
QUEUED_REQUESTS = OfCluster("pd_cluster:queued_requests", "Requests that wait before they are routed.")
QUEUED_TOKENS = OfCluster("pd_cluster:queued_tokens", "Tokens of queued requests: prompts and expected answers.")
BACKLOG_TOKENS = OfCluster(
    "pd_cluster:backlog_tokens",
    "Tokens that the instances of a role still have to compute, for autoscalers.",
)
API_PROCESSES = OfCluster("pd_cluster:api_processes_alive", "Processes that serve the public port.")
OWNS_MEMBERSHIP = OfCluster(
    "pd_cluster:owns_membership",
    "1 if this scheduler (label scheduler) owns membership, otherwise 0.",
)
CLUSTER_GAUGES = (
    *(
        CACHE_CONFIG,
        SLEEP_STATE,
        WEIGHTS_EPOCH,
        UNIT,
        INSTANCES,
        BACKLOG_TOKENS,
        OPEN_STREAMS,
        QUEUED_REQUESTS,
        QUEUED_TOKENS,
    ),
    *(API_PROCESSES, OWNS_MEMBERSHIP),
)

ShownState = Literal["leaving", "changing", "draining", "drained"]
STATES: tuple[str, ...] = (*get_args(InstanceState), *get_args(ShownState))
