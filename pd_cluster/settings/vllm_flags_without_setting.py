"""vLLM's flags that no setting here has, with the reasons. flags_without_setting.py reads this list.

tests/data/vllm_flags.txt has vLLM's own list, and a test holds this one against it.
"""

from __future__ import annotations

from pd_cluster.errors import called
from pd_cluster.settings.flags_without_setting import Family, FlagWithoutSetting, Takes, table

OFF = "--no-"
NO_FOREIGN_CODE = "foreign code is not loaded"
ON_THE_HOST = f"images are read on the host, and kept there; see {called('mm_processor_cache_gb')}"

FAMILIES = (
    # ---- processes and devices
    Family(
        "instances that share experts meet through the scheduler",
        accepted="--data-parallel-address --data-parallel-rpc-port --data-parallel-backend "
        "--[no-]data-parallel-external-lb --data-parallel-supervisor-port --dp-supervisor-* --dp-sync-interval "
        "--elastic-ep-max-dp-size --[no-]disable-nccl-for-dp-synchronization",
    ),
    Family(
        f"each data-parallel rank is an instance that is started by itself: {called('data_parallel_size')} entries of "
        f"a role in the rank tables, or {called('data_parallel_rank')} with {called('join')}",
        refused="--data-parallel-size-local=1 --data-parallel-start-rank=0 --[no-]data-parallel-hybrid-lb "
        "--[no-]data-parallel-multi-port-external-lb --[no-]enable-elastic-ep",
    ),
    Family(
        "each instance is started by itself, and rank tables give it its place among hosts and devices",
        accepted="--master-addr --master-port --distributed-executor-backend",
        refused="--nnodes=1 --node-rank=0 --[no-]headless --device-ids",
    ),
    Family(
        "processes are placed by rank tables, not by Ray",
        accepted="--[no-]engine-use-ray --[no-]worker-use-ray",
        refused="--[no-]ray-workers-use-nsight",
    ),
    Family(
        f"{called('bind_cores')} keeps ranks to their own cores",
        refused="--[no-]numa-bind --numa-bind-nodes+ --numa-bind-cpus+",
    ),
    Family("there is one stage", refused="--pipeline-parallel-size=1"),
    Family(
        "a sequence is not divided among devices",
        accepted="--dcp-comm-backend --[no-]dcp-q-replicate --dcp-kv-cache-interleave-size "
        "--cp-kv-cache-interleave-size",
        refused="--decode-context-parallel-size=1 --prefill-context-parallel-size=1",
    ),
    Family(
        "rows are gathered, and results are scattered",
        refused="--all2all-backend=allgather_reducescatter",
    ),
    Family(
        f"experts stay where {called('expert_placement_strategy')} puts them",
        accepted="--eplb-config",
        refused="--[no-]enable-eplb",
    ),
    Family("each rank reads its own experts only", accepted="--[no-]enable-ep-weight-filter"),
    Family(
        "a step is computed as one batch",
        accepted="--dbo-decode-token-threshold --dbo-prefill-token-threshold",
        refused="--[no-]enable-dbo --ubatch-size=0|1",
    ),
    Family(
        "how ranks share their work follows from the model",
        accepted="--[no-]enable-hc-sp --[no-]enable-batch-sharded-sampling --[no-]enable-shm-tensor-arena",
    ),
    Family("each rank computes its share of the images", accepted="--mm-encoder-tp-mode"),
    Family("there is no custom all-reduce", accepted="--[no-]disable-custom-all-reduce"),
    Family(
        "requests always continue elsewhere after a loss",
        accepted="--[no-]enable-fault-tolerance --fault-tolerance-config",
    ),
    Family("the API has a process of its own", accepted="--[no-]disable-frontend-multiprocessing"),
    Family(
        f"see {called('api_workers')}",
        accepted="--renderer-num-workers",
    ),
    Family(
        "the admin port always has /sleep and /wake_up",
        accepted="--[no-]enable-sleep-mode --[no-]sleep-mode-offload-cudagraph --sleep-preserve-parameter-names+ "
        "--[no-]enable-cumem-allocator --[no-]enable-nccl-comm-suspend",
    ),
    Family(
        NO_FOREIGN_CODE,
        refused="--worker-cls=auto --worker-extension-cls --scheduler-cls --logits-processors+ --middleware+ "
        "--io-processor-plugin --model-class-overrides --additional-config",
    ),
    # ---- model and weights
    Family(
        "one server generates, embeds and scores",
        refused="--runner=auto|generate|pooling! --convert=auto|none|embed!",
    ),
    Family("there is one way to run a model", refused="--model-impl=auto|transformers"),
    Family(
        f"the configuration is config.json of the model's folder; see {called('hf_overrides')}",
        refused="--config-format=auto|hf --hf-config-path",
    ),
    Family(
        f"the model's folder says how it is quantized; see {called('quantization')}",
        accepted="--[no-]allow-deprecated-quantization",
        refused="--quantization-config",
    ),
    Family(
        "command lines are public on a host; set HF_TOKEN, or use `hf auth login`",
        refused="--hf-token=True",
    ),
    Family("code from a model folder is never run", accepted="--[no-]trust-remote-code", refused="--code-revision"),
    Family("fast and slow tokenizers give the same token ids", refused="--tokenizer-mode=auto|hf|slow!"),
    Family("there is no tokenizer pool", refused="--tokenizer-pool-*"),
    Family(
        "weights are always safetensors",
        accepted="--pt-load-map-location --ignore-patterns+",
        refused="--load-format=auto|safetensors --model-loader-extra-config",
    ),
    Family(
        "each rank maps its own part",
        accepted="--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--[no-]use-tqdm-on-load --max-parallel-loading-workers",
    ),
    Family(
        f"weights stay on the device; see {called('cpu_offload_gb')}",
        accepted="--cpu-offload-params+ --offload-params+ --offload-num-in-group --offload-prefetch-step",
        refused="--offload-group-size=0 --offload-backend=auto",
    ),
    Family("weights are those of the model's folder", refused="--model-weights"),
    Family("weights do not change", refused="--weight-transfer-config"),
    Family("sliding windows follow the model", accepted="--[no-]disable-sliding-window"),
    Family(
        "states are float32; kernels follow the device",
        accepted="--mamba-backend --mamba-config --mamba-cache-dtype --mamba-cache-philox-rounds --mamba-ssu-algorithm "
        "--[no-]enable-mamba-cache-stochastic-rounding --[no-]enable-mamba-shared-prefix-checkpoint "
        "--replayssm-buffer-len --[no-]use-replayssm --gdn-prefill-backend --kda-prefill-backend --kda-decode-backend",
    ),
    Family("models that need it are not supported", refused="--diffusion-config --engram-config"),
    # ---- steps and kernels
    Family(
        f"nothing is compiled; see {called('enforce_eager')}",
        accepted="--compilation-config --optimization-level --ir-op-priority --[no-]enable-flashinfer-autotune "
        "--jit-monitor-mode --[no-]jit-monitor-verbose",
    ),
    Family(
        f"kernels follow the device and the weights; see {called('attention_backend')}",
        accepted="--mm-encoder-attn-backend",
        refused="--moe-backend=auto --linear-backend=auto --sparse-indexer-topk-backend=auto --kernel-config "
        "--attention-config",
    ),
    Family("there is no cascade attention", accepted="--[no-]disable-cascade-attn"),
    Family("there is one mode", refused="--performance-mode=balanced"),
    Family("steps are prepared ahead where the device allows it", accepted="--[no-]async-scheduling"),
    Family("steps are always single", accepted="--num-scheduler-steps"),
    Family("there is no such switch", accepted="--[no-]disable-async-output-proc"),
    Family(
        "prefill is always chunked",
        accepted="--[no-]enable-chunked-prefill --[no-]disable-chunked-mm-input",
    ),
    Family(
        "prompts share a step in order",
        accepted="--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
        "--[no-]long-prefill-token-threshold-adaptive",
    ),
    Family("the scheduler does not delay", accepted="--scheduler-delay-factor --prefill-schedule-interval"),
    Family(
        f"a request begins when there is room for its whole prompt; see {called('growth_tokens')}",
        accepted="--[no-]scheduler-reserve-full-isl --watermark",
    ),
    Family(
        f"give {called('max_num_batched_tokens')}",
        refused="--max-num-scheduled-tokens",
    ),
    Family(
        f"give {called('max_num_seqs')}, and {called('graph_sizes')} if graphs should be for more",
        refused="--max-num-active-seqs",
    ),
    Family(
        f"give {called('max_queue_time')} or {called('slo_ttft')}: requests that would wait longer are refused at once",
        refused="--max-num-queued-tokens",
    ),
    Family(
        f"give {called('speculative_config')}, whose keys about a draft model are model, revision, quantization, "
        "max_model_len and draft_sample_method",
        refused="--speculative-draft-* --speculative-model-* --speculative-max-model-len",
    ),
    Family(
        f"drafting has vLLM's names here; give {called('speculative_config')}",
        refused="--speculative-algorithm --speculative-num-* --speculative-eagle-* --speculative-accept-* "
        "--speculative-token-map --speculative-attention-mode --speculative-moe-* --speculative-ngram-* "
        "--speculative-adaptive*",
    ),
    Family(
        "only the token that would have been drawn is accepted",
        refused="--spec-decoding-acceptance-method=rejection_sampler --typical-acceptance-sampler-*",
    ),
    Family(
        "drafts are rows of a step, in free blocks",
        accepted="--num-lookahead-slots --[no-]speculative-disable-mqa-scorer",
    ),
    Family("requests choose logprobs", accepted="--[no-]disable-logprobs-during-spec-decoding"),
    # ---- KV cache
    Family("blocks are known by SHA-256", refused="--prefix-caching-hash-algo=sha256|sha256_cbor"),
    Family(
        "there is one block manager; cached blocks stay until they are needed",
        accepted="--[no-]use-v2-block-manager --[no-]disable-hybrid-kv-cache-manager --[no-]swa-bounded-replay "
        "--[no-]kv-sharing-fast-prefill --prefix-cache-retention-interval --prefix-match-unit",
    ),
    Family(
        f"evicted blocks go to {called('kv_host_cache')}, {called('kv_disk_cache')} and {called('kv_shared_cache')}",
        refused="--kv-offloading-backend=native",
    ),
    Family(f"all layers have one {called('kv_cache_dtype')}", refused="--kv-cache-dtype-skip-layers+"),
    Family(
        f"scales are computed; see {called('kv_cache_dtype')}",
        refused="--quantization-param-path",
    ),
    Family(f"the handover is built in; see {called('kv_transport')}", refused="--kv-transfer-config"),
    Family(
        f"encoders hand features over: {called('role')} encode, or --encode of `pd-cluster up`",
        accepted="--ec-manager-config",
        refused="--ec-transfer-config --[no-]mm-encoder-only",
    ),
    # ---- requests and answers
    Family("they are computed from the model's own logits", refused="--logprobs-mode=raw_logprobs"),
    Family("samples are drawn with 53 random bits", accepted="--[no-]use-fp64-gumbel"),
    Family(
        "answers have no such field",
        refused="--[no-]enable-return-routed-experts --aux-output-config --[no-]return-sampling-mask "
        "--fingerprint-mode=none|full!|hash! --fingerprint-value",
    ),
    Family("a model's tokens are always its own samples", refused="--[no-]enable-trace-replay --watermark-config"),
    Family(
        "prompts are never embeddings",
        refused="--[no-]enable-prompt-embeds --[no-]enable-mm-embeds",
    ),
    Family("scores are computed in the engine", accepted="--[no-]enable-flash-late-interaction"),
    Family("each tool's own strict and a request's tool_choice decide", refused="--tool-strict-level=auto"),
    Family("thinking that a request disables is off", refused="--anthropic-disabled-thinking-effort=auto|none"),
    Family(
        "a stream begins with its first token; let proxies wait that long",
        refused="--sse-keep-alive-interval=0",
    ),
    Family("Cohere's chats are not supported", accepted="--cohere-format --[no-]cohere-is-reasoning-model"),
    Family("the server runs no tools", refused="--tool-server"),
    Family(f"see {called('reasoning_parser')}", refused="--reasoning-parser-plugin"),
    Family("usage always has them", accepted="--[no-]enable-prompt-tokens-details"),
    # ---- images and videos
    Family(
        "requests may always say how their images are read",
        refused="--[no-]trust-request-mm-kwargs=True",
    ),
    Family(
        "memory is measured on accelerators only",
        accepted="--[no-]skip-mm-profiling",
    ),
    Family(
        ON_THE_HOST,
        accepted="--mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-hasher-algorithm "
        "--mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb --[no-]mm-device-do-normalize",
    ),
    Family(
        "encoders compute in the model's dtype",
        accepted="--mm-encoder-fp8-*",
        refused="--mm-encoder-attn-dtype",
    ),
    Family("the chat template says where images stand", refused="--[no-]interleave-mm-strings"),
    Family(
        f"all frames are computed; see {called('media_io_kwargs')}",
        accepted="--video-pruning-method",
        refused="--video-pruning-rate=0|0.0",
    ),
    # ---- adapters
    Family("adapters compute in float32 on a CPU, otherwise in the model's dtype", refused="--lora-dtype=auto"),
    Family(
        "each rank has one of an adapter's two matrices whole",
        refused="--[no-]fully-sharded-loras",
    ),
    Family("adapters have one context length", refused="--long-lora-scaling-factors"),
    Family("adapters add no tokens", refused="--lora-extra-vocab-size"),
    Family("an adapter's folder names its modules", refused="--lora-target-modules+"),
    Family(f"requests name their adapter as their model; see {called('lora_modules')}", refused="--default-mm-loras"),
    Family(
        f"see {called('lora_modules')}, which any quantization takes",
        refused="--qlora-adapter-name-or-path",
    ),
    Family("images are encoded without adapters", refused="--[no-]enable-tower-connector-lora"),
    Family("adapters of classifiers are not supported", refused="--max-lora-cls-labels"),
    Family(
        "adapters of experts are accepted in both forms",
        accepted="--[no-]enable-mixed-moe-lora-format --[no-]specialize-active-lora --[no-]enable-moe-shared-loras",
    ),
    Family("any number of prompt adapters takes part in a step", accepted="--max-prompt-adapters"),
    # ---- HTTP, logs and metrics
    Family("the API is HTTP", refused="--[no-]grpc --grpc-port"),
    Family("TLS takes OpenSSL's own choice", refused="--ssl-ciphers"),
    Family("certificates are read again when they change", accepted="--[no-]enable-ssl-refresh"),
    Family("a request's line and headers are limited to 64 KiB", accepted="--h11-max-incomplete-event-size"),
    Family("/docs needs nothing from other hosts", accepted="--[no-]enable-offline-docs"),
    Family("/load is always available", accepted="--[no-]enable-server-load-tracking"),
    Family(
        "/inference/v1/generate and the routes to render and derender are always available",
        accepted="--[no-]enable-scale-out --[no-]tokens-only",
    ),
    Family(f"see {called('log_level')}", accepted="--uvicorn-log-level"),
    Family(
        f"give {called('log_level')}, {called('log_format')} and {called('log_config_file')}",
        refused="--logging-config",
    ),
    Family("an answer is logged once, when it has ended", accepted="--[no-]enable-log-deltas"),
    Family(f"requests are not logged without {called('enable_log_requests')}", accepted="--[no-]disable-log-requests"),
    Family("unexpected errors are always logged with their stack", accepted="--[no-]log-error-stack"),
    Family(
        "statistics are not logged; /metrics has them",
        accepted="--[no-]disable-log-stats --[no-]aggregate-engine-logging --[no-]enable-logging-iteration-details",
    ),
    Family(
        "/metrics has what is measured",
        accepted="--[no-]kv-cache-metrics --kv-cache-metrics-sample --[no-]cudagraph-metrics --[no-]enable-mfu-metrics "
        "--[no-]enable-mm-processor-stats",
    ),
    Family("/metrics has the older names, too", accepted="--show-hidden-metrics-for-version"),
    Family("the buckets of /metrics are fixed", refused="--custom-histogram-buckets"),
    Family(
        f"traces always have every part; see {called('otlp_traces_endpoint')}",
        accepted="--collect-detailed-traces+",
    ),
    Family(
        f"profiles are not taken; see `pd-cluster trace` and {called('otlp_traces_endpoint')}",
        refused="--profiler-config --[no-]enable-layerwise-nvtx-tracing",
    ),
    Family(
        "of vLLM's variables only VLLM_API_KEY is read; a warning names those that have a flag here",
        accepted="--[no-]fail-on-environ-validation",
    ),
)


FOREIGN = table(FAMILIES)


def foreign(flag: str) -> tuple[FlagWithoutSetting, bool] | None:
    """Returns what is known of a flag in FOREIGN, and whether this is its --no- form; None: it is unknown."""
    if flag.startswith(OFF) and (found := _positive(f"--{flag[len(OFF) :]}")) and found.takes is Takes.SWITCH:
        return found, True
    found = _positive(flag)
    return (found, False) if found is not None else None


def _positive(flag: str) -> FlagWithoutSetting | None:
    if flag in FOREIGN:
        return None if flag.endswith("*") else FOREIGN[flag]
    return next((each for each in FOREIGN.values() if each.is_prefix and flag.startswith(each.name[:-1])), None)
