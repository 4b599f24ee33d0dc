"""Lists the transports for KV cache in decode instances' order of preference. Needs no torch.

A transport is a row of this table and a module of this package, which is imported on first use. transport_interface.py
defines the interface of such modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.devices.device import KINDS, Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.wire import TransportName, TransportOffer

if TYPE_CHECKING:
    from pd_cluster.transport.transport_interface import Ends, Implementation, LinkContext

AUTO = "auto"  # the --kv-transport that allows all transports without an extra
MEMORY_NBYTES_PER_S = 4e9
GLOO_NBYTES_PER_S = 1e9  # docs/benchmarks.md, rounded down
CURVE_NBYTES_PER_S = 2.5e8  # the rate at which one core encrypts


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport. `help` and `title` describe its choice to users.

    `package`: a module that the transport needs, from the extra with the name of the choice; such a transport is used
    only if --kv-transport names it. `needs_trust`: the transport is used between hosts only with --trust-network,
    because its payloads are checked but not encrypted.
    """

    name: TransportName
    module: str
    choice: str  # the --kv-transport, besides auto, that allows it; "": no value names it
    pools: tuple[DeviceKind, ...]  # the kinds of devices whose memory it moves
    is_same_host: bool
    nbytes_per_s: float = MEMORY_NBYTES_PER_S  # the rate that routing assumes
    help: str = ""
    title: str = ""
    package: str = ""
    needs_trust: bool = False

    @property
    def is_pair(self) -> bool:
        """Whether each lane has a process group of two ranks, whose setup takes memory and time."""
        return self.module == "dist"

    def why_not(self, own: Device, peer: TransportOffer | None = None) -> str:
        """Returns why a pool on this device cannot use the transport, or cannot use what P offers; "" if it can."""
        return self._implementation().why_not(self.name, own, peer)

    def ends(self, place: LinkContext) -> Ends:
        """Creates the object that makes both ends for this context."""
        return self._implementation().ends(self.name, place)

    def _implementation(self) -> Implementation:
        found: Implementation = importlib.import_module(f"pd_cluster.transport.{self.module}")
        return found


TABLE = (
    Transport("local", "in_process", "", KINDS, is_same_host=True),
    Transport("ipc", "ipc", "ipc", ("cuda", "npu"), is_same_host=True, help="GPUs or NPUs of one host"),
    Transport("shm", "shm", "shm", ("cpu",), is_same_host=True, help="same host", title="shared memory of this host"),
    Transport("nccl", "dist", "dist", ("cuda",), is_same_host=False),
    Transport("hccl", "dist", "dist", ("npu",), is_same_host=False),
    Transport(
        "dist",
        "dist",
        "dist",
        KINDS,
        is_same_host=False,
        nbytes_per_s=GLOO_NBYTES_PER_S,
        help="NCCL, HCCL or gloo",
        title="torch.distributed",
        needs_trust=True,
    ),
    Transport(
        "curve",
        "dist",
        "curve",
        KINDS,
        is_same_host=False,
        nbytes_per_s=CURVE_NBYTES_PER_S,
        help="encrypted, between any hosts",
        title="encrypted over ZeroMQ",
    ),
    Transport(
        "nixl",
        "nixl",
        "nixl",
        KINDS,
        is_same_host=False,
        nbytes_per_s=GLOO_NBYTES_PER_S,
        help="UCX, needs the extra nixl",
        title="NIXL over UCX",
        package="nixl_cu13",
    ),
)
BY_NAME = {each.name: each for each in TABLE}
CHOICES = (AUTO, *dict.fromkeys(each.choice for each in TABLE if each.choice))


def allowed(choice: str) -> tuple[Transport, ...]:
    """Returns the transports that a --kv-transport allows, in order of preference."""
    if choice == AUTO:
        return tuple(each for each in TABLE if not each.package)
    return tuple(each for each in TABLE if choice in (each.choice, each.name))


def choices_for(kind: str, with_extras: bool = False) -> tuple[str, ...]:
    """Returns the choices, without auto, that can serve pools on devices of this kind."""
    serving = (each for each in TABLE if kind in each.pools and (with_extras or not each.package))
    return tuple(dict.fromkeys(each.choice for each in serving if each.choice))


def same_host_choice(kind: str) -> str:
    """Returns the choice for two processes of one host whose pools are on devices of this kind."""
    return next(each.choice for each in TABLE if each.choice and each.is_same_host and kind in each.pools)


def slowest_nbytes_per_s(names: Iterable[TransportName]) -> float:
    """Returns the rate that routing assumes for a link over these transports; the rate of memory if there are none."""
    return min((BY_NAME[name].nbytes_per_s for name in names if name in BY_NAME), default=MEMORY_NBYTES_PER_S)


def are_pairs(names: Iterable[TransportName]) -> bool:
    """Whether one of these transports needs a pair."""
    return any(BY_NAME[name].is_pair for name in names if name in BY_NAME)


def needs_trusted_network(name: TransportName) -> bool:
    """Whether this transport is used between hosts only if the network is trusted."""
    return name in BY_NAME and BY_NAME[name].needs_trust


def help_text() -> str:
    """Describes the values of --kv-transport."""
    *first, last = [f"{each.choice} ({each.help})" for each in TABLE if each.help]
    return f"{AUTO}, {', '.join(first)} or {last}."
