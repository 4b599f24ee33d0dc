"""Addresses of instances in a rank table with host names."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from dataclasses import replace

import httpx
import msgspec
import pytest

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members import worker_membership as module
from pd_cluster.cluster.members.rank_table_place import Place
from pd_cluster.cluster.members.worker_description import MOST_INFO_NBYTES
from pd_cluster.cluster.members.worker_membership import Membership, instances_of
from pd_cluster.errors import ConfigError
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools import Server
from ranktable_tools.table_types import server_group
from tests.support.elastic_world import place_of
from tests.support.mail import RecordedMail
from tests.support.router_world import info_of


def place_with(host: str) -> Place:
    """Returns the scheduler's place in a table whose prefill instance is on a host of that name."""
    place = place_of(1, 1)
    scheduler, prefill, decode = place.table.server_group_list
    named = tuple(replace(server, server_id=host, server_ip=host) for server in prefill.server_list)
    return replace(
        place, table=replace(place.table, server_group_list=(scheduler, server_group("prefill", named), decode))
    )


async def test_a_name_is_asked_for_again_before_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted pod has its old name with a new address, and for a while none, so each call resolves again."""
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
    place = place_with("pod-0")
    instances = instances_of(place, [1, 2])
    membership = Membership(place, instances, RecordedMail(), Timeouts(), "model")
    reasons = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        for address in ("", "192.0.2.1", "192.0.2.2"):
            if address:
                addresses["pod-0"] = address
            await membership.ask(instances[0], client)
            reasons.append(instances[0].reason)
    assert "'pod-0' of the rank table cannot be resolved" in reasons[0]
    assert reasons[1:] == ["no process answers at 192.0.2.1:1", "no process answers at 192.0.2.2:1"]
    assert asked == ["192.0.2.1", "192.0.2.2"]


@pytest.mark.parametrize(
    ("head", "part", "wanted"),
    [
        ("Content-Length: 200005", b'{"x":' + 200_000 * b"[", "does not answer as a worker of this version"),
        ("Connection: close", bytes(1 << 16), "does not answer as a worker of this version"),
        ("Content-Encoding: gzip", gzip.compress(bytes(MOST_INFO_NBYTES)), "does not answer as a worker"),
        ("Content-Length: 1000", b"", "no process answers at"),
    ],
    ids=["nested", "endless", "compressed", "silent"],
)
async def test_an_answer_of_any_kind_ends_nothing_but_its_instance(head: str, part: bytes, wanted: str) -> None:
    """Uses a real connection; a registered worker names the address to query, where any server may answer."""
    num_sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            while part and not writer.is_closing():
                writer.write(part)
                await writer.drain()
                num_sent += len(part)
                if not head.startswith("Connection"):
                    break
            if "Length: 1000" in head:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    timeouts = Timeouts(connect_timeout_s=0.5) if not part else Timeouts()
    async with server, httpx.AsyncClient(timeout=timeouts.connect_timeout_s, trust_env=False) as client:
        instance = Instance("e", "decode", "127.0.0.1", server.sockets[0].getsockname()[1], ["0"], True)
        membership = Membership(place_of(1, 1), [instance], RecordedMail(), timeouts, "model")
        await membership.ask(instance, client)
    assert wanted in instance.reason
    assert num_sent < 2 * MOST_INFO_NBYTES + (8 << 20), "the rest must not be read, except into socket buffers"


async def test_a_stranger_at_a_port_fails_one_instance() -> None:
    """Workers at each other's ports fail, too; if none is at its own port, the scheduler ends with an error."""
    place = place_of(1, 2)
    first, second, third = place.table.instances

    async def ask(*answering: Server) -> list[tuple[str, str]]:
        at_port = dict(zip((1, 2, 3), answering, strict=True))

        def answer(request: httpx.Request) -> httpx.Response:
            server = at_port[request.url.port or 0]
            ids = [device.device_id for device in server.device]
            info = info_of("x", "decode", server_ip=server.server_ip, device_ids=ids, state="loading")
            return httpx.Response(200, stream=httpx.ByteStream(msgspec.json.encode(info)))

        instances = instances_of(place, [1, 2, 3])
        membership = Membership(place, instances, RecordedMail(), Timeouts(), "model")
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            for instance in instances:
                await membership.ask(instance, client)
        return [(instance.state, instance.reason) for instance in instances]

    stranger = replace(first, device=tuple(replace(each, device_id="77") for each in first.device))
    (state, reason), *_ = await ask(stranger, second, third)
    assert (state, "devices 77" in reason) == ("failed", True)
    states = await ask(first, third, second)
    assert [reason.startswith("NODE_PORTS=1,2,3: ") for _, reason in states] == [False, True, True]
    with pytest.raises(ConfigError, match=r"^NODE_PORTS=1,2,3: .*list the ports in the order"):
        await ask(second, third, first)
