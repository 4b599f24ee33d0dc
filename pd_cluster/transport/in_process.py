"""Connects two pools of one process on one device: the receiver finds the sender's pool by name (see one_sided.py)."""

from __future__ import annotations

import secrets
from weakref import WeakValueDictionary

from pd_cluster.devices.device import Device
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import Memory
from pd_cluster.transport.one_sided import OneSidedReceiver, OneSidedSender, PoolAddress
from pd_cluster.transport.transport_interface import (
    Checksum,
    KVReceiver,
    KVSender,
    LinkContext,
    Peer,
    PostKey,
    decode_offer,
)
from pd_cluster.wire import TransportName, TransportOffer

_pools: WeakValueDictionary[str, KVPool] = WeakValueDictionary()  # by the name under which they are offered


class LocalReceiver(OneSidedReceiver):
    name: TransportName = "local"

    def source(self) -> Memory:
        source = _pools.get(self._offer.address)
        if source is None:
            raise LinkError("the prefill instance is in another process")
        if source.device != self._pool.device:
            raise LinkError(
                f"the prefill instance's pool is on {source.device.torch_name}, this one's on "
                f"{self._pool.device.torch_name}"
            )
        return source.memory


def offer_pool(pool: KVPool) -> str:
    """Offers a pool. Returns the name by which receivers in this process find it."""
    for name, known in _pools.items():
        if known is pool:
            return name
    name = secrets.token_hex(16)
    _pools[name] = pool
    return name


def why_not(name: TransportName, own: Device, peer: TransportOffer | None = None) -> str:
    """See transport_table.Transport."""
    is_here = peer is None or decode_offer(peer, PoolAddress).address in _pools
    return "" if is_here else "the prefill instance is in another process"


def ends(name: TransportName, place: LinkContext) -> LocalEnds:
    return LocalEnds(name, place)


class LocalEnds:
    def __init__(self, name: TransportName, place: LinkContext) -> None:
        self._name, self._place = name, place

    def sender(self, checksum: Checksum, post: PostKey) -> KVSender:
        return OneSidedSender(self._name, offer_pool(self._place.pool), self._place.pool, checksum)

    def receiver(self, peer: Peer, checksum: Checksum, post: PostKey) -> KVReceiver:
        return LocalReceiver(self._place, peer, checksum)
