"""Runs an engine's ranks as threads of the test's process, each with its own share of the model.

The caller runs rank 0; followers run their production loop over real sockets.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.follower import Follower
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.layers.expert_share import ExpertUnit
from pd_cluster.model.loading import transformers_modules
from pd_cluster.model.parallel.rank_group import Rendezvous, join
from pd_cluster.model.runner import loaded_parts
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.settings.engine_config import EngineConfig

WAIT_S = 60.0
_load_plain, _load_tower = transformers_modules.load_plain, loaded_parts.load_tower
_loading = threading.Lock()


@contextlib.contextmanager
def ranks(
    folder: Path, size: int, device: Device = CPU, units: Sequence[ExpertUnit] = (), **settings: object
) -> Iterator[EngineCore]:
    """Yields the engine's core, and ends its followers afterwards. Raises a rank's error while loading.

    `device`: rank 0's; further ranks use the next devices. `units`: each rank's end of the exchange among instances.
    """
    ends = [units[rank] if units else None for rank in range(size)]
    own = [device if device == CPU else Device(device.kind, device.index + rank) for rank in range(size)]
    config = EngineConfig(model=str(folder), tensor_parallel_size=size, **settings)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as store, ThreadPoolExecutor(size) as threads, one_at_a_time():
        places = [Rendezvous(f"{store}/ranks", rank, size, WAIT_S, WAIT_S) for rank in range(size)]
        pairs = [socket.socketpair() for _ in range(size - 1)]
        followers = [Channel(ours.detach(), to.FromFollower, WAIT_S) for ours, _ in pairs]

        def lead() -> EngineCore:
            return build_core(config, join(places[0], own[0]), followers, own[0], ends[0])[0]

        def follow(rank: int) -> None:
            channel = Channel(pairs[rank - 1][1].detach(), to.ToFollower, WAIT_S)
            runner = load_runner(config, join(places[rank], own[rank]), own[rank], ends[rank])
            follower = Follower(runner, channel, None)
            follower.start()
            follower.run()

        running = [threads.submit(follow, rank) for rank in range(1, size)]
        try:
            yield threads.submit(lead).result(WAIT_S)
        finally:
            for follower in followers:
                follower.close()
        for each in running:
            each.result(WAIT_S)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Serializes loading, because transformers patches torch while it builds a model, which is not thread-safe."""

    def load_plain(*arguments: object) -> object:
        with _loading:
            return _load_plain(*arguments)  # type: ignore[arg-type]

    def load_tower(*arguments: object) -> object:
        with _loading:
            return _load_tower(*arguments)  # type: ignore[arg-type]

    transformers_modules.load_plain = load_plain  # type: ignore[assignment]
    loaded_parts.load_tower = load_tower  # type: ignore[assignment]
    try:
        yield
    finally:
        transformers_modules.load_plain, loaded_parts.load_tower = _load_plain, _load_tower
