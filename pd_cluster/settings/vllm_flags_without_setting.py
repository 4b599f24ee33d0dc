"""vLLM's flags without a setting here, with the reasons, in the format of flags_without_setting.py.

A test compares this list with vLLM's own, tests/data/vllm_flags.txt.
"""

from __future__ import annotations

from pd_cluster.errors import called
from pd_cluster.settings.flags_without_setting import Family, FlagWithoutSetting, Takes, table

OFF = "--no-"
NO_FOREIGN_CODE = "foreign code is not loaded"
ON_THE_HOST = f"images are decoded and cached on the host; see {called('mm_processor_cache_gb')}"

FAMILIES = (
    # ---- processes and devices
    Family(
        "instances that share experts meet through the scheduler",
        accepted="--data-parallel-address --data-parallel-rpc-port --data-parallel-backend "
        "--[no-]data-parallel-external-lb --data-parallel-supervisor-port --dp-supervisor-* --dp-sync-interval "
        "--elastic-ep-max-dp-size --[no-]disable-nccl-for-dp-synchronization",
    ),
    Family(
        f"each data-parallel rank is an instance that is started separately: {called('data_parallel_size')} entries of "
        f"a role in the rank tables, or {called('data_parallel_rank')} with {called('join')}",
        refused="--data-parallel-size-local=1 --data-parallel-start-rank=0 --[no-]data-parallel-hybrid-lb "
        "--[no-]data-parallel-multi-port-external-lb --[no-]enable-elastic-ep",
    ),
    Family(
        "each instance is started separately, and rank tables assign its host and devices",
        accepted="--master-addr --master-port --distributed-executor-backend",
        refused="--nnodes=1 --node-rank=0 --[no-]headless --device-ids",
    ),
    Family(
        "rank tables place processes, not Ray",
        accepted="--[no-]engine-use-ray --[no-]worker-use-ray",
        refused="--[no-]ray-workers-use-nsight",
    ),
    Family(
        f"{called('bind_cores')} keeps ranks to their own cores",
        refused="--[no-]numa-bind --numa-bind-nodes+ --numa-bind-cpus+",
    ),
    Family("models are not split into pipeline stages", refused="--pipeline-parallel-size=1"),
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
        f"{called('expert_placement_strategy')} places experts, and they do not move",
        accepted="--eplb-config",
        refused="--[no-]enable-eplb",
    ),
    Family("each rank reads only its own experts", accepted="--[no-]enable-ep-weight-filter"),
    Family(
        "a step is computed as one batch",
        accepted="--dbo-decode-token-threshold --dbo-prefill-token-threshold",
        refused="--[no-]enable-dbo --ubatch-size=0|1",
    ),
    Family(
        "the model determines how ranks share their work",
        accepted="--[no-]enable-hc-sp --[no-]enable-batch-sharded-sampling --[no-]enable-shm-tensor-arena",
    ),
    Family("each rank computes its share of the images", accepted="--mm-encoder-tp-mode"),
    Family("there is no custom all-reduce", accepted="--[no-]disable-custom-all-reduce"),
    Family(
        "requests always continue elsewhere after a loss",
        accepted="--[no-]enable-fault-tolerance --fault-tolerance-config",
    ),
    Family("the API has a separate process", accepted="--[no-]disable-frontend-multiprocessing"),
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
        refused="--worker-cls=auto --worker-extension-cls --scheduler-cls --middleware+ "
        "--io-processor-plugin --model-class-overrides --additional-config",
    ),
    # ---- model and weights
    Family(
        "one server generates, embeds and scores",
        refused="--runner=auto|generate|pooling! --convert=auto|none|embed!",
    ),
    Family("there is one implementation of each model", refused="--model-impl=auto|transformers"),
    Family(
        f"the configuration is config.json in the model's folder; see {called('hf_overrides')}",
        refused="--config-format=auto|hf --hf-config-path",
    ),
    Family(
        f"the model's folder states its quantization; see {called('quantization')}",
        accepted="--[no-]allow-deprecated-quantization",
        refused="--quantization-config",
    ),
    Family(
        "every user of a host can read command lines; set HF_TOKEN, or use `hf auth login`",
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
        f"weights are always on the device; see {called('cpu_offload_gb')}",
        accepted="--cpu-offload-params+ --offload-params+ --offload-num-in-group --offload-prefetch-step",
        refused="--offload-group-size=0 --offload-backend=auto",
    ),
    Family("weights always come from the model's folder", refused="--model-weights"),
    Family("the admin port replaces weights; see --weights-dir", refused="--weight-transfer-config"),
    Family("the model determines its sliding windows", accepted="--[no-]disable-sliding-window"),
    Family(
        "states are float32; the device determines the kernels",
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
        f"the device and the weights determine the kernels; see {called('attention_backend')}",
        accepted="--mm-encoder-attn-backend",
        refused="--moe-backend=auto --linear-backend=auto --sparse-indexer-topk-backend=auto --kernel-config "
        "--attention-config",
    ),
    Family("there is no cascade attention", accepted="--[no-]disable-cascade-attn"),
    Family("there is only one performance mode", refused="--performance-mode=balanced"),
    Family("steps are prepared ahead where the device allows it", accepted="--[no-]async-scheduling"),
    Family("each step is scheduled on its own", accepted="--num-scheduler-steps"),
    Family("not needed", accepted="--[no-]disable-async-output-proc"),
    Family(
        "prefill is always chunked",
        accepted="--[no-]enable-chunked-prefill --[no-]disable-chunked-mm-input",
    ),
    Family(
        "prompts fill a step in order of arrival",
        accepted="--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
        "--[no-]long-prefill-token-threshold-adaptive",
    ),
    Family("the scheduler never delays requests", accepted="--scheduler-delay-factor --prefill-schedule-interval"),
    Family(
        f"a request begins when blocks for its whole prompt are free; see {called('growth_tokens')}",
        accepted="--[no-]scheduler-reserve-full-isl --watermark",
    ),
    Family(
        f"give {called('max_num_batched_tokens')}",
        refused="--max-num-scheduled-tokens",
    ),
    Family(
        f"give {called('max_num_seqs')}, and {called('graph_sizes')} to capture graphs for more sequences",
        refused="--max-num-active-seqs",
    ),
    Family(
        f"give {called('max_queue_time')} or {called('slo_ttft')}: requests that would wait longer are refused at once",
        refused="--max-num-queued-tokens",
    ),
    Family(
        f"give {called('speculative_config')}, whose keys for a draft model are model, revision, quantization, "
        "max_model_len and draft_sample_method",
        refused="--speculative-draft-* --speculative-model-* --speculative-max-model-len",
    ),
    Family(
        f"drafting is configured with vLLM's names; give {called('speculative_config')}",
        refused="--speculative-algorithm --speculative-num-* --speculative-eagle-* --speculative-accept-* "
        "--speculative-token-map --speculative-attention-mode --speculative-moe-* --speculative-ngram-* "
        "--speculative-adaptive*",
    ),
    Family(
        "only the token that would have been sampled is accepted",
        refused="--spec-decoding-acceptance-method=rejection_sampler --typical-acceptance-sampler-*",
    ),
    Family(
        "drafts are computed as rows of a step, in free blocks",
        accepted="--num-lookahead-slots --[no-]speculative-disable-mqa-scorer",
    ),
    Family("speculation does not change logprobs", accepted="--[no-]disable-logprobs-during-spec-decoding"),
    # ---- KV cache
    Family("blocks are always identified by SHA-256", refused="--prefix-caching-hash-algo=sha256|sha256_cbor"),
    Family(
        "there is one block manager; cached blocks are kept until their memory is needed",
        accepted="--[no-]use-v2-block-manager --[no-]swa-bounded-replay "
        "--[no-]kv-sharing-fast-prefill --prefix-cache-retention-interval --prefix-match-unit",
    ),
    Family(
        f"evicted blocks are moved to {called('kv_host_cache')}, {called('kv_disk_cache')} and "
        f"{called('kv_shared_cache')}",
        refused="--kv-offloading-backend=native",
    ),
    Family(f"all layers use the same {called('kv_cache_dtype')}", refused="--kv-cache-dtype-skip-layers+"),
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
    Family("logprobs are computed from the model's own logits", refused="--logprobs-mode=raw_logprobs"),
    Family("samples are drawn with 53 random bits", accepted="--[no-]use-fp64-gumbel"),
    Family(
        "answers have no such field",
        refused="--[no-]enable-return-routed-experts --aux-output-config --[no-]return-sampling-mask "
        "--fingerprint-mode=none|full!|hash! --fingerprint-value",
    ),
    Family("tokens are always sampled from the model", refused="--[no-]enable-trace-replay --watermark-config"),
    Family(
        "prompts cannot be embeddings",
        refused="--[no-]enable-prompt-embeds --[no-]enable-mm-embeds",
    ),
    Family("scores are computed in the engine", accepted="--[no-]enable-flash-late-interaction"),
    Family("each tool's strict and a request's tool_choice decide", refused="--tool-strict-level=auto"),
    Family("a request can disable thinking", refused="--anthropic-disabled-thinking-effort=auto|none"),
    Family(
        "a stream begins with its first token; set proxies' timeouts accordingly",
        refused="--sse-keep-alive-interval=0",
    ),
    Family("Cohere's chats are not supported", accepted="--cohere-format --[no-]cohere-is-reasoning-model"),
    Family("the server runs no tools", refused="--tool-server"),
    Family(f"see {called('reasoning_parser')}", refused="--reasoning-parser-plugin"),
    Family("usage always includes the details", accepted="--[no-]enable-prompt-tokens-details"),
    # ---- images and videos
    Family(
        "requests may always set how their images are decoded",
        refused="--[no-]trust-request-mm-kwargs=True",
    ),
    Family(
        "memory is profiled only on accelerators",
        accepted="--[no-]skip-mm-profiling",
    ),
    Family(
        ON_THE_HOST,
        accepted="--mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-hasher-algorithm "
        "--mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb --[no-]mm-device-do-normalize",
    ),
    Family(
        "encoders use the model's dtype",
        accepted="--mm-encoder-fp8-*",
        refused="--mm-encoder-attn-dtype",
    ),
    Family("the chat template places images", refused="--[no-]interleave-mm-strings"),
    Family(
        f"all frames that are read are computed; see {called('media_io_kwargs')}",
        accepted="--video-pruning-method",
        refused="--video-pruning-rate=0|0.0",
    ),
    # ---- adapters
    Family("adapters use float32 on a CPU, otherwise the model's dtype", refused="--lora-dtype=auto"),
    Family(
        "each rank holds one of an adapter's two matrices in full",
        refused="--[no-]fully-sharded-loras",
    ),
    Family("adapters have one context length", refused="--long-lora-scaling-factors"),
    Family("adapters add no tokens", refused="--lora-extra-vocab-size"),
    Family("an adapter's folder lists its modules", refused="--lora-target-modules+"),
    Family(f"requests name their adapter as their model; see {called('lora_modules')}", refused="--default-mm-loras"),
    Family(
        f"see {called('lora_modules')}, which works with any quantization",
        refused="--qlora-adapter-name-or-path",
    ),
    Family("images are encoded without adapters", refused="--[no-]enable-tower-connector-lora"),
    Family("adapters of classifiers are not supported", refused="--max-lora-cls-labels"),
    Family(
        "adapters of experts are accepted in both forms",
        accepted="--[no-]enable-mixed-moe-lora-format --[no-]specialize-active-lora --[no-]enable-moe-shared-loras",
    ),
    Family("a step can use any number of prompt adapters", accepted="--max-prompt-adapters"),
    # ---- HTTP, logs and metrics
    Family("the API is HTTP only", refused="--[no-]grpc --grpc-port"),
    Family("TLS uses OpenSSL's defaults", refused="--ssl-ciphers"),
    Family("certificates are read again when they change", accepted="--[no-]enable-ssl-refresh"),
    Family("a request's line and headers are limited to 64 KiB", accepted="--h11-max-incomplete-event-size"),
    Family("/docs loads nothing from other hosts", accepted="--[no-]enable-offline-docs"),
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
    Family("an answer is logged once, when it ends", accepted="--[no-]enable-log-deltas"),
    Family(f"requests are not logged without {called('enable_log_requests')}", accepted="--[no-]disable-log-requests"),
    Family("unexpected errors are always logged with a stack trace", accepted="--[no-]log-error-stack"),
    Family(
        "statistics are not logged; /metrics has them",
        accepted="--[no-]disable-log-stats --[no-]aggregate-engine-logging --[no-]enable-logging-iteration-details",
    ),
    Family(
        "/metrics has every measurement",
        accepted="--[no-]kv-cache-metrics --kv-cache-metrics-sample --[no-]cudagraph-metrics --[no-]enable-mfu-metrics "
        "--[no-]enable-mm-processor-stats",
    ),
    Family("/metrics also has the older names", accepted="--show-hidden-metrics-for-version"),
    Family("the buckets of /metrics are fixed", refused="--custom-histogram-buckets"),
    Family(
        f"traces always have every span; see {called('otlp_traces_endpoint')}",
        accepted="--collect-detailed-traces+",
    ),
    Family(
        f"there is no profiler; see `pd-cluster trace` and {called('otlp_traces_endpoint')}",
        refused="--profiler-config --[no-]enable-layerwise-nvtx-tracing",
    ),
    Family(
        "VLLM_API_KEY is the only variable of vLLM that is read; a warning names those that have a flag here",
        accepted="--[no-]fail-on-environ-validation",
    ),
)


FOREIGN = table(FAMILIES)


def foreign(flag: str) -> tuple[FlagWithoutSetting, bool] | None:
    """Returns the FOREIGN entry of a flag, and whether the flag is its --no- form; None if unknown."""
    if flag.startswith(OFF) and (found := _positive(f"--{flag[len(OFF) :]}")) and found.takes is Takes.SWITCH:
        return found, True
    found = _positive(flag)
    return (found, False) if found is not None else None


def _positive(flag: str) -> FlagWithoutSetting | None:
    if flag in FOREIGN:
        return None if flag.endswith("*") else FOREIGN[flag]
    return next((each for each in FOREIGN.values() if each.is_prefix and flag.startswith(each.name[:-1])), None)
