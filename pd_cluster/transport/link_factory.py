"""Builds the ends of links with the transports that this worker's configuration and its pools' device allow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pd_cluster import wire
from pd_cluster.errors import LinkError, called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.transport.device_memory import DeviceMemory, TorchMemory
from pd_cluster.transport.link_events import Report
from pd_cluster.transport.link_frames import LinkKey, Opener, Sealer
from pd_cluster.transport.receive_thread import AllowedTransports, Probe, ReceiveThread
from pd_cluster.transport.send_thread import SendThread
from pd_cluster.transport.transport_interface import (
    Checksum,
    Ends,
    KVReceiver,
    KVSender,
    LaneContext,
    LinkContext,
    Peer,
    PostKey,
)
from pd_cluster.transport.transport_table import Transport, allowed
from pd_cluster.types import Note, note_nothing

log = logging.getLogger(__name__)

Post = Callable[[wire.Body], None]


class Transports:
    """Holds the state that all links of a worker share: the transports that the worker allows, and their `Ends`.

    `pools`: one for each group of layers, all on one device.
    """

    def __init__(self, config: WorkerConfig, pools: Sequence[KVPool], memory: DeviceMemory | None = None) -> None:
        self._config = config
        self._places = [_place_of(config, pool, memory or TorchMemory()) for pool in pools]
        self._device = pools[0].device
        self._ends: dict[tuple[int, wire.TransportName], Ends] = {}
        self._problems = {each: each.why_not(self._device) for each in allowed(config.kv_transport)}

    def send_thread(
        self, conn: str, key: LinkKey, post: Post, report: Report, note: Note = note_nothing, group: int = 0
    ) -> SendThread:
        """Creates P's end of a lane, with all transports that this worker allows. D chooses one. Raises LinkError."""
        try:
            senders = self._senders(group, key, post)
        except (OSError, RuntimeError) as error:
            raise LinkError(f"this instance cannot offer its KV cache: {error}", retry=True) from error
        context, pool = LaneContext(conn, post, report, note), self._places[group].pool
        return SendThread(context, senders, Sealer(key), pool, self._config.kv_rate_limit_bytes_per_s)

    def receive_thread(
        self, conn: str, opened: wire.LinkOpen, key: LinkKey, post: Post, report: Report, note: Note = note_nothing
    ) -> ReceiveThread:
        """Creates D's end of lane `key.lane`, with all offers of P that D allows, in D's order. Raises LinkError."""
        lane = opened.lanes[key.lane]
        group = lane.group
        source = KVLayout.from_info(opened.layouts[group]).of_rank(lane.source_rank)
        offers = {offer.transport: offer for offer in lane.offers}
        receivers: list[KVReceiver] = []
        impossible: list[str] = []
        for transport, problem in self._problems.items():
            if (offer := offers.get(transport.name)) is None:
                continue
            # Checked here, because otherwise P would open the transport and wait.
            if why := problem or self._why_not(transport, offer):
                if transport.choice:  # other transports cannot be requested by name
                    impossible.append(f"{transport.name}: {why}")
                continue
            peer = Peer(offer, source, opened.num_blocks[group])
            receivers.append(self._ends_of(group, transport).receiver(peer, *self._terms(transport, key, post)))
        if not receivers and not impossible:
            offered, allows = ", ".join(offers), ", ".join(each.name for each in self._problems)
            choice = f"{called('kv_transport')} {self._config.kv_transport}"
            impossible.append(f"no transport in common: P offers {offered}; {choice} here allows {allows}")
        return ReceiveThread(
            LaneContext(conn, post, report, note),
            opened.link_id,
            AllowedTransports(receivers, impossible),
            Probe(self._places[group].pool, source, lane.probe_seed),
            Opener(key),
            self._config.timeouts.connect_timeout_s,
        )

    def needs_pair(self, opened: wire.LinkOpen) -> bool:
        """Whether the transport that D would choose (P's usable offer that D prefers most) needs a process group."""
        offers = {offer.transport: offer for offer in opened.lanes[0].offers}
        for transport, problem in self._problems.items():
            offer = offers.get(transport.name)
            if offer is not None and not problem and not self._why_not(transport, offer):
                return transport.is_pair
        return False

    def _why_not(self, transport: Transport, offer: wire.TransportOffer) -> str:
        try:
            return transport.why_not(self._device, offer)
        except LinkError as error:  # an invalid offer must not affect other transports
            return str(error)

    def _senders(self, group: int, key: LinkKey, post: Post) -> list[KVSender]:
        """Returns the possible senders. Raises LinkError if there are none."""
        found: list[KVSender] = []
        for transport, problem in self._problems.items():
            try:
                if not problem:
                    found.append(self._ends_of(group, transport).sender(*self._terms(transport, key, post)))
            except LinkError as error:  # a permanent problem
                self._problems[transport] = error.text
                log.warning("KV cache is not offered over %s: %s", transport.name, error)
        if not found:
            problems = "; ".join(f"{each.name}: {problem}" for each, problem in self._problems.items())
            raise LinkError(f"{called('kv_transport')} {self._config.kv_transport} is not possible here: {problems}")
        return found

    def _ends_of(self, group: int, transport: Transport) -> Ends:
        if (group, transport.name) not in self._ends:
            self._ends[group, transport.name] = transport.ends(self._places[group])
        return self._ends[group, transport.name]

    def _terms(self, transport: Transport, key: LinkKey, post: Post) -> tuple[Checksum, PostKey]:
        """Returns a lane's own checksum, and the function that posts its meeting's keys."""
        checksum = Checksum(self._config.kv.checksum, key.checksum_seed)
        return checksum, partial(_post_value, post, transport.name, key.lane)


def _place_of(config: WorkerConfig, pool: KVPool, memory: DeviceMemory) -> LinkContext:
    """Returns the settings that a pool's lanes share.

    States are never sent as int8, because all later tokens depend on them.
    """
    times = config.timeouts
    return LinkContext(
        pool=pool,
        memory=memory,
        wants_int8=config.kv.wire_dtype == "int8" and not pool.layout.holds.is_state,
        bind_host=config.bind_address,
        connect_s=times.connect_timeout_s,
        transfer_s=times.transfer_timeout_s,
    )


def _post_value(post: Post, transport: wire.TransportName, lane: int, key: str, value: bytes) -> None:
    post(wire.LinkValue(transport, key, value, lane))
