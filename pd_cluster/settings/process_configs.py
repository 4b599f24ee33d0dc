"""Configurations of whole processes: parsed settings, as one frozen struct per process.

Imports no torch. The other modules of this folder define the settings' names and errors.
"""

from __future__ import annotations

import msgspec

from pd_cluster.process_messages import AdapterNames, Keys, PauseUpdate
from pd_cluster.settings.engine_config import EngineConfig, model_name
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.log_setup import Logs
from pd_cluster.settings.media_settings import MediaSettings
from pd_cluster.settings.process_settings import CoreSharing, HandoverSettings
from pd_cluster.settings.request_settings import ChatConfig, RequestSettings
from pd_cluster.settings.resume_settings import ResumeSettings
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Role
from pd_cluster.wire import KVOptions


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The rank of a process in its instance, and its connections to the other ranks.

    `store`: a file in a folder that the ranks share. `fds`: in rank 0 a socket to each follower, in order; in a
    follower the socket to rank 0.
    """

    rank: int = 0
    size: int = 1
    store: str = ""
    fds: tuple[int, ...] = ()


class UnitPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's rank among the instances that share experts. `name`: the name of their unit."""

    name: str
    rank: int
    size: int


class SharedCores(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one host share its cores. `first`: this instance's first rank.

    `ledger`: the file through which cores are lent, if `lending` is enabled. `binding`: whether each rank has its own
    cores.
    """

    ledger: str
    first: int
    num_ranks: int
    num_cores: int
    lending: CoreSharing
    binding: CoreSharing


class Credentials(msgspec.Struct, frozen=True):
    """The credentials of a process in its cluster. `schedulers`: public keys of the schedulers that it accepts.

    `key`: the scheduler's private key; empty for a worker, which generates its own. `table`: a digest of the global
    rank table that the process was started with. `node_key_file`, `trusted_nodes`: files, which are read again when
    they change; "": none.
    """

    secret: bytes
    schedulers: tuple[bytes, ...] = ()
    key: bytes = b""
    table: bytes = b""
    node_key_file: str = ""
    trusted_nodes: str = ""

    def __repr__(self) -> str:
        return "Credentials(…)"


class WorkerConfig(HandoverSettings, frozen=True, kw_only=True):
    """The configuration of one rank process, passed by the worker's parent as JSON over a socket, never on a command
    line.
    """

    name: str  # prefill-0, decode-1: the role and the index in the global table
    role: Role
    server_ip: str
    bind_address: str
    device_ids: list[str]
    epoch: int
    credentials: Credentials
    num_threads: int
    cores: SharedCores | None = None  # None: every step uses `num_threads`
    kv: KVOptions = KVOptions()
    engine: EngineConfig
    timeouts: Timeouts
    ranks: RankPlace = RankPlace()
    unit: UnitPlace | None = None  # None: the instance is not part of a unit
    # variables added to those of the parent; an empty value removes a variable
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    logs: Logs = Logs()


class ApiConfig(RequestSettings, frozen=True, kw_only=True):
    """How requests are read, routed and answered; the same in every API process."""

    engine: EngineConfig
    is_openai: bool
    timeouts: Timeouts
    routing: RoutingConfig
    chat: ChatConfig = ChatConfig()
    media: MediaSettings = MediaSettings()
    resume: ResumeSettings = ResumeSettings()
    http: HttpConfig = HttpConfig()

    @property
    def model_names(self) -> list[str]:
        """Returns the model's names for clients; answers contain the first one."""
        return self.served_model_names or [model_name(self.engine.model)]


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one of several API processes, passed by the scheduler as JSON over a socket, never on a
    command line.

    `listener_fd` is the process's socket at the public port, `admin_fd` a Unix socket for the scheduler's queries.
    `keys` are those of --api-key-file, `rates_fd` is the memory of their rate limits; without that file: None and -1.
    """

    index: int
    api: ApiConfig
    credentials: Credentials
    listener_fd: int
    admin_fd: int
    logs: Logs
    adapters: AdapterNames = AdapterNames({}, 0)
    pause: PauseUpdate = PauseUpdate()
    keys: Keys | None = None
    rates_fd: int = -1
