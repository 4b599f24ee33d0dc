"""A draft head's layers after the model's layers: which peers get them, and what a pool holds without them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pd_cluster import models, wire
from pd_cluster.cluster.instances.known_prefixes import KnownBlocks, Prompt, pool_kind_of
from pd_cluster.commands import check_command
from pd_cluster.devices.device import CPU
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.shipping import ShipGroup, ShipLimits, ShipSizes
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.stages.tier_stores import origin_of
from pd_cluster.errors import LinkError
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.disk_store import DiskStore
from pd_cluster.kv.kv_layout import (
    COLD,
    KVLayout,
    keys_and_values,
    latents,
    num_common_layers,
    stored_width,
    token_nbytes_of,
)
from pd_cluster.kv.kv_pool import KVPool, probe_content
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.kv.open_stores import open_disk, seal_of
from pd_cluster.kv.pool_compatibility import check_pair
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes, keys_of
from pd_cluster.model.language_model.cache_declaration import LayerCache, layout_of
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_settings import HandoverSettings
from pd_cluster.settings.speculation import Speculation
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.landing import Geometry, Lander
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.link_events import Arrived, Landed, LandFault
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from pd_cluster.wire import KVPiece, Plane
from tests.support.transports import NUM_BLOCKS, TOKEN, WAIT_S, Link

OWN = KVLayout(num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")
HEADS = [("", "a"), ("a", ""), ("a", "b"), ("a", "a")]
NUM_TOKENS = 10


def with_head(layout: KVLayout, draft_head: str) -> KVLayout:
    more = int(bool(draft_head))
    return dataclasses.replace(
        layout, num_layers=layout.num_layers + more, num_draft_layers=more, draft_head=draft_head
    )


def filled(layout: KVLayout, seed: int) -> KVPool:
    """Returns a pool with random content in all blocks, as after many requests."""
    pool = KVPool(layout, NUM_BLOCKS)
    for block in range(NUM_BLOCKS):
        pool.put_block(block, probe_content(layout, 100 * seed + block))
    return pool


# ---- layouts


def test_a_layout_says_which_layers_are_a_heads() -> None:
    """Covers a head that lacks one of the model's planes."""
    heads = LayerCache(2, keys_and_values(8))
    assert layout_of((heads, heads), 4, "float32") == OWN
    assert layout_of((heads, heads, heads), 4, "float32", "a") == with_head(OWN, "a")
    latent = LayerCache(1, latents(16, 8))
    indexed = LayerCache(1, (*latent.planes, Plane("index", 4)))
    sparse = layout_of((indexed, indexed, latent), 4, "float32", "a")
    assert sparse.plane_layers == ((0, 1, 2), (0, 1, 2), (0, 1))
    assert sparse.without_head == layout_of((indexed, indexed), 4, "float32")
    only_head = layout_of((latent, latent, indexed), 4, "float32", "a")
    assert only_head.without_head == layout_of((latent, latent), 4, "float32")
    for layout in (sparse, only_head, OWN):
        assert KVLayout.from_info(layout.to_info()) == layout
        packed = msgspec.msgpack.encode(layout.to_info())
        assert msgspec.msgpack.decode(packed, type=wire.LayoutInfo) == layout.to_info()
    assert msgspec.msgpack.encode(OWN.to_info()) == msgspec.msgpack.encode(with_head(OWN, "").to_info())


def test_pools_are_a_pair_by_the_layers_that_travel() -> None:
    for theirs, ours in HEADS:
        source, target = with_head(OWN, theirs), with_head(OWN, ours)
        check_pair(source, target)
        num_layers = 3 if theirs == ours else 2
        assert num_common_layers(source, target) == num_layers
        assert token_nbytes_of(source.to_info(), target.to_info()) == num_layers * OWN.token_nbytes // 2
        assert PoolRoute(source, target).precision == (COLD if ours == "a" != theirs or ours == "b" else "")
    cold = dataclasses.replace(with_head(OWN, "a"), dtype="bfloat16")
    assert PoolRoute(OWN, cold).precision == f"float32, {COLD}"
    assert PoolRoute(OWN, with_head(OWN, "a"), wants_int8=True).precision == f"int8, {COLD}"
    deeper = dataclasses.replace(with_head(OWN, "a"), num_layers=4)
    for source, target, words in [
        (deeper, with_head(OWN, "a"), "num_layers is 4 on the prefill instance and 3 on"),
        (deeper, OWN, "num_layers is 3 on the prefill instance and 2 on"),
        (OWN, dataclasses.replace(with_head(OWN, "a"), num_kv_heads=1), "num_kv_heads is 2"),
        (deeper, dataclasses.replace(deeper, num_draft_layers=2), "num_draft_layers is 1 on"),
        (dataclasses.replace(OWN, draft_head="a"),) * 2 + ("0 of 2 layers belong to the draft head, which is a",),
        (dataclasses.replace(OWN, num_draft_layers=1),) * 2 + ("1 of 2 layers belong to the draft head, which is",),
        (dataclasses.replace(with_head(OWN, "a"), num_draft_layers=3),) * 2 + ("3 of 3 layers",),
    ]:
        with pytest.raises(LinkError, match=words):
            check_pair(source, target)


