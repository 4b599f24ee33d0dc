"""A real engine publishes its pool's blocks over real sockets; vLLM's own types decode the events."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from pd_cluster.engine.stages.kv_event_publisher import KVEvents
from pd_cluster.net.event_publisher import EventPublisher
from pd_cluster.settings.kv_events_config import KVEventsConfig
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.types import Sampling
from tests.support.engines import generate, make_core
from tests.support.kv_event_readers import DECODER, Mirror, Reader, await_subscriber

Checkpoints = Callable[..., Path]
VLLM = os.environ.get("PD_CLUSTER_VLLM", "")  # a virtual environment with vLLM
READS = """
import base64, json, sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
decoder = msgspec.msgpack.Decoder(KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(base64.b64decode(line))
    events = [[type(each).__name__, msgspec.to_builtins(each)] for each in batch.events]
    print(json.dumps([batch.ts, batch.data_parallel_rank, events]))
"""


def published(folder: Path, socket_folder: Path) -> tuple[Mirror, list[bytes], set[int]]:
    """Runs random prompts with common prefixes through a too small pool.

    Returns a subscriber's final view, the batches' bytes, and the pool's own contents as numbers.
    """
    core = make_core(folder, num_blocks=24, block_size=8, max_model_len=128, device="cpu")
    endpoint = f"ipc://{socket_folder}/events"
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, topic="kv")
    publisher = EventPublisher(config, Credentials(b"s" * 32))
    rng, blocks = random.Random(5), core.scheduler.blocks
    mirror, payloads = Mirror(), []
    with zmq.Context() as context:
        context.linger = 0
        reader = Reader(context, endpoint)
        try:
            await_subscriber(publisher, reader)
            events = KVEvents(blocks, 8, publisher)
            beginnings = [[rng.randrange(256) for _ in range(24)] for _ in range(3)]
            for number in range(30):
                prompts = [
                    rng.choice(beginnings)[: rng.choice((8, 20, 24))] + [rng.randrange(256) for _ in range(20)]
                    for _ in range(2)
                ]
                generate(core, prompts, Sampling(max_tokens=rng.randrange(1, 20), ignore_eos=True))
                if number == 15:
                    blocks.forget()
                events.blocks_changed(blocks.changes())
            while (found := reader.next(0 if publisher.num_published == len(payloads) else 500)) is not None:
                mirror.hear(found[1])
                payloads.append(msgspec.msgpack.encode(found[1]))
        finally:
            reader.socket.close(linger=0)
            publisher.close()
    return mirror, payloads, {int.from_bytes(content[-8:], "big") for content in blocks.follow()}


@pytest.fixture(scope="module")
def found(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> tuple[Mirror, list[bytes], set[int]]:
    return published(checkpoint("llama"), tmp_path_factory.mktemp("events"))


def test_a_subscriber_knows_the_pool(found: tuple[Mirror, list[bytes], set[int]]) -> None:
    mirror, payloads, contents = found
    assert mirror.hashes("GPU") == contents
    assert 10 < len(contents) <= 24
    kinds = {type(event).__name__ for each in payloads for event in DECODER.decode(each).events}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not VLLM, reason="PD_CLUSTER_VLLM names no virtual environment with vLLM")
def test_vllms_own_types_read_it(found: tuple[Mirror, list[bytes], set[int]]) -> None:
    _, payloads, _ = found
    lines = "\n".join(msgspec.json.encode(each).decode().strip('"') for each in payloads)
    read = subprocess.run(
        [Path(VLLM) / "bin" / "python", "-c", READS],
        input=lines,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    ).stdout.splitlines()
    assert len(read) == len(payloads)
    for line, payload in zip(read, payloads, strict=True):
        own = DECODER.decode(payload)
        ts, rank, events = json.loads(line)
        assert (ts, rank) == (own.ts, own.data_parallel_rank)
        for (name, fields), event in zip(events, own.events, strict=True):
            assert name == type(event).__name__
            mine = {**msgspec.to_builtins(event), "type": name}
            assert {key: value for key, value in fields.items() if value is not None} == {
                key: value for key, value in mine.items() if value is not None
            }
