"""Messages between the pre-flight and its rank processes: JSON lines, with a command on stdin and its answer on stdout.

Imports no torch.
"""

from __future__ import annotations

import hashlib

import msgspec

from pd_cluster.types import Role

# 16 tokens of a model with 32 layers and 4 KV heads make a block of 1 MiB in float16.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 4, 128, 16
BLOCK_NBYTES = 1 << 20
NUM_BLOCKS = 64
NOBODY = "no process answers on the other host"


class BeginProbes(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first command: makes the pool on this rank's device.

    For a prefill instance, fills it with content from `seed`.
    """

    name: str
    role: Role
    rank: int
    device: str  # as with --device
    device_ids: list[str]
    host: str
    kv_transport: str
    seed: int


class Listen(msgspec.Struct, frozen=True, tag=True):
    """For a decode instance's rank: waits for a link, and answers with its port and epoch.

    `secret` is for this link only. `port` and `epoch` are set if the other end is on another host and must know them in
    advance; 0: any.
    """

    secret: bytes
    port: int = 0
    epoch: int = 0


class Send(msgspec.Struct, frozen=True, tag=True):
    """For a prefill instance's rank: links to a listening rank and sends `NUM_BLOCKS` blocks `num_transfers` times.

    `host`: the host of the other end, if it differs from this rank's. `wait_s`: how long the other end may take to
    start.
    """

    secret: bytes
    name: str
    port: int
    epoch: int
    num_transfers: int
    host: str = ""
    wait_s: float = 0.0


class Compare(msgspec.Struct, frozen=True, tag=True):
    """For the listening rank: compares the blocks that landed last with the content from `seed`, and closes the link.

    `wait_s`: how long the transfers may take to begin if the other end is on another host.
    """

    seed: int
    num_transfers: int
    wait_s: float = 0.0


Command = BeginProbes | Listen | Send | Compare


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a command. `transfers_s`: seconds of each transfer, from its first payload to its confirmation.

    `error`: why the command failed.
    """

    device: str = ""
    port: int = 0
    epoch: int = 0
    transport: str = ""
    transfers_s: list[float] = []
    error: str = ""


def key_of(secret: bytes, role: Role) -> bytes:
    """Returns the private key of one end of a link. Both ends can derive both keys."""
    return hashlib.sha256(secret + role.encode()).digest()