# ---- pools and links


def tokens_of(pool: KVPool, table: Sequence[int], layer: int) -> list[torch.Tensor]:
    """Returns the prompt's content in each plane, [NUM_TOKENS, heads, stored width]."""
    size = pool.layout.block_size
    rows = [(table[at // size], at % size) for at in range(NUM_TOKENS)]
    return [torch.stack([plane[row] for row in rows]) for plane in pool.memory.planes(layer)]


def ship(link: Link, table: list[int], into: list[int], num_layers: int) -> None:
    """Sends eight tokens at once and the others layer by layer."""
    at = 8 // link.source.layout.block_size
    pieces = [KVPiece(0, 8, 0, num_layers, table[:at])]
    pieces += [KVPiece(8, NUM_TOKENS - 8, layer, 1, table[at:]) for layer in range(num_layers)]
    link.receive.begin("t", into, 0, NUM_TOKENS)
    for index, piece in enumerate(pieces):
        link.send.ship("t", index, piece)
    link.send.ship_end(wire.KVEnd("t", len(pieces), NUM_TOKENS, [TOKEN]))


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alike": ({}, {}),
    "codes": ({"dtype": "int8"}, {"dtype": "int8"}),
    "codes, larger blocks": ({"dtype": "int8"}, {"dtype": "int8", "block_size": 8}),
    "smaller blocks, 2 to 1 ranks": ({"block_size": 8, "tp_size": 2}, {}),
    "1 to 2 ranks": ({}, {"tp_size": 2}),
}


@pytest.mark.parametrize(("theirs", "ours"), HEADS)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("transport", ["shm", "dist"])
def test_heads_layers_travel_between_equal_heads_and_are_cleared_otherwise(
    transport: str, pair: str, theirs: str, ours: str
) -> None:
    change, changed = PAIRS[pair]
    source = dataclasses.replace(with_head(OWN, theirs), **change)
    target = dataclasses.replace(with_head(OWN, ours), **changed)
    num_layers, is_same = num_common_layers(source, target), theirs == ours
    table, into = [5, 6, 2][: source.num_blocks_for(NUM_TOKENS)], [9, 10, 4][: target.num_blocks_for(NUM_TOKENS)]
    senders = [filled(source.of_rank(rank), 1 + rank) for rank in range(source.tp_size)]
    for rank in range(target.tp_size):
        pool = filled(target.of_rank(rank), 7)
        before = [[plane.clone() for plane in pool.memory.planes(layer)] for layer in range(target.num_layers)]
        for sender in senders:
            route = PoolRoute(sender.layout, pool.layout, one_sided=transport == "shm")
            link = Link(transport, pools=(sender, pool))
            assert link.await_ready().precision == ("" if is_same or not ours else COLD)
            ship(link, table, into, num_layers)
            landed = link.events.get(timeout=WAIT_S)
            widths = sum(stored_width(source.dtype, plane.width) for plane in OWN.planes)
            num_sent = len(table) * source.block_size if route.is_verbatim else NUM_TOKENS
            nbytes = num_layers * num_sent * route.num_heads * widths * (1 if source.dtype == "int8" else 4)
            assert landed == Landed("t", [TOKEN], nbytes)
            assert link.send.sent_nbytes == link.receive.received_nbytes == nbytes
            for layer in range(num_layers):
                for sent, found in zip(tokens_of(sender, table, layer), tokens_of(pool, into, layer), strict=True):
                    (heads_there,), (heads_here,) = (
                        route.heads_in(each.layout, OWN.planes[:1]) for each in (sender, pool)
                    )
                    assert torch.equal(sent[:, heads_there], found[:, heads_here])
            link.close()
        others = [block for block in range(NUM_BLOCKS) if block not in into]
        for layer in range(target.num_layers):
            for plane, was in zip(pool.memory.planes(layer), before[layer], strict=True):
                assert torch.equal(plane[others], was[others]), "a block outside the landing has changed"
                assert was[into].any()
                assert bool(plane[into].any()) == (layer < num_layers)


def test_layers_of_pools_that_lie_layer_by_layer_are_cleared_too() -> None:
    layout = with_head(OWN, "a")
    pool = filled(layout, 1)
    layers = LayerMajor(
        layout, [torch.ones(shape, dtype=TORCH_DTYPES["float32"]) for shape in LayerMajor.shapes(layout, 6)]
    )
    pool.memory = layers
    pool.clear([1, 2, 4], first_layer=2)
    assert all(plane.all() for layer in range(2) for plane in layers.planes(layer))
    cleared = [[bool(plane[block].any()) for block in range(6)] for plane in layers.planes(2)]
    assert cleared == [[True, False, False, True, False, True]] * 2


# ---- a step of P


class Ports:
    """P's links to instances with and without its head; each delivers to a real Lander."""

    route: PoolRoute
    name: wire.TransportName = "local"

    def __init__(self) -> None:
        self.num_layers = {"with": 3, "without": 2, "without, late": 2}
        self.shipped: dict[str, list[tuple[int, int, int, int]]] = {conn: [] for conn in self.num_layers}
        self.events: dict[str, list[object]] = {conn: [] for conn in self.num_layers}
        self.chunks: list[wire.KVChunk] = []  # chunks sent to "with"
        self.copies = Copies(CPU)
        self.landers = {conn: Lander(self, Geometry(most, 4, 4)) for conn, most in self.num_layers.items()}  # type: ignore[arg-type]

    def link_to(self, peer: str) -> str:
        return peer

    def limits(self, conn: str, group: int) -> ShipLimits:
        return ShipLimits(4, 1 << 20, self.num_layers[conn])

    def ship(self, conn: str, group: int, transfer_id: str, index: int, piece: KVPiece) -> None:
        self.shipped[conn].append((piece.first_token, piece.stop_token, piece.first_layer, piece.stop_layer))
        chunk = wire.KVChunk(transfer_id, index, piece, 64, 0)
        self.chunks += [chunk] if conn == "with" else []
        self.events[conn].append(self.landers[conn].land(0, chunk))

    def ship_end(self, conn: str, group: int, end: wire.KVEnd) -> None:
        self.events[conn].append(self.landers[conn].land(0, end))

    def send(self, *_: object) -> None: ...

    drop = receive = export_ended = send

    def progress_s(self, conn: str) -> float:
        return 0.0


def test_a_step_ends_by_its_last_layer_or_by_its_heads_as_the_peer_has_it() -> None:
    """A peer with the head accepts no end before the head's layer, which comes last; others end at the model's last."""
    ports = Ports()
    scheduler = StepScheduler([LayerGroup(BlockPool(16))], StepSizes(4, 4, 32))
    sizes = ShipSizes((ShipGroup(4, 64),), 1)
    exports = Exports(ports, ports, TransferTerms(lambda: 0.0, Timeouts()), sizes)  # type: ignore[arg-type]
    requests = [
        Request(conn, RequestSpec([1] * 10, Sampling(max_tokens=4)), leg="prefill", transfer_id=conn, peer=conn)
        for conn in ports.shipped
    ]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.plan()
    for request in plan.admitted:
        exports.admitted(request)
        ports.landers[request.peer].begin(request.transfer_id, [0, 1, 2], 0, 10)
    for conn in ("with", "without"):
        exports.on_credit(conn, wire.Credit(conn, [0]))
    assert exports.computing(plan.chunks)
    exports.layers_done(1)
    exports.layers_done(2)
    by_layers = [(0, 10, 0, 1), (0, 10, 1, 2)]
    assert ports.shipped == {"with": by_layers, "without": by_layers, "without, late": []}
    assert ports.events == {"with": [None, None], "without": [None, Arrived("without")], "without, late": []}
    early = Lander(ports, Geometry(3, 4, 4))  # type: ignore[arg-type]
    early.begin("with", [0, 1, 2], 0, 10)
    for chunk in ports.chunks:
        early.land(0, chunk)
    fault = early.land(0, wire.KVEnd("with", 2, 10, [TOKEN]))
    assert isinstance(fault, LandFault), "a transfer was complete without its head's layer"
    assert "10 of 10 tokens were missing" in fault.reason
    exports.on_credit("without, late", wire.Credit("without, late", [0]))
    exports.layers_done(3)
    assert ports.shipped == {
        "with": [*by_layers, (0, 10, 2, 3)],
        "without": by_layers,
        "without, late": [(0, 10, 0, 2)],
    }
    scheduler.computed(plan)
    for request in requests:
        exports.computed(request, [TokenOutput(request.request_id, 0, 0, 0, 5)])
        assert isinstance(ports.events[request.peer][-1], Landed)


# ---- identity


def test_a_tier_of_files_gives_no_block_to_another_head(tmp_path: Path) -> None:
    """Block hashes do not include the head, so the tier's seal must separate heads, also for equal block sizes."""
    content, block = b"c" * 32, memoryview(bytearray(b"x" * with_head(OWN, "a").block_nbytes))

    def opened(folder: Path, draft_head: str) -> DiskStore:
        layout = dataclasses.replace(with_head(OWN, draft_head), num_layers=3)
        seal = seal_of([b"s" * 32], layout, ["weights"])
        return open_disk(HandoverSettings(kv_disk_cache=str(folder)), "d", seal, 0)

    for owner, reader in itertools.product(("", "a"), ("", "a", "b")):
        folder = tmp_path / f"{owner} {reader}"
        writing = opened(folder, owner)
        assert writing.put(content, block)
        writing.close()
        reading, into = opened(folder, reader), memoryview(bytearray(len(block)))
        is_own = reader == owner
        assert reading.read_index() == [content] * is_own
        assert reading.get(content, into) == is_own
        assert (into == block) == is_own
        reading.close()


def test_every_byte_of_a_heads_weights_counts_for_tiers(tmp_path: Path) -> None:
    """A head's identity only samples its files, but a tier's origin must depend on every byte."""
    weights, alone = tmp_path / "model.safetensors", EngineConfig(model=str(Path(models.__path__[0]) / "tiny-chat"))
    config = msgspec.structs.replace(alone, speculation=Speculation(methods=("eagle3",), model=str(tmp_path)))
    runner: Any = SimpleNamespace(device=CPU)
    origins = [origin_of(alone, runner)]
    for byte in b"ab":
        weights.write_bytes(bytes([0, byte]))
        origins.append(origin_of(config, runner))
    assert origins[1][2:] == origins[2][2:] == origins[0][1:]
    assert len({origin[1] for origin in origins}) == 3


def test_check_says_what_a_head_means_for_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    for method, says in (("mtp", True), ("ngram", False)):
        check_command.run({"PD_CLUSTER_SERVE_SPECULATIVE_CONFIG": f'{{"method": "{method}"}}'})
        assert ("its layer is part of the KV cache" in capsys.readouterr().out) == says


def test_blocks_of_another_head_have_other_hashes_for_instances_and_for_routing() -> None:
    order, identity = RequestSpec([1] * 9, Sampling()), "m"
    roots = {head: PrefixScope(identity, Numerics(), head).root(order) for head in ("", "a", "b")}
    assert PrefixScope(identity, Numerics()).root(order) == roots[""]
    assert len({*roots.values(), PrefixScope(identity, Numerics(), "a").root(order, COLD)}) == 4
    for owner, root in roots.items():
        known = KnownBlocks()
        known.apply(wire.CacheKeys(added=keys_of(chain_hashes(root, [1] * 8, 4))))
        for reader in roots:
            info = InstanceInfo(
                name="p",
                role="prefill",
                state="ready",
                server_ip="",
                device_ids=[],
                epoch=1,
                pid=1,
                model_identity=identity,
                layout=with_head(OWN, reader).to_info(),
            )
            pool = pool_kind_of(info)
            assert pool is not None
            assert Prompt(order).num_cached(pool, known) == (8 if reader == owner else 0)
