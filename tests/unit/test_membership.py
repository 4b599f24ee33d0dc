"""Where the instances of a table that names hosts are looked for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import httpx
import pytest

from pd_cluster.cluster import membership as module
from pd_cluster.cluster.membership import Membership, instances_of
from pd_cluster.cluster.place import Place
from pd_cluster.config import Timeouts
from pd_cluster.errors import ConfigError
from pd_cluster.mailbox import Mailbox
from ranktable_tools.tables import server_group
from tests.support.elastic_world import Wires, place_of


def place_with(host: str) -> Place:
    """The scheduler's, in a table whose prefill instance is on a host of that name."""
    place = place_of(1, 1)
    scheduler, prefill, decode = place.table.server_group_list
    named = tuple(replace(server, server_id=host, server_ip=host) for server in prefill.server_list)
    return replace(
        place, table=replace(place.table, server_group_list=(scheduler, server_group("prefill", named), decode))
    )


def test_a_name_is_asked_for_again_before_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod comes back under its old name with another address, and may have none for a while."""
    addresses: dict[str, str] = {}
    asked: list[str] = []

    def resolve(host: str) -> str:
        if host not in addresses:
            raise ConfigError(f"server_ip {host!r} of the rank table cannot be resolved")
        return addresses[host]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        raise httpx.ConnectError("nobody")

    monkeypatch.setattr(module, "resolve_host", lambda host: host if host[0].isdigit() else resolve(host))

    async def watch() -> list[str]:
        place = place_with("pod-0")
        instances = instances_of(place, [1, 2])
        membership = Membership(place, instances, cast(Mailbox, Wires()), Timeouts(), "model", lambda *_: None)
        reasons = []
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            for address in ("", "192.0.2.1", "192.0.2.2"):
                if address:
                    addresses["pod-0"] = address
                await membership._ask(instances[0], client)
                reasons.append(instances[0].reason)
        return reasons

    reasons = asyncio.run(watch())
    assert "'pod-0' of the rank table cannot be resolved" in reasons[0]
    assert reasons[1:] == ["nobody answers at 192.0.2.1:1", "nobody answers at 192.0.2.2:1"]
    assert asked == ["192.0.2.1", "192.0.2.2"]
