"""When a rank table is read again, instances join, leave and change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from pd_cluster.cluster.members.rank_table_place import Place
from pd_cluster.errors import ConfigError, InstanceNotFound, Refused
from pd_cluster.settings.process_configs import Credentials
from ranktable_tools import RankTable
from ranktable_tools.table_types import Server, server_group
from tests.support.elastic_world import ElasticWorld, busy, idle


async def test_instances_of_a_grown_table_join_and_others_leave() -> None:
    world = ElasticWorld()
    grown = ElasticWorld(num_prefill=3)
    world.place = grown.place
    assert await world.elastic.add("prefill-2", 7002) is world["prefill-2"]
    assert world["prefill-2"].device_ids == ["12"]
    again = await world.elastic.add("prefill-2", 7003)
    assert (again.port, len(world.names)) == (7003, 5), "the instance was not in the table"
    world.make_ready(again)
    with pytest.raises(Refused, match="prefill-2 already exists, at port 7003"):
        await world.elastic.add("prefill-2", 7004)
    with pytest.raises(Refused, match=r"port: 3 of 127.0.0.1 is the port of decode-0"):
        await world.elastic.add("prefill-2", 3)
    with pytest.raises(InstanceNotFound, match="has no prefill-3; it has prefill-0, "):
        await world.elastic.add("prefill-3", 7004)
    world = ElasticWorld(num_prefill=2, num_decode=2)
    world.place = ElasticWorld(num_prefill=3, num_decode=1).place
    busy(world["decode-1"])
    assert await world.elastic.reload() == "joining: prefill-2; leaving: decode-1"
    assert world["decode-1"].shown_state == "leaving"
    await world.membership.ask(world["prefill-2"], None)  # type: ignore[arg-type]  # nobody is asked
    assert world["prefill-2"].reason.startswith("its port is not known; pd-cluster instances add prefill-2 --port")
    assert await world.elastic.reload() == "joining: none; leaving: none"
    world.ports = [1, 2, 7002, 4]
    await world.elastic.reload()
    assert world["prefill-2"].port == 7002
    idle(world["decode-1"])
    world.elastic.tick()
    assert world.names == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]


def changed(world: ElasticWorld, change: Callable[[list[Server]], list[Server]]) -> Place:
    """Returns the world's table with changed prefill entries."""
    place = world.place
    groups = list(place.table.server_group_list)
    groups[1] = server_group("prefill", tuple(change(list(groups[1].server_list))))
    table = RankTable(place.table.version, place.table.status, tuple(groups), "table.json")
    return replace(place, table=table)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda servers: servers[1:], "table.json renames prefill-1 to prefill-0"),
        (lambda servers: servers[::-1], "table.json renames prefill-0 to prefill-1"),
        (lambda servers: [servers[0], replace(servers[1], server_ip="127.0.0.2")], "has other devices for prefill-1"),
    ],
)
async def test_a_table_that_renames_is_refused_whole(change: Callable[[list[Server]], list[Server]], said: str) -> None:
    world = ElasticWorld()
    world.place = changed(world, change)
    before = world.membership.place
    ways: list[Callable[[], Awaitable[object]]] = [world.elastic.reload, lambda: world.elastic.add("decode-1", 9)]
    for ask in ways:
        with pytest.raises(Refused, match=said) as caught:
            await ask()
        assert str(caught.value).endswith("; nothing has changed")
    assert world.membership.place is before
    found = [(each.port, each.shown_state) for each in world.membership.instances]
    assert found == [(port, "ready") for port in (1, 2, 3, 4)]


async def test_a_changed_table_that_cannot_be_used_is_refused() -> None:
    world = ElasticWorld()
    assert await world.elastic.reload() == "joining: none; leaving: none"
    world.place = ElasticWorld(num_prefill=3).place
    world.credentials = Credentials(b"t" * 32)  # as --derive-secret would give for another table
    with pytest.raises(Refused, match="do not use --derive-secret if the table may change; nothing has changed"):
        await world.elastic.add("prefill-2", 7002)
    assert len(world.names) == 4
    world = ElasticWorld()

    def read() -> Place:
        raise ConfigError("table.json: line 1: found '{', expected more")

    world.read_place = read
    with pytest.raises(Refused, match=r"^table.json: line 1: found '{', expected more; nothing has changed$"):
        await world.elastic.reload()
