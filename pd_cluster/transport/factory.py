"""Builds the two ends of a link from what this worker's configuration allows."""

from __future__ import annotations

from pd_cluster import wire
from pd_cluster.config import WorkerConfig
from pd_cluster.errors import LinkError
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.base import KVReceiver, KVSender
from pd_cluster.transport.dist import DistReceiver, DistSender, Store
from pd_cluster.transport.shm import PoolServer, ShmReceiver, ShmSender


class Transports:
    """What is shared by all links of one worker: the pool's server, the store."""

    def __init__(self, config: WorkerConfig, pool: KVPool) -> None:
        self._config = config
        self._pool = pool
        self._pool_server: PoolServer | None = None
        self._store: Store | None = None

    def senders(self) -> list[KVSender]:
        """P's ends for a new link, all that this worker allows; D chooses. Raises LinkError."""
        try:
            return self._senders()
        except (OSError, RuntimeError) as error:
            raise LinkError(f"this instance cannot offer its KV cache: {error}", retry=True) from error

    def _senders(self) -> list[KVSender]:
        found: list[KVSender] = []
        times = self._config.timeouts
        if "shm" in self._config.transports:
            self._pool_server = self._pool_server or PoolServer(self._pool)
            found.append(ShmSender(self._pool_server, self._pool))
        if "dist" in self._config.transports:
            self._store = self._store or Store(self._config.bind_address, times.connect_timeout_s)
            host = self._config.bind_address
            found.append(DistSender(self._store, self._pool, host, times.connect_timeout_s, times.transfer_timeout_s))
        return found

    def receivers(self, peer: str, opened: wire.LinkOpen) -> list[KVReceiver]:
        """D's ends, in D's order of preference, for what P offers and D allows too. Raises LinkError."""
        host = self._config.hosts.get(peer.partition("@")[0])
        if host is None:
            raise LinkError(f"{peer} is not in this instance's global rank table")
        offers = {offer.transport: offer for offer in opened.offers}
        times = self._config.timeouts
        found: list[KVReceiver] = []
        for transport in self._config.transports:
            offer = offers.get(transport)
            if offer is None:
                continue
            if transport == "shm":
                found.append(ShmReceiver(offer, self._pool, opened.num_blocks, times.connect_timeout_s))
            else:
                found.append(
                    DistReceiver(
                        offer,
                        self._pool,
                        host,
                        self._config.bind_address,
                        times.connect_timeout_s,
                        times.transfer_timeout_s,
                    )
                )
        return found
