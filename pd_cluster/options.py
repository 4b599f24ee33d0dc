"""The flags of `pd-cluster serve`, as typed, and the settings that they become.

Knows nothing of rank tables and starts nothing. What only one role needs is read and checked when it asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pd_cluster.chat_template import ChatTemplate
from pd_cluster.checkpoint import SHIPPED_MODEL
from pd_cluster.cluster.credentials import KeyFiles
from pd_cluster.config import (
    KEY_VARIABLE,
    ChatConfig,
    ConnectionLimits,
    EngineConfig,
    HttpConfig,
    RoutingConfig,
    Timeouts,
    Tls,
)
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.parsers.reply import ReplyFormat

MOST_GUIDED_TIMEOUT_S = 60.0
SCHEDULING_POLICIES = ("fcfs", "priority")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # as browsers send it: no path, no slash at its end
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
HOST_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
HEADER_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Named as the parameters of `serve` in cli.py, which says what each is."""

    model: str
    host: str
    port: int
    served_model_name: list[str] | None
    tensor_parallel_size: int | None
    revision: str
    download_dir: str
    tokenizer: str
    tokenizer_revision: str
    skip_tokenizer_init: bool
    hf_overrides: str
    rope_scaling: str
    rope_theta: float | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    block_size: int | None
    seed: int | None
    max_logprobs: int
    generation_config: str
    override_generation_config: str
    require_model: bool
    device: str
    enforce_eager: bool
    max_seq_len_to_capture: int | None
    spawn: bool
    attention_backend: str
    try_unlisted: list[str] | None
    language_model_only: bool
    num_blocks: int | None
    kv_cache_memory: float | None
    gpu_memory_utilization: float | None
    enable_prefix_caching: bool
    preemption_mode: str
    swap_space: float
    growth_tokens: int
    kv_transport: str
    kv_port_range: str
    kv_checksum: bool
    kv_hmac: bool
    kv_wire_dtype: str
    kv_rate_limit: float
    link_keepalive: float
    secret_file: str | None
    scheduler_key_file: str | None
    derive_secret: bool
    admin_port: int | None
    admin_host: str
    admin_allowed_hosts: str
    admin_token_file: str | None
    auto_role: bool
    heartbeat_interval: float
    dead_after: float
    connect_timeout: float
    credit_timeout: float
    transfer_timeout: float
    collective_timeout: float
    step_timeout: float
    request_timeout: float
    drain_timeout: float
    max_connections: int
    max_connections_per_host: int
    max_attempts: int
    replay_wait: float
    guided_decoding_backend: str
    guided_timeout: float
    api_workers: int
    api_key: list[str] | None = field(default=None, repr=False)
    api_key_tenant: list[str] | None
    shared_prefix_cache: bool
    metrics_key: str = field(default="", repr=False)
    root_path: str
    allowed_origins: str | None
    allowed_methods: str
    allowed_headers: str
    allow_credentials: bool
    enable_request_id_headers: bool
    disable_fastapi_docs: bool
    ssl_certfile: str
    ssl_keyfile: str
    ssl_ca_certs: str
    ssl_cert_reqs: int
    chat_template: str
    trust_request_chat_template: bool
    allow_control_tokens: bool
    response_role: str
    tool_call_parser: str
    enable_auto_tool_choice: bool
    reasoning_parser: str
    enable_reasoning: bool
    return_tokens_as_token_ids: bool
    routing_policy: str
    scheduling_policy: str
    slo_ttft: float
    slo_tpot: float
    log_level: str

    def key_files(self) -> KeyFiles:
        return KeyFiles(self.secret_file, self.scheduler_key_file, self.admin_token_file, self.derive_secret)

    def engine(self) -> EngineConfig:
        return EngineConfig(
            model=self.model or str(SHIPPED_MODEL),
            revision=self.revision,
            download_dir=self.download_dir,
            tokenizer=self.tokenizer,
            tokenizer_revision=self.tokenizer_revision,
            skip_tokenizer_init=self.skip_tokenizer_init,
            hf_overrides=self._overrides(),
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_memory_gib=self.kv_cache_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            swap_space_gib=self.swap_space,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            growth_tokens=self.growth_tokens,
            device=self.device,
            enforce_eager=self.enforce_eager,
            attention_backend=self.attention_backend,
            max_seq_len_to_capture=self.max_seq_len_to_capture,
            try_unlisted=tuple(self.try_unlisted or ()),
            language_model_only=self.language_model_only,
            tensor_parallel_size=1 if self.tensor_parallel_size is None else self.tensor_parallel_size,
            seed=self.seed,
            generation_config=self.generation_config,
        )

    def _overrides(self) -> dict[str, Any]:
        """Of config.json, by all flags that have some. Raises ConfigError."""
        found = _object("--hf-overrides", self.hf_overrides)
        for flag, name, is_given in (
            ("--rope-scaling", "rope_scaling", self.rope_scaling not in ("", "{}")),
            ("--rope-theta", "rope_theta", self.rope_theta is not None),
        ):
            if is_given and name in found:
                raise ConfigError(f"{flag}: --hf-overrides has {name}, too; give one of the two")
        if rope := _object("--rope-scaling", self.rope_scaling):
            found["rope_scaling"] = rope
        if self.rope_theta is not None:
            if not 0 < self.rope_theta < float("inf"):
                raise ConfigError(f"--rope-theta {self.rope_theta:g}: must be above 0 and finite")
            found["rope_theta"] = self.rope_theta
        return found

    def routing(self) -> RoutingConfig:
        """Raises ConfigError."""
        from pd_cluster.cluster.policy import POLICIES

        for flag, value, known in (
            ("--routing-policy", self.routing_policy, tuple(POLICIES)),
            ("--scheduling-policy", self.scheduling_policy, SCHEDULING_POLICIES),
        ):
            if value not in known:
                raise ConfigError(f"{flag} {value!r}: expected {', '.join(known)}")
        return RoutingConfig(
            policy=self.routing_policy,
            has_priorities=self.scheduling_policy == "priority",
            max_attempts=self.max_attempts,
            slo_ttft_s=self.slo_ttft,
            slo_tpot_s=self.slo_tpot,
        )

    def timeouts(self) -> Timeouts:
        times = Timeouts(
            heartbeat_interval_s=self.heartbeat_interval,
            dead_after_s=self.dead_after,
            connect_timeout_s=self.connect_timeout,
            credit_timeout_s=self.credit_timeout,
            transfer_timeout_s=self.transfer_timeout,
            collective_timeout_s=self.collective_timeout,
            step_timeout_s=self.step_timeout,
            request_timeout_s=self.request_timeout,
            drain_timeout_s=self.drain_timeout,
            link_keepalive_s=self.link_keepalive,
            guided_timeout_s=self.guided_timeout,
            replay_wait_s=self.replay_wait,
        )
        for name in (
            "heartbeat_interval",
            "dead_after",
            "connect_timeout",
            "credit_timeout",
            "transfer_timeout",
            "collective_timeout",
            "link_keepalive",
            "guided_timeout",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0 and finite")
        for name in ("request_timeout", "drain_timeout", "replay_wait", "step_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative or infinite")
        if self.guided_timeout > MOST_GUIDED_TIMEOUT_S:
            raise ConfigError(f"--guided-timeout {self.guided_timeout:g}: must be at most {MOST_GUIDED_TIMEOUT_S:g}")
        if self.dead_after < 2 * self.heartbeat_interval:
            raise ConfigError(f"--dead-after {self.dead_after}: must be at least two heartbeat intervals")
        return times

    def http(self, env: Mapping[str, str]) -> HttpConfig:
        """VLLM_API_KEY counts where no key is given. Raises ConfigError, which never has a key in it."""
        variable = [env[KEY_VARIABLE]] if KEY_VARIABLE in env else []
        source, keys = ("--api-key", self.api_key) if self.api_key else (KEY_VARIABLE, variable)
        _check_keys(source, keys)
        tenant_of = _tenants(source, keys, self.api_key_tenant or ())
        origins = self.allowed_origins
        if origins is None:
            origins = "[]" if tenant_of else '["*"]'
        if self.metrics_key:
            _check_keys("--metrics-key", [self.metrics_key])
        if self.metrics_key in tenant_of:
            raise ConfigError("--metrics-key: is one of the API keys, too; give another, which opens /metrics only")
        return HttpConfig(
            api_keys=tuple(tenant_of),
            tenants=tuple(tenant_of.values()) if self.api_key_tenant else (),
            shares_prefix_cache=self.shared_prefix_cache,
            metrics_key=self.metrics_key,
            root_path=_checked_root_path(self.root_path),
            allowed_origins=_strings("--allowed-origins", origins),
            allowed_methods=_strings("--allowed-methods", self.allowed_methods),
            allowed_headers=_strings("--allowed-headers", self.allowed_headers),
            allow_credentials=self.allow_credentials,
            returns_request_ids=self.enable_request_id_headers,
            has_docs=not self.disable_fastapi_docs,
            connections=self.connections(),
            tls=self.tls(),
        )

    def tls(self) -> Tls | None:
        """The files are read by whoever serves. Raises ConfigError."""
        certfile, keyfile, ca_certs, cert_reqs = (
            self.ssl_certfile,
            self.ssl_keyfile,
            self.ssl_ca_certs,
            self.ssl_cert_reqs,
        )
        if not certfile:
            for flag, value in (("keyfile", keyfile), ("ca-certs", ca_certs), ("cert-reqs", cert_reqs)):
                if value:
                    raise ConfigError(f"--ssl-{flag} {value}: needs --ssl-certfile FILE, the server's certificate")
            return None
        if cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs {cert_reqs}: expected 0, 1 or 2")
        if cert_reqs and not ca_certs:
            raise ConfigError(f"--ssl-cert-reqs {cert_reqs}: needs --ssl-ca-certs FILE, who signs for clients")
        return Tls(certfile=certfile, keyfile=keyfile, ca_certs=ca_certs, cert_reqs=cert_reqs)

    def connections(self) -> ConnectionLimits:
        """Raises ConfigError."""
        if self.max_connections < 1:
            raise ConfigError(f"--max-connections {self.max_connections}: must be at least 1")
        if self.max_connections_per_host < 0:
            raise ConfigError(f"--max-connections-per-host {self.max_connections_per_host}: give 0 for no such limit")
        return ConnectionLimits(total=self.max_connections, per_host=self.max_connections_per_host)

    def admin_hosts(self) -> frozenset[str]:
        """Beside those that every admin port answers to. Raises ConfigError."""
        names = [name.strip().lower() for name in self.admin_allowed_hosts.split(",") if name.strip()]
        for name in names:
            if not HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"--admin-allowed-hosts {name!r}: expected names without a port, such as pd.example,10.0.0.5"
                )
        return frozenset(names)

    def chat(self) -> ChatConfig:
        """Reads the chat template. Raises ConfigError."""
        for flag, is_on, needed, parser in (
            ("--enable-auto-tool-choice", self.enable_auto_tool_choice, "--tool-call-parser", self.tool_call_parser),
            ("--enable-reasoning", self.enable_reasoning, "--reasoning-parser", self.reasoning_parser),
        ):
            if is_on and not parser:
                raise ConfigError(f"{flag}: needs {needed} NAME, which says what the model's answers look like")
        ReplyFormat(self.tool_call_parser, self.reasoning_parser)  # raises for names that are not known
        if not self.response_role.strip():
            raise ConfigError("--response-role '': must not be empty; leave it out for assistant")
        return ChatConfig(
            template=template_given(self.chat_template) if self.chat_template else "",
            trusts_request_templates=self.trust_request_chat_template,
            tool_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            response_role=self.response_role,
            allows_control_tokens=self.allow_control_tokens,
        )


