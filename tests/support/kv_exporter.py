"""P's end of one lane in a separate process, with a pool on a device: `-m tests.support.kv_exporter KIND CHOICE`.

It reads commands as lines of JSON and writes lines of JSON: first its offer, then frames and faults. It ends at the end
of its standard input.
"""

from __future__ import annotations

import sys
import threading

import msgspec
import torch

from pd_cluster import wire
from pd_cluster.devices.device import Device, use
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.settings.process_configs import Credentials, WorkerConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.link_factory import Transports
from pd_cluster.transport.link_frames import LinkKey
from pd_cluster.types import TokenOutput
from tests.support.worker_configs import worker_config

LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, planes=keys_and_values(64), block_size=16, dtype="bfloat16")
NUM_BLOCKS = 512
KEY = LinkKey.derive(b"secret", "link", "p", "d")
SLEEP_CYCLES = 100_000_000  # tens of milliseconds on a GPU


class Value(msgspec.Struct, tag=True):
    """A wire.LinkValue, in either direction."""

    transport: wire.TransportName
    key: str
    value: bytes


class Open(msgspec.Struct, tag=True):
    transport: wire.TransportName


class Ship(msgspec.Struct, tag=True):
    """Ships blocks, layer by layer or whole, after filling them with `value`; on a device the fill is delayed."""

    transfer_id: str
    block_ids: list[int]
    value: float | None = None
    by_layer: bool = True


class Offers(msgspec.Struct, tag=True):
    offers: list[wire.TransportOffer]
    probe_seed: int


class Fault(msgspec.Struct, tag=True):
    what: str


class Frame(msgspec.Struct, tag=True):
    sequence: int
    header: bytes
    mac: bytes


def make_config(choice: str, transfer_timeout_s: float = 30.0) -> WorkerConfig:
    timeouts = Timeouts(connect_timeout_s=20.0, transfer_timeout_s=transfer_timeout_s)  # a first launch may compile
    return worker_config(credentials=Credentials(b"secret"), kv_transport=choice, timeouts=timeouts)


def make_pool(kind: str, seed: int, num_blocks: int = NUM_BLOCKS) -> KVPool:
    device = Device(kind)  # type: ignore[arg-type]
    use(device)
    pool = KVPool(LAYOUT, num_blocks, device)
    numbers = torch.randn(pool.data[:num_blocks].shape, generator=torch.Generator().manual_seed(seed))
    pool.data[:num_blocks].copy_(numbers)
    return pool


def sleep(device: Device) -> None:
    """Delays the next launch on the current stream."""
    if device.is_accelerator:
        torch.cuda._sleep(SLEEP_CYCLES)


def main(kind: str, choice: str) -> None:
    lock = threading.Lock()

    def tell(message: msgspec.Struct) -> None:
        with lock:
            print(msgspec.json.encode(message).decode(), flush=True)

    def post(body: wire.Body) -> None:
        if isinstance(body, wire.LinkValue):
            tell(Value(body.transport, body.key, body.value))
            return
        assert isinstance(body, wire.KVFrame)
        tell(Frame(body.sequence, body.header, body.mac))

    pool = make_pool(kind, 1)
    transports = Transports(make_config(choice), [pool])
    send = transports.send_thread("c", KEY, post, lambda event: tell(Fault(str(event))))
    tell(Offers(send.offers, send.probe_seed))
    commands = msgspec.json.Decoder(Open | Ship | Value)
    for line in sys.stdin:
        command = commands.decode(line)
        if isinstance(command, Open):
            send.open(command.transport, LAYOUT, LAYOUT)
            continue
        if isinstance(command, Value):
            send.meet(wire.LinkValue(command.transport, command.key, command.value))
            continue
        ids = command.block_ids
        if command.value is not None:
            sleep(pool.device)
            pool.data[ids[0] : ids[-1] + 1].fill_(command.value)  # a slice, because an index would make the host wait
        groups = [(at, 1) for at in range(LAYOUT.num_layers)] if command.by_layer else [(0, LAYOUT.num_layers)]
        for index, (first, count) in enumerate(groups):
            piece = wire.KVPiece(0, len(ids) * LAYOUT.block_size, first, count, ids)
            send.ship(command.transfer_id, index, piece)
        token = TokenOutput("r", 0, 0, 0, 5)
        send.ship_end(wire.KVEnd(command.transfer_id, len(groups), len(ids) * LAYOUT.block_size, [token]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
