"""The NIXL transport with a fake agent: places of a piece, ends of reads, valid offers, and quarantine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.transport import nixl_agent
from pd_cluster.transport.nixl_agent import Agent, Ranges, ReadBuffers, ReadState, RemoteAgent, ranges_at
from pd_cluster.transport.nixl_network import devices_at, interface_of
from pd_cluster.transport.nixl_offer import AgentOffer, ByteRanges, byte_ranges_of, cut

NAME = "a" * 32


def bytes_of(places: ByteRanges) -> list[int]:
    return [at for offset, nbytes in places for at in range(offset, offset + nbytes)]


def test_places_of_a_piece_are_its_bytes_in_order() -> None:
    small = KVLayout(num_layers=4, num_kv_heads=1, planes=keys_and_values(2), block_size=2, dtype="float16")
    layer = small.block_nbytes // 4
    for seed in range(5):
        rng = random.Random(seed)
        first = rng.randrange(4)
        piece = wire.KVPiece(0, 12, first, rng.randint(1, 4 - first), [])
        both = ([rng.randrange(9) for _ in range(6)], rng.sample(range(20), 6))
        found = [byte_ranges_of(small, piece, blocks) for blocks in both]
        for blocks, places in zip(both, found, strict=True):
            starts = [block * small.block_nbytes + first * layer for block in blocks]
            assert bytes_of(places) == [start + at for start in starts for at in range(piece.num_layers * layer)]
        pairs = cut(*found)
        assert [bytes_of(each) for each in pairs] == [bytes_of(each) for each in found]
        assert [nbytes for _, nbytes in pairs[0]] == [nbytes for _, nbytes in pairs[1]]
    whole = wire.KVPiece(0, 6, 0, 4, [])
    assert byte_ranges_of(small, whole, [5, 6, 7]) == [(5 * small.block_nbytes, 3 * small.block_nbytes)], "one range"


class FakeNixl:
    """A fake agent controlled by tests: states by handle, errors by name."""

    def __init__(self) -> None:
        self.states: dict[str, str | Exception] = {}
        self.removed: list[str] = []
        self.posting: Exception | None = None
        self.is_gone = False

    def register_memory(self, *_: Any) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return b"own"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata[:32]

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        return rows

    def initialize_xfer(self, *_: Any) -> Any:
        handle = type("Handle", (), {"name": f"h{len(self.states)}", "release": lambda self: None})()
        self.states[handle.name] = "PROC"
        return handle

    def transfer(self, handle: Any) -> None:
        if self.posting is not None:
            raise self.posting

    def check_xfer_state(self, handle: Any) -> str:
        state = self.states[handle.name]
        if isinstance(state, Exception):
            raise state
        return state

    def send_notif(self, name: str, notice: bytes) -> None:
        if self.is_gone:
            raise disconnected()


def disconnected() -> Exception:
    return type(nixl_agent.DISCONNECT, (Exception,), {})("NIXL_ERR_REMOTE_DISCONNECT")


def make_agent(monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, FakeNixl]:
    fake = FakeNixl()
    monkeypatch.setattr(nixl_agent, "make_agent", lambda name: fake)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return Agent("127.0.0.1", [], ReadBuffers(16, False)), fake


def read(agent: Agent, peer: RemoteAgent) -> Any:
    ranges: Ranges = ranges_at(0, [(0, 8)], "DRAM", 0)
    return agent.read(peer, ranges, ranges, b"")


def test_only_an_end_or_a_dead_peer_ends_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, fake = make_agent(monkeypatch)
    peer = agent.attach(NAME, NAME.encode() + b"rest")
    first, second, third = (read(agent, peer) for _ in range(3))
    fake.states["h0"] = "DONE"
    assert [agent.look_at(each) for each in (first, second)] == [ReadState.DONE, ReadState.UNDER_WAY]
    assert (first.is_over, second.is_over) == (True, False)
    fake.states["h1"] = disconnected()
    assert agent.look_at(second) is ReadState.FAILED
    assert not second.is_over, "another read of this peer is in progress and uses its agent"
    with pytest.raises(LinkError, match="failed"):
        read(agent, peer)
    with pytest.raises(LinkError, match="being closed"):
        agent.attach(NAME, NAME.encode() + b"rest")
    fake.states["h2"] = disconnected()
    agent.look_at(third)
    assert second.is_over
    assert third.is_over
    assert fake.removed == [NAME]
    agent.detach(peer)
    assert fake.removed == [NAME]
    assert not agent.attach(NAME, NAME.encode() + b"rest").has_failed


@pytest.mark.parametrize("at_post", [False, True])
def test_an_error_that_is_no_disconnection_proves_nothing(monkeypatch: pytest.MonkeyPatch, at_post: bool) -> None:
    monkeypatch.setattr(nixl_agent, "ASK_S", 0.0)
    agent, fake = make_agent(monkeypatch)
    peer = agent.attach(NAME, NAME.encode())
    fake.posting = RuntimeError("NIXL_ERR_BACKEND") if at_post else None
    failed = read(agent, peer)
    fake.states["h0"] = RuntimeError("NIXL_ERR_BACKEND")
    for _ in range(3):
        assert agent.look_at(failed) is ReadState.FAILED
    agent.detach(peer)
    assert not failed.is_over
    assert not fake.removed
    fake.is_gone = True
    agent.look_at(failed)
    assert failed.is_over
    assert fake.removed == [NAME]


def test_a_foreign_or_changed_metadata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = make_agent(monkeypatch)
    with pytest.raises(LinkError, match="not the one in its metadata"):
        agent.attach("b" * 32, NAME.encode())
    agent.attach(NAME, NAME.encode())
    with pytest.raises(LinkError, match="changed"):
        agent.attach(NAME, NAME.encode() + b"2")


def test_buffers_are_taken_once_and_run_out_by_name() -> None:
    slots = ReadBuffers(8, False)
    taken = [slots.take(0.0) for _ in range(nixl_agent.NUM_SLOTS)]
    assert len(set(taken)) == nixl_agent.NUM_SLOTS
    with pytest.raises(LinkError, match="all 32 buffers"):
        slots.take(0.0)
    slots.release(taken[3])
    assert slots.take(0.0) == taken[3]
    assert slots.ranges(3, [(2, 4)]).rows.tolist() == [[slots.buffers[3].data_ptr() + 2, 4, 0]]


@pytest.mark.parametrize(
    "change",
    [{"kind": "FILE"}, {"agent": "x"}, {"metadata": bytes(4000)}, {"pool": -1}, {"num_buffers": 0}, {"lane": b""}],
)
def test_an_offer_is_bounded(change: dict[str, Any]) -> None:
    fields = {"agent": NAME, "metadata": b"m", "kind": "DRAM", "device": 0, "pool": 1, "buffers": 1, "num_buffers": 1}
    good = AgentOffer(**fields, buffer_nbytes=1, lane=bytes(16))  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=AgentOffer) == good
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(good, **change)), type=AgentOffer)


def test_ucx_is_bound_to_the_cluster_s_interface(tmp_path: Path) -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") == "lo"
    with pytest.raises(LinkError, match=r"no network interface has the address 198\.51\.100\.7"):
        interface_of("198.51.100.7")
    folder = tmp_path / "lo" / "device" / "infiniband" / "mlx5_1"
    folder.mkdir(parents=True)
    (tmp_path / "lo" / "dev_port").write_text("1\n")
    assert devices_at("127.0.0.1", tmp_path) == ["lo", "mlx5_1:2"]