def _check_keys(source: str, keys: Sequence[str]) -> None:
    """Raises ConfigError for keys that no client could send, or that anybody could guess; it does not show them."""
    for at, key in enumerate(keys, 1):
        place = f"{source}, key {at} of {len(keys)}" if len(keys) > 1 else source
        if not key:
            raise ConfigError(f"{place}: empty; give a key, or leave it out to serve everybody")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{place}: keys have printable ASCII characters only, and no spaces")


def _tenants(source: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Each key and its tenant's name, "" without names. Raises ConfigError, which never has a key in it."""
    if not names:
        return dict.fromkeys(keys, "")
    if len(names) != len(keys):
        raise ConfigError(
            f"--api-key-tenant: {len(names)} for {len(keys)} of {source}; give a name for each key, in their order"
        )
    found: dict[str, str] = {}
    for at, (key, name) in enumerate(zip(keys, names, strict=True), 1):
        if not TENANT.fullmatch(name):
            raise ConfigError(f"--api-key-tenant {name!r}: expected 1 to 64 letters, digits and . _ -")
        if found.setdefault(key, name) != name:
            raise ConfigError(
                f"--api-key-tenant {name!r}: key {at} of {source} is {found[key]!r}'s already; give each tenant its own"
            )
    return found


def _checked_root_path(path: str) -> str:
    root = path.rstrip("/")
    if root and not ROOT_PATH.fullmatch(root):
        raise ConfigError(f"--root-path {path!r}: expected a path such as /api, of letters, digits and . _ ~ -")
    return root


def _strings(flag: str, text: str) -> tuple[str, ...]:
    """`["*"]`, as JSON. Raises ConfigError."""
    try:
        found = msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.DecodeError:
        raise ConfigError(f"""{flag} {text!r}: expected a JSON list of strings, such as '["*"]'""") from None
    wanted, example = (ORIGIN, "https://example.com") if flag == "--allowed-origins" else (HEADER_TOKEN, "x-session-id")
    for each in found:
        if not wanted.fullmatch(each):
            raise ConfigError(f"""{flag} {each!r}: expected "*", or what looks like {example}""")
    return found


def _object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        raise ConfigError(f"""{flag} {text!r}: expected a JSON object, such as '{{"rope_theta": 10000}}'""") from None


def template_given(given: str) -> str:
    """The template that --chat-template names. Raises ConfigError, also for one that does not compile."""
    source = _template_source(given)
    try:
        ChatTemplate(source)
    except ModelError as error:
        raise ConfigError(f"--chat-template: {error}") from None
    return source


def _template_source(given: str) -> str:
    r"""A file's content, or the template itself; one on a single line may say \n for a new one. Raises ConfigError."""
    if not set(given) & set("{}\n"):
        try:
            return Path(given).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat-template {given}: cannot be read: {error}") from None
    if "\n" in given:
        return given
    try:
        return given.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template: the template on one line has a wrong escape: {error}") from None
