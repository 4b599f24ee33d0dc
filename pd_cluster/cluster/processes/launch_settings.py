"""Describes a whole cluster on one host."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from pd_cluster import extra_table
from pd_cluster.engine.start.preloader import forks_are_safe
from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.engine_config import SHIPPED_MODEL, model_name
from pd_cluster.settings.setting import variable_of

SPAWN = "--spawn"  # a flag of `pd-cluster serve`
# The same value as in scripts/start_servers.sh and the Helm chart.
LASTING_STREAMS = MappingProxyType({variable_of("resume_window"): "30", variable_of("resume_scheduler_only"): "1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A cluster to start. `arguments` are flags of `pd-cluster serve` for every instance.

    `in_effect` also has the flags of the --config file that they name. These must not appear on a command line, because
    the file may contain secrets. `model`: "" for the shipped model.
    """

    model: str = ""
    num_prefill: int = 1
    num_decode: int = 1
    num_encode: int = 0
    num_hybrid: int = 0  # instances of both roles; then there are no prefill and decode instances
    num_schedulers: int = 1
    tp_sizes: Mapping[str, int] = field(default_factory=dict)  # role or instance -> rank processes; 1 if absent
    unit_sizes: Mapping[str, int] = field(default_factory=dict)  # role -> instances that share experts; 1 if absent
    host: str = "127.0.0.1"
    port: int = 9000
    served_model_names: list[str] = field(default_factory=list)
    restart: str = "on-failure"
    arguments: list[str] = field(default_factory=list)
    in_effect: list[str] = field(default_factory=list, repr=False)
    openai: bool = True
    api_keys: list[str] = field(default_factory=list, repr=False)
    metrics_key: str = field(default="", repr=False)
    scheduler_variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_hybrid and (self.num_prefill or self.num_decode or self.num_encode or self.num_schedulers > 1):
            raise ConfigError(
                f"{self.num_hybrid} hybrid instances cannot be combined with other instances or several schedulers"
            )
        if self.num_hybrid and max(self.unit_sizes.values(), default=1) > 1:
            name = called("data_parallel_size")
            raise ConfigError(
                f"{name} {max(self.unit_sizes.values())}: hybrid instances have all experts; leave it out"
            )
        for role, number in (("prefill", self.num_prefill), ("decode", self.num_decode)):
            if number % (size := self.unit_sizes.get(role, 1)):
                name = called("data_parallel_size")
                raise ConfigError(f"{called(role)} {number}: expected a multiple of {size}, the {name} of {role}")

    @property
    def model_folder(self) -> str:
        """The model's folder or name, as each instance receives it."""
        return self.model or str(SHIPPED_MODEL)

    @property
    def has_chat_template(self) -> bool:
        """Whether a flag or the model's folder gives a chat template; without one, only completions are served."""
        folder = Path(self.model_folder)
        given = self._value_of("--chat-template") or any(folder.glob("chat_template.*"))
        file = folder / "tokenizer_config.json"
        return bool(given) or (file.exists() and '"chat_template"' in file.read_text("utf-8", errors="replace"))

    @property
    def remark(self) -> str:
        """Returns a remark that the default model is used; "" if a model was given."""
        return (
            "" if self.model else f" no --model: {SHIPPED_MODEL.name}, the small model that is shipped with the project"
        )

    @property
    def worker_names(self) -> list[str]:
        """Names in the order of the rank table."""
        numbers = {"prefill": self.num_prefill, "decode": self.num_decode, "hybrid": self.num_hybrid}
        return [f"{role}-{i}" for role, number in numbers.items() for i in range(number)]

    @property
    def instances(self) -> str:
        """Describes the number of instances, for people."""
        if self.num_hybrid:
            return f"{self.num_hybrid} hybrid"
        return f"{self.num_prefill} prefill, {self.num_decode} decode"

    @property
    def encoder_names(self) -> list[str]:
        """Names of the encoders, which are in no rank table."""
        return [f"encode-{i}" for i in range(self.num_encode)]

    @property
    def scheduler_names(self) -> list[str]:
        several = [f"scheduler-{i}" for i in range(self.num_schedulers)]
        return several if self.num_schedulers > 1 else ["scheduler"]

    def port_of(self, index: int) -> int:
        """Returns the public port of this scheduler; its admin port is the next higher one."""
        return self.port + 2 * index

    @property
    def num_ranks(self) -> int:
        return sum(map(self.tp_size_of, self.worker_names))

    def tp_size_of(self, name: str) -> int:
        """Returns the number of rank processes of an instance."""
        return self.tp_sizes.get(name) or self.tp_sizes.get(role_of(name), 1)

    @property
    def forks(self) -> bool:
        """Whether the flags let rank processes be forked."""
        return SPAWN not in self.arguments and forks_are_safe(self._value_of("--device") or "auto")

    def _value_of(self, wanted: str) -> str:
        """Returns a flag's value among the arguments; "" if absent."""
        found, flags = "", self.in_effect or self.arguments
        for flag, following in itertools.zip_longest(flags, flags[1:], fillvalue=""):
            name, equals, value = flag.partition("=")
            if name == wanted:
                found = value if equals else following
        return found

    def with_lasting_streams(self, env: Mapping[str, str]) -> Launch:
        """Returns this launch, changed so that streams survive the loss of their scheduler, unless its flags or `env`
        configure this or the installation lacks the extra.
        """
        says_so = self._value_of("--resume-window") or variable_of("resume_window") in env
        can_last = self.openai and extra_table.is_installed(extra_table.STREAM_RESUMPTION)
        return self if says_so or not can_last else replace(self, scheduler_variables=LASTING_STREAMS)

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys or self.key_file or self._value_of("--api-key"))

    @property
    def key_file(self) -> str:
        """The file of further API keys, or ""."""
        return self._value_of("--api-key-file")

    @property
    def admin_port(self) -> str:
        """The admin port among the arguments, or ""."""
        return self._value_of("--admin-port")

    @property
    def uds(self) -> str:
        """The path of the Unix socket that replaces the public port, or ""."""
        return self._value_of("--uds")

    @property
    def join_port(self) -> str:
        """The port among the arguments at which workers may register, or ""."""
        return self._value_of("--join-port")

    @property
    def lease_flag(self) -> str:
        """A flag among the arguments that only the launch itself may set, or ""."""
        flags = "--scheduler-lease", "--scheduler-index"
        return next((flag for flag in flags if self._value_of(flag)), "")

    @property
    def scheme(self) -> str:
        """The URL scheme. Raises ConfigError if the scheduler's readiness cannot be queried."""
        if self._value_of("--ssl-cert-reqs") == "2":
            raise ConfigError(
                "--ssl-cert-reqs 2: `up` has no client certificate to query its scheduler; start each instance with "
                "`pd-cluster serve`, or give 1"
            )
        return "https" if self._value_of("--ssl-certfile") else "http"

    @property
    def model_name(self) -> str:
        """Returns the name that clients use for the model."""
        return next(iter(self.served_model_names), model_name(self.model or str(SHIPPED_MODEL)))

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def urls(self) -> list[str]:
        """The public URL of each scheduler."""
        return [self.url.removesuffix(str(self.port)) + str(self.port_of(i)) for i in range(self.num_schedulers)]

    @property
    def admin_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.admin_port or self.port + 1}"


def role_of(name: str) -> str:
    """Returns the role of an instance of a launch."""
    return name.partition("-")[0]


def by_role(both: int, prefill: int | None = None, decode: int | None = None) -> dict[str, int]:
    """Returns role -> size: the role's own size if given, otherwise the common one."""
    return {"prefill": prefill or both, "decode": decode or both, "hybrid": both}
