"""Publishes what this instance's prefix cache stores and drops, for routers outside the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from pd_cluster import wire
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.kv_event_log import EventBatch
from pd_cluster.kv.reached_blocks import ReachedBlocks
from pd_cluster.net.event_publisher import EventPublisher
from pd_cluster.types import Tier


class KVEvents(Stage):
    """The stage that publishes changes of the prefix cache."""

    def __init__(self, blocks: BlockPool | ReachedBlocks, block_size: int, publisher: EventPublisher) -> None:
        self._log = blocks.start_log(block_size)
        self._publisher = publisher

    def blocks_changed(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Publishes the changes as one batch, if there are any."""
        self._log.moved(changes)
        if events := self._log.take():
            self._publisher.publish(EventBatch(time.time(), events))

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        return msgspec.structs.replace(
            load,
            num_kv_event_batches=self._publisher.num_published,
            num_kv_event_drops=self._publisher.num_dropped,
        )

    def close(self) -> None:
        self._publisher.close()
