"""What `bench kv` and its two children tell each other: one JSON line a command, one an answer.

Knows nothing of goals or figures; imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pd_cluster.types import Role
from pd_cluster.wire import TransportName

# A block of a model of 32 layers with 4 KV heads (Yi-6B's shape) in float16 is 1 MiB; 4,096 tokens are 256 MiB.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 4, 128, 16
BLOCK_NBYTES = 1 << 20
RUN_BLOCKS = 8  # blocks of a request that follow each other in the pool


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One link with its own transport and options. The receiver opens it first; its port and epoch go to the sender."""

    transport: TransportName
    checked: bool  # checksum and HMAC
    secret: bytes = b""
    port: int = 0
    epoch: int = 0

    @property
    def name(self) -> str:
        return f"{self.transport} {'on' if self.checked else 'off'}"

    def key_of(self, role: Role) -> bytes:
        """The private key of one end: both know both."""
        return hashlib.sha256(self.secret + role.encode()).digest()


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """`count` transfers of `num_blocks` blocks each, up to `num_under_way` at a time."""

    num_blocks: int
    count: int
    num_under_way: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.count * BLOCK_NBYTES


class MakePool(msgspec.Struct, frozen=True, tag=True):
    """`device`: as of --device. Pools on a device have nothing beside them that could be copied from."""

    num_blocks: int
    device: str = "cpu"


class OpenLane(msgspec.Struct, frozen=True, tag=True):
    lane: Lane


class Handover(msgspec.Struct, frozen=True, tag=True):
    """Sender: moves over this lane; `times` are of ships and of confirmations, one each a transfer."""

    lane: str
    move: Move


class LastTransfer(msgspec.Struct, frozen=True, tag=True):
    """The block numbers that the last transfer's blocks stand for: read from them by the receiver. Also its landings.

    The receiver forgets what it knew.
    """

    lane: str


class Memcpy(msgspec.Struct, frozen=True, tag=True):
    """Receiver: copies as much from another mapping to its pool, blocks of the same sizes, one thread."""

    move: Move


class OpenGloo(msgspec.Struct, frozen=True, tag=True):
    """Both at once: `port` 0 hosts the rendezvous and answers when it is there; then again with the port."""

    port: int = 0


class Gloo(msgspec.Struct, frozen=True, tag=True):
    """Both at once: plain send and recv of payloads, two under way."""

    nbytes: int
    payload_nbytes: int


Command = MakePool | OpenLane | Handover | LastTransfer | Memcpy | OpenGloo | Gloo


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`took_s` of what was measured. `error`: the child's own words when it could not."""

    took_s: float = 0.0
    port: int = 0
    epoch: int = 0
    ships_s: list[float] = []
    confirms_s: list[float] = []
    landings_s: list[float] = []
    blocks: list[int] = []
    error: str = ""


def serve_commands(handlers: Mapping[type, Callable[[Any], Answer]]) -> None:
    """The whole of a child: commands on stdin, answers on stdout, until stdin ends. Others' prints go to stderr."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    decoder = msgspec.json.Decoder(Command)
    for line in sys.stdin.buffer:
        command = decoder.decode(line)
        try:
            answer = handlers[type(command)](command)
        except Exception as error:
            answer = Answer(error=f"{type(command).__name__}: {error or type(error).__name__}")
        answers.write(msgspec.json.encode(answer) + b"\n")
    os._exit(0)  # threads of links and sockets are of no more interest
