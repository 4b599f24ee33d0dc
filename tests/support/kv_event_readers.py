"""Readers of KV events, like those of routers outside the cluster.

The structs follow the format's description, independently of the product.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from pd_cluster.kv.kv_event_log import EventBatch, KVEventLog
from pd_cluster.net.event_publisher import EventPublisher
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.types import RequestSpec, Sampling

BLOCK = 4
WAIT_MS = 60_000
NOBODY = Credentials(b"s" * 32)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


class Mirror:
    """An external router's view of the caches, built from events only."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]]] = {}

    def hear(self, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    known = self.blocks.setdefault(str(event.medium), {})
                    parent = event.parent_block_hash
                    for at, block in enumerate(event.block_hashes):
                        tokens = tuple(event.token_ids[at * event.block_size : (at + 1) * event.block_size])
                        assert block not in known, "a block was stored twice"
                        known[block] = parent, tokens
                        parent = block
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.blocks[str(event.medium)][block]
                case AllBlocksCleared():
                    self.blocks.clear()

    def hashes(self, medium: str) -> set[int | bytes]:
        return set(self.blocks.get(medium, {}))


class Reader:
    """A subscriber as in vLLM's examples, which can also request past batches."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, hwm: int = 1000, keys: Any = None) -> None:
        self._context = context
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            private, server = keys
            self.socket.curve_secretkey = z85.encode(private)
            self.socket.curve_publickey = zmq.curve_public(z85.encode(private))
            self.socket.curve_serverkey = z85.encode(server)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")

    def next(self, wait_ms: int = WAIT_MS) -> tuple[int, Batch] | None:
        if not self.socket.poll(wait_ms):
            return None
        topic, sequence, payload = self.socket.recv_multipart()
        assert topic == b"kv"
        return int.from_bytes(sequence, "big"), DECODER.decode(payload)

    def past(self, endpoint: str, start: int) -> list[tuple[int, Batch]]:
        found = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            while socket.poll(WAIT_MS):
                _, _, sequence, payload = socket.recv_multipart()
                if sequence == b"\xff" * 8:
                    return found
                found.append((int.from_bytes(sequence, "big"), DECODER.decode(payload)))
        raise AssertionError("the replay did not end")


def batch(number: int, num_tokens: int = 0) -> EventBatch:
    log = KVEventLog(BLOCK)
    log.stored(number.to_bytes(32, "big"), None, [70_000] * num_tokens, RequestSpec([], Sampling()), 0)
    return EventBatch(float(number), log.take())


def await_subscriber(publisher: EventPublisher, reader: Reader) -> int:
    """Publishes batches until the reader receives the newest one; returns the next batch's number."""
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while True:
        assert time.monotonic() < deadline_s
        newest = publisher.num_published
        publisher.publish(batch(newest))
        while (found := reader.next(50)) is not None:
            if found[0] == newest:
                return newest + 1
