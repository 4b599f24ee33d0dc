"""Configuration, parsed once into frozen structs that every process gets handed.

Knows nothing of torch. What a flag is called and how it is refused is in flags.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from pd_cluster.errors import ConfigError
from pd_cluster.types import Role
from pd_cluster.wire import KVOptions, TransportName

KVTransportChoice = Literal["auto", "ipc", "shm", "dist"]
MAX_BLOCK_SIZE = 4096  # tokens
MAX_TP_SIZE = 256
PREEMPTION_MODES = ("recompute", "swap")
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer", "sdpa")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float", "half")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Every deadline of docs/protocol.md, in seconds."""

    heartbeat_interval_s: float = 0.5
    dead_after_s: float = 3.0
    connect_timeout_s: float = 5.0
    credit_timeout_s: float = 10.0
    transfer_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    link_keepalive_s: float = 30.0
    collective_timeout_s: float = 60.0
    step_timeout_s: float = 600.0
    guided_timeout_s: float = 4.0
    replay_wait_s: float = 30.0


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the scheduler chooses, and what it promises; 0: no promise."""

    policy: str = "prefix-aware"
    has_priorities: bool = False
    max_attempts: int = 6  # of a request, after the first
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0

    def __post_init__(self) -> None:
        for flag, value in (("--slo-ttft", self.slo_ttft_s), ("--slo-tpot", self.slo_tpot_s)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{flag} {value:g}: must be a number of seconds, 0 for no promise")


class PortRange(msgspec.Struct, frozen=True):
    """Ports [first, last] to bind one of; 0-0 lets the system choose."""

    first: int = 0
    last: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last else "any"

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """`7000-7010`, `7000` or empty. Raises ConfigError."""
        if not text:
            return cls()
        first, _, last = text.partition("-")
        try:
            ports = cls(int(first), int(last or first))
        except ValueError:
            raise ConfigError(f"--kv-port-range {text!r}: expected FIRST-LAST, such as 7000-7010") from None
        if not 0 < ports.first <= ports.last < 65536:
            raise ConfigError(f"--kv-port-range {text!r}: ports must be in 1-65535, the first not above the last")
        return ports


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine needs to know. None means: found out when the model is loaded."""

    model: str
    revision: str = ""  # of a hub's model
    download_dir: str = ""  # where hub's models are kept; "": in the hub's own cache
    tokenizer: str = ""  # a folder or a hub's model; "": the model's own
    tokenizer_revision: str = ""
    skip_tokenizer_init: bool = False  # the model's folder need not have one; then there are only token ids
    hf_overrides: dict[str, Any] = {}  # in place of config.json's values
    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None  # tokens
    num_blocks: int | None = None
    kv_cache_memory_gib: float | None = None
    gpu_memory_utilization: float | None = None  # share of the device's memory for weights and KV pool together
    enable_prefix_caching: bool = True
    preemption_mode: str = "recompute"
    swap_space_gib: float = 4.0  # host memory for preempted requests, in mode "swap"
    num_local_ranks: int = 1  # that share this host's memory
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    growth_tokens: int = 128  # decode reserves room for that many output tokens when it credits a transfer
    device: str = "auto"
    enforce_eager: bool = False  # no graphs, where the device has them
    attention_backend: str = "auto"
    max_seq_len_to_capture: int | None = None  # tokens; longer contexts run without graphs
    tensor_parallel_size: int = 1
    try_unlisted: tuple[str, ...] = ()  # types that are served though no test compares them with transformers
    language_model_only: bool = False  # of a multimodal folder
    seed: int | None = None  # of the scheduler: requests without a seed get theirs from it
    generation_config: str = "auto"  # auto, vllm or a folder: where answers end, and how requests sample by default

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.block_size is not None and self.block_size > MAX_BLOCK_SIZE:
            raise ConfigError(f"--block-size {self.block_size}: must be at most {MAX_BLOCK_SIZE} tokens")
        for name in ("block_size", "max_model_len", "num_blocks", "max_seq_len_to_capture"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.attention_backend not in ATTENTION_BACKENDS:
            expected = ", ".join(ATTENTION_BACKENDS)
            raise ConfigError(f"--attention-backend {self.attention_backend!r}: expected one of {expected}")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ConfigError(f"--preemption-mode {self.preemption_mode!r}: expected {' or '.join(PREEMPTION_MODES)}")
        for flag, number, most in (
            ("--swap-space", self.swap_space_gib, float("inf")),
            ("--kv-cache-memory", self.kv_cache_memory_gib or 0.0, float("inf")),
            ("--gpu-memory-utilization", self.gpu_memory_utilization or 0.0, 1.0),
        ):
            if not 0 <= number <= most or number == float("inf"):
                raise ConfigError(f"{flag} {number:g}: must be {'in 0 to 1' if most == 1 else 'a number of GiB'}")
        if self.preemption_mode == "swap" and not self.swap_space_gib:
            raise ConfigError("--preemption-mode swap: needs room to swap to; give --swap-space GIB")
        if self.tensor_parallel_size > MAX_TP_SIZE:
            raise ConfigError(f"--tensor-parallel-size {self.tensor_parallel_size}: must be at most {MAX_TP_SIZE}")


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of its instance a process is, and how it meets the others.

    `store`: a file in a folder of their own. `fds`: rank 0 has a socket to each follower, in order, and a follower one
    to rank 0.
    """

    rank: int = 0
    size: int = 1
    store: str = ""
    fds: tuple[int, ...] = ()


class Credentials(msgspec.Struct, frozen=True):
    """What makes this process one of its cluster. `schedulers`: the public keys that it takes for a scheduler's.

    `key`: the scheduler's private key; a worker has none here, because it draws its own. `table`: a digest of the
    global rank table that it was started with.
    """

    secret: bytes
    schedulers: tuple[bytes, ...] = ()
    key: bytes = b""
    table: bytes = b""

    def __repr__(self) -> str:
        return "Credentials(…)"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rank process: handed over by the worker's parent as JSON on a socket, never on a command line."""

    name: str  # prefill-0, decode-1: role and place in the global table
    role: Role
    server_ip: str
    bind_address: str
    device_ids: list[str]
    epoch: int
    credentials: Credentials
    num_threads: int
    kv_transport: KVTransportChoice
    kv_port_range: PortRange
    kv: KVOptions = KVOptions()
    kv_rate_limit_bytes_per_s: float = 0.0  # of each link; 0: none
    engine: EngineConfig
    timeouts: Timeouts
    ranks: RankPlace = RankPlace()
    environment: dict[str, str] = {}  # of the process beside its parent's; an empty value takes the variable away
    log_level: str = "INFO"

    @property
    def transports(self) -> tuple[TransportName, ...]:
        """In order of preference. Which of them a worker has is its device's matter (transport/factory.py)."""
        if self.kv_transport == "auto":
            return ("local", "ipc", "shm", "nccl", "hccl", "dist")
        return ("nccl", "hccl", "dist") if self.kv_transport == "dist" else (self.kv_transport,)


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a chat becomes a prompt, and what a model writes becomes a message.

    `template`: a source that takes the place of the model folder's; "" for that one. The parsers' names are those of
    parsers/reply.py; without a name answers are not searched for calls or reasoning. `allows_control_tokens`: what
    looks like a control token in a message is one.
    """

    template: str = ""
    trusts_request_templates: bool = False  # a request may bring its own
    tool_parser: str = ""
    reasoning_parser: str = ""
    response_role: str = "assistant"
    allows_control_tokens: bool = False


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Connections with requests at one port of one process. `per_host` counts an address's; 0: no limit.

    `spare` more may be there without a request, or with a probe's. `num_kept_descriptors` are for others than the
    clients of this port: instances, children, and the admin port, which may have taken low numbers before.
    """

    total: int = 8192
    per_host: int = 6144
    spare: int = 64
    num_kept_descriptors: int = 40  # 24 are the admin port's

    def share(self, num_processes: int) -> ConnectionLimits:
        """Of one of several processes at one port, so that together they hold the whole."""
        per_host = max(1, self.per_host // num_processes) if self.per_host else 0
        return msgspec.structs.replace(self, total=max(1, self.total // num_processes), per_host=per_host)


class Tls(msgspec.Struct, frozen=True):
    """Files in PEM. `keyfile` is "" where the certificate's file has the key, too.

    `cert_reqs`: whether clients show a certificate of `ca_certs`: 0 no, 1 those that want to, 2 all.
    """

    certfile: str
    keyfile: str = ""
    ca_certs: str = ""
    cert_reqs: int = 0


ADMIN_CONNECTIONS = ConnectionLimits(total=16, per_host=0, spare=8, num_kept_descriptors=16)
KEY_VARIABLE = "VLLM_API_KEY"
KEYS_VARIABLE = "PD_CLUSTER_SERVE_API_KEY"  # --api-key's, as typer calls it: everybody can read a command line
METRICS_KEY_VARIABLE = "PD_CLUSTER_SERVE_METRICS_KEY"
SECRET_VARIABLES = (KEY_VARIABLE, KEYS_VARIABLE, METRICS_KEY_VARIABLE)


def without_keys(env: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that check no keys: all but those that serve the public port."""
    return {name: value for name, value in env.items() if name not in SECRET_VARIABLES}


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is in front of the API's routes. `root_path`: what a proxy cuts off of every path.

    `tenants`: a name for each of the keys, or none: then each key is a tenant of its own. `shares_prefix_cache`:
    tenants find each other's cached prompts. `metrics_key` opens /metrics and nothing else; where there are only
    `api_keys`, /metrics is closed to everybody. `returns_request_ids`: every answer has x-request-id. `has_docs`: /docs
    and /openapi.json.
    """

    api_keys: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    shares_prefix_cache: bool = False
    metrics_key: str = ""
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    returns_request_ids: bool = False
    has_docs: bool = True
    connections: ConnectionLimits = ConnectionLimits()
    tls: Tls | None = None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are read, routed and answered; the same in every API process."""

    engine: EngineConfig
    served_model_names: list[str]
    is_openai: bool
    timeouts: Timeouts
    routing: RoutingConfig
    max_logprobs: int
    returns_tokens_as_token_ids: bool = False  # where a request does not say
    sampling_override: dict[str, int | float | None] = {}  # over the defaults that engine.generation_config names
    requires_model: bool = False  # a request without a model is refused
    chat: ChatConfig = ChatConfig()
    http: HttpConfig = HttpConfig()


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One API process of several: handed over by the scheduler as JSON on a socket, never on a command line.

    `listener_fd` is its own socket at the public port, `admin_fd` a Unix one for the scheduler's questions.
    """

    index: int
    api: ApiConfig
    credentials: Credentials
    listener_fd: int
    admin_fd: int
    log_level: str
