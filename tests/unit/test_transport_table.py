"""A transport is one table row and one module; all other code uses the row."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices.device import CPU, KINDS, Device
from pd_cluster.errors import LinkError
from pd_cluster.transport import in_process, link_factory, transport_table
from pd_cluster.transport.link_events import Landed
from pd_cluster.transport.transport_interface import KVReceiver, Peer, PostKey
from pd_cluster.transport.transport_table import (
    BY_NAME,
    TABLE,
    Transport,
    allowed,
    choices_for,
    help_text,
    same_host_choice,
)
from tests.support.transports import TOKEN, WAIT_S, Link

REFUSES_AS_ABSENT = {each.name for each in TABLE if each.package and importlib.util.find_spec(each.package) is None}


def test_names_are_each_there_once_and_choices_have_words() -> None:
    assert len(BY_NAME) == len(TABLE)
    assert {each.choice for each in TABLE if each.help} == {*transport_table.CHOICES} - {transport_table.AUTO}
    assert help_text().startswith("auto, ipc (GPUs or NPUs of one host), shm (same host), dist (NCCL, HCCL or gloo), ")


def test_every_kind_of_pool_has_a_way_within_a_host_and_beyond() -> None:
    """Transports of extras are used only if named, because they may open ports unasked, as UCX does."""
    assert [same_host_choice(kind) for kind in KINDS] == ["shm", "ipc", "ipc"]
    assert [choices_for(kind) for kind in KINDS] == [(way, "dist", "curve") for way in ("shm", "ipc", "ipc")]
    assert [each.name for each in allowed("dist")] == ["nccl", "hccl", "dist"]
    assert allowed("local") == (BY_NAME["local"],)
    assert [each.name for each in TABLE if each.package] == ["nixl"]
    assert "nixl" not in [each.name for each in allowed("auto")]
    assert [each.name for each in allowed("nixl")] == ["nixl"]
    assert [choices_for(kind, with_extras=True)[-1] for kind in KINDS] == ["nixl"] * len(KINDS)


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    assert BY_NAME["nixl"].why_not(CPU) == "nixl_cu13 is not installed: pip install 'pd-cluster[nixl]'"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_row_says_of_pools_what_its_module_says(row: Transport) -> None:
    """Row and module agree on which pools cannot be moved; other reasons may be a missing torch backend."""
    for kind in KINDS:
        if kind not in row.pools:
            assert row.why_not(Device(kind)), kind
    assert ("cpu" in row.pools and row.name not in REFUSES_AS_ABSENT) == (not row.why_not(CPU))


@pytest.mark.parametrize("name", ["local", "dist", "curve"])
@pytest.mark.parametrize("data", [b"", b"\x81\xa7address\x05", b"\xa3\xff\xfe\xfd", 4000 * b"\x91"])
def test_an_offer_that_makes_no_sense_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(LinkError, match=f"offer of {name} is invalid"):
        BY_NAME[name].why_not(CPU, wire.TransportOffer(transport=name, data=data))


def test_a_new_row_and_its_module_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewReceiver(in_process.LocalReceiver):
        name = "new"

    class NewEnds(in_process.LocalEnds):
        def receiver(self, peer: Peer, checksum: object, post: PostKey) -> KVReceiver:
            place = self._place
            return NewReceiver(place, peer, checksum)

    module = ModuleType("pd_cluster.transport.new")
    module.why_not, module.ends = in_process.why_not, NewEnds  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = Transport("new", "new", "new", KINDS, is_same_host=True, help="a test")
    monkeypatch.setattr(transport_table, "TABLE", (row, *TABLE))
    assert link_factory.allowed("auto")[0] == row
    assert "new (a test)" in help_text()
    link = Link("auto")
    assert link.await_ready().transport == "new"
    link.transfer([1, 2, 3], [7, 8, 9])
    assert isinstance(event := link.events.get(timeout=WAIT_S), Landed)
    assert event.first_tokens == [TOKEN]
    assert torch.equal(link.target.data[[7, 8, 9]], link.source.data[[1, 2, 3]])
    link.close()
