"""Messages between `benchmarks kv` and its two child processes. Each command has one answer.

Knows nothing of goals or figures; imports no torch.
"""

from __future__ import annotations

import msgspec

from pd_cluster.engine.link_probe.probe_messages import BLOCK_NBYTES, BeginProbes
from pd_cluster.types import Role
from pd_cluster.wire import KVOptions, TransportName

HOST = "127.0.0.1"
NAMES: dict[Role, str] = {"prefill": "prefill-0", "decode": "decode-0"}
RUN_BLOCKS = 8  # number of a request's blocks that are consecutive in the pool


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One link with its own transport and options. The receiver opens it, and the sender gets its port and epoch."""

    transport: TransportName
    checked: bool  # checksum and HMAC
    secret: bytes = b""
    port: int = 0
    epoch: int = 0

    @property
    def name(self) -> str:
        return f"{self.transport} {'on' if self.checked else 'off'}"

    @property
    def options(self) -> KVOptions:
        return KVOptions(checksum=self.checked, hmac=self.checked)

    def begin(self, role: Role) -> BeginProbes:
        return BeginProbes(
            name=NAMES[role],
            role=role,
            rank=0,
            device="cpu",
            device_ids=["0"],
            host=HOST,
            kv_transport=self.transport,
            seed=0,
        )


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """`count` transfers of `num_blocks` blocks each, of which up to `num_under_way` are in progress at a time."""

    num_blocks: int
    count: int
    num_under_way: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.count * BLOCK_NBYTES


class MakePool(msgspec.Struct, frozen=True, tag="make_pool"):
    """`device`: as in --device. For pools on a device there is no second mapping to copy from."""

    num_blocks: int
    device: str = "cpu"


class OpenLane(msgspec.Struct, frozen=True, tag="open_lane"):
    lane: Lane


class Handover(msgspec.Struct, frozen=True, tag="handover"):
    """For the sender: makes the move over this lane. Returns times of shipments and confirmations, and last blocks."""

    lane: str
    move: Move


class LastTransfer(msgspec.Struct, frozen=True, tag="last_transfer"):
    """For the receiver: returns the numbers that it found in the last transfer's blocks."""

    lane: str


class Memcpy(msgspec.Struct, frozen=True, tag="memcpy"):
    """For the receiver: copies the move's bytes from another mapping to its pool, block by block, on one thread."""

    move: Move


class OpenGloo(msgspec.Struct, frozen=True, tag="open_gloo"):
    """First for the sender with `port` 0: it hosts the rendezvous, and answers with its port. Then for both at once,
    with that port.
    """

    port: int = 0


class Gloo(msgspec.Struct, frozen=True, tag="gloo"):
    """For both at the same time: plain send and recv of payloads, two in flight."""

    nbytes: int
    payload_nbytes: int


Command = MakePool | OpenLane | Handover | LastTransfer | Memcpy | OpenGloo | Gloo


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`took_s`: the measured time. `error`: the child's error message, if it failed."""

    took_s: float = 0.0
    port: int = 0
    epoch: int = 0
    ships_s: list[float] = []
    confirms_s: list[float] = []
    blocks: list[int] = []
    error: str = ""
