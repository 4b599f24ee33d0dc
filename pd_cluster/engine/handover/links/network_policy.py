"""Forbids sending KV cache between hosts over gloo unless an operator trusts the network.

The table is in docs/protocol/pairs.md, "gloo between hosts".
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_cluster import wire
from pd_cluster.errors import LinkError, called
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.transport.transport_table import needs_trusted_network
from ranktable_tools.host_addresses import is_one_host


class NetworkPolicy:
    """Stores the hosts of the workers that the scheduler has announced; does not restrict links with other workers.

    `own`: this worker's name@epoch.
    """

    def __init__(self, own: str = "", trusts_network: bool = False) -> None:
        self._own = own
        self._trusts_network = trusts_network
        self._hosts: dict[str, str] = {}  # by name@epoch

    def set_peers(self, peers: Sequence[wire.PeerInfo]) -> None:
        self._hosts = {peer_key(each.name, each.epoch): each.host for each in peers}

    def problem(self, peer: str) -> str:
        """Returns why gloo must not be used with this peer; "" if it may be used."""
        own, other = self._hosts.get(self._own, ""), self._hosts.get(peer, "")
        if self._trusts_network or not own or not other or is_one_host(own, other):
            return ""
        return why_not(own, other)

    def kept(self, peer: str, opened: wire.LinkOpen) -> wire.LinkOpen:
        """Returns the LinkOpen without the offers that must not be used between this host and the peer's host.

        Raises LinkError if a lane has no offer left.
        """
        if not (problem := self.problem(peer)):
            return opened
        lanes = [
            msgspec.structs.replace(
                lane, offers=[each for each in lane.offers if not needs_trusted_network(each.transport)]
            )
            for lane in opened.lanes
        ]
        if any(lane.offers and not kept.offers for lane, kept in zip(opened.lanes, lanes, strict=True)):
            raise LinkError(problem)
        return msgspec.structs.replace(opened, lanes=lanes)


def why_not(own: str, other: str) -> str:
    """Returns why gloo is not used between two hosts, and what the operator can change."""
    return (
        f"KV cache would travel between hosts over gloo ({own}, {other}), checked but not encrypted: give all workers "
        f"{called('kv_transport')} auto or curve, which is encrypted, or {called('trust_network')} if nobody else can "
        f"access that network"
    )


def why_no_unit(name: str, hosts: Sequence[str]) -> str:
    """Returns why a unit's members do not exchange rows over gloo between hosts, and what the operator can change."""
    return (
        f"{called('data_parallel_size')}: the members of {name} would exchange activations between hosts over gloo "
        f"({', '.join(dict.fromkeys(hosts))}), which is unencrypted: give all {called('trust_network')} if nobody else "
        f"can access that network, or keep a unit on one host"
    )
