"""Builds the two ends of a link from what this worker's configuration allows.

The seam for accelerators: device IPC, NCCL and HCCL will stand in `_sender` and `_receiver` beside the others, each
with a KVSender and a KVReceiver of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.config import WorkerConfig
from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.base import Checksum, KVReceiver, KVSender
from pd_cluster.transport.dist import DistReceiver, DistSender
from pd_cluster.transport.events import Report
from pd_cluster.transport.guard import LinkKey, Opener, Sealer
from pd_cluster.transport.local import LocalReceiver, OneSidedSender, is_here, offer_pool
from pd_cluster.transport.receiving import Probe, ReceiveThread
from pd_cluster.transport.sending import SendThread
from pd_cluster.transport.shm import PoolServer, ShmReceiver
from pd_cluster.types import Note, note_nothing


class Transports:
    """What is shared by all links of one worker: the pool's names and its server."""

    def __init__(self, config: WorkerConfig, pool: KVPool) -> None:
        self._config = config
        self._pool = pool
        self._pool_server: PoolServer | None = None

    def send_thread(
        self, conn: str, key: LinkKey, post: Callable[[wire.Body], None], report: Report, note: Note = note_nothing
    ) -> SendThread:
        """P's end of a lane, with all transports that this worker allows; D chooses. Raises LinkError."""
        checksum = Checksum(self._config.kv.checksum, key.checksum_seed)
        try:
            senders = [self._sender(name, checksum) for name in self._config.transports]
        except (OSError, RuntimeError) as error:
            raise LinkError(f"this instance cannot offer its KV cache: {error}", retry=True) from error
        rate = self._config.kv_rate_limit_bytes_per_s
        pool = self._pool
        return SendThread(conn, senders, Sealer(key), pool.probe_block, post, report, rate, note, pool.probe_seed)

    def receive_thread(
        self,
        conn: str,
        host: str,
        opened: wire.LinkOpen,
        key: LinkKey,
        post: Callable[[wire.Body], None],
        report: Report,
        note: Note = note_nothing,
    ) -> ReceiveThread:
        """D's end of lane `key.lane`, with what P at `host` offers and D allows too, in D's order. Raises LinkError."""
        lane = opened.lanes[key.lane]
        source = KVLayout.from_info(opened.layout).of_rank(lane.source_rank)
        offers = {offer.transport: offer for offer in lane.offers}
        both = [offers[name] for name in self._config.transports if name in offers]
        both = [offer for offer in both if offer.transport != "local" or is_here(offer.address)]
        return ReceiveThread(
            conn,
            opened.link_id,
            [self._receiver(offer, host, source, opened.num_blocks, key) for offer in both],
            Probe(self._pool, source, lane.probe_seed),
            Opener(key),
            post,
            report,
            self._config.timeouts.connect_timeout_s,
            note,
        )

    def _sender(self, name: wire.TransportName, checksum: Checksum) -> KVSender:
        times = self._config.timeouts
        if name == "local":
            return OneSidedSender(name, offer_pool(self._pool), self._pool, checksum)
        if name == "shm":
            self._pool_server = self._pool_server or PoolServer(self._pool)
            return OneSidedSender(name, self._pool_server.name, self._pool, checksum)
        host = self._config.bind_address
        wants_int8 = self._config.kv.wire_dtype == "int8"
        return DistSender(self._pool, checksum, wants_int8, host, times.connect_timeout_s, times.transfer_timeout_s)

    def _receiver(
        self, offer: wire.TransportOffer, host: str, layout: KVLayout, num_blocks: int, key: LinkKey
    ) -> KVReceiver:
        times, pool = self._config.timeouts, self._pool
        checksum = Checksum(self._config.kv.checksum, key.checksum_seed)
        if offer.transport == "local":
            return LocalReceiver(offer, pool, layout, checksum)
        if offer.transport == "shm":
            return ShmReceiver(offer, pool, layout, num_blocks, checksum, times.connect_timeout_s)
        return DistReceiver(
            offer,
            pool,
            layout,
            checksum,
            self._config.kv.wire_dtype == "int8",
            host,
            self._config.bind_address,
            times.connect_timeout_s,
            times.transfer_timeout_s,
        )
