"""Builds the two ends of a link from what this worker's configuration and its pool's device allow."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pd_cluster import device as devices
from pd_cluster import device_group, wire
from pd_cluster.config import WorkerConfig
from pd_cluster.device import Device
from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.base import Checksum, KVReceiver, KVSender
from pd_cluster.transport.dist import DistReceiver, DistSender, why_no_pair
from pd_cluster.transport.events import Report
from pd_cluster.transport.guard import LinkKey, Opener, Sealer
from pd_cluster.transport.ipc import DeviceMemory, ExportServer, IpcReceiver, TorchMemory
from pd_cluster.transport.local import LocalReceiver, OneSidedSender, is_here, offer_pool
from pd_cluster.transport.receiving import Probe, ReceiveThread
from pd_cluster.transport.sending import SendThread
from pd_cluster.transport.shm import PoolServer, ShmReceiver
from pd_cluster.types import Note, note_nothing

log = logging.getLogger(__name__)


def why_not(name: wire.TransportName, device: Device) -> str:
    """Why a pool on this device cannot be handed over so; "" when it can."""
    if name == "shm" and device.is_accelerator:
        return f"this instance's pool is on {device.torch_name}, not in host memory"
    if name == "ipc" and not device.is_accelerator:
        return "this instance's pool is in host memory"
    return device_group.why_none(name, device) if name in device_group.BACKENDS else ""


class Transports:
    """What is shared by all links of one worker: the pool's names and its servers."""

    def __init__(self, config: WorkerConfig, pool: KVPool, memory: DeviceMemory | None = None) -> None:
        self._config = config
        self._pool = pool
        self._memory = memory or TorchMemory()
        self._pool_server: PoolServer | None = None
        self._export_server: ExportServer | None = None
        self._problems = {name: why_not(name, pool.device) for name in config.transports}

    def send_thread(
        self, conn: str, key: LinkKey, post: Callable[[wire.Body], None], report: Report, note: Note = note_nothing
    ) -> SendThread:
        """P's end of a lane, with all transports that this worker allows and has; D chooses. Raises LinkError."""
        checksum = Checksum(self._config.kv.checksum, key.checksum_seed)
        try:
            senders = self._senders(checksum)
        except (OSError, RuntimeError) as error:
            raise LinkError(f"this instance cannot offer its KV cache: {error}", retry=True) from error
        rate = self._config.kv_rate_limit_bytes_per_s
        pool = self._pool
        return SendThread(
            conn, senders, Sealer(key), pool.probe_block, post, report, rate, note, pool.probe_seed, pool.device
        )

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
        both = [offers[name] for name, problem in self._problems.items() if name in offers and not problem]
        both = [offer for offer in both if offer.transport != "local" or is_here(offer.address)]
        problems = self._problems | {
            offer.transport: why_no_pair(offer, self._pool.device) for offer in both if offer.backend
        }  # before P is told to open it: it would wait
        return ReceiveThread(
            conn,
            opened.link_id,
            [
                self._receiver(offer, host, source, opened.num_blocks, key)
                for offer in both
                if not problems[offer.transport]
            ],
            Probe(self._pool, source, lane.probe_seed),
            Opener(key),
            post,
            report,
            self._config.timeouts.connect_timeout_s,
            note,
            [f"{name}: {problem}" for name, problem in problems.items() if name in offers and problem],
        )

    def _senders(self, checksum: Checksum) -> list[KVSender]:
        """Raises LinkError when there are none."""
        found: list[KVSender] = []
        for name in self._config.transports:
            try:
                if not self._problems[name]:
                    found.append(self._sender(name, checksum))
            except LinkError as error:  # the next time, too
                self._problems[name] = str(error)
                log.warning("KV cache is not offered over %s: %s", name, error)
        if not found:
            problems = "; ".join(f"{name}: {problem}" for name, problem in self._problems.items())
            raise LinkError(f"--kv-transport {self._config.kv_transport} is not possible here: {problems}")
        return found

    def _sender(self, name: wire.TransportName, checksum: Checksum) -> KVSender:
        times = self._config.timeouts
        if name == "local":
            return OneSidedSender(name, offer_pool(self._pool), self._pool, checksum)
        if name == "shm":
            self._pool_server = self._pool_server or PoolServer(self._pool)
            return OneSidedSender(name, self._pool_server.name, self._pool, checksum)
        if name == "ipc":
            self._export_server = self._export_server or ExportServer(self._pool, self._memory)
            uuid = devices.uuid(self._pool.device)
            return OneSidedSender(name, self._export_server.name, self._pool, checksum, uuid)
        return DistSender(
            self._pool,
            checksum,
            self._config.kv.wire_dtype == "int8",
            self._config.bind_address,
            times.connect_timeout_s,
            times.transfer_timeout_s,
            name if name in ("nccl", "hccl") else "gloo",
        )

    def _receiver(
        self, offer: wire.TransportOffer, host: str, layout: KVLayout, num_blocks: int, key: LinkKey
    ) -> KVReceiver:
        times, pool = self._config.timeouts, self._pool
        checksum = Checksum(self._config.kv.checksum, key.checksum_seed)
        connect_s, settle_s = times.connect_timeout_s, times.transfer_timeout_s
        if offer.transport == "local":
            return LocalReceiver(offer, pool, layout, checksum, settle_s)
        if offer.transport == "shm":
            return ShmReceiver(offer, pool, layout, num_blocks, checksum, connect_s, settle_s)
        if offer.transport == "ipc":
            return IpcReceiver(offer, pool, layout, num_blocks, checksum, connect_s, self._memory, settle_s)
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
