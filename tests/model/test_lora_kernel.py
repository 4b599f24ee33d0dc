"""The C kernel that adds adapters to linear layers, against products in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pd_cluster.model.lora.adapted_linear import LinearAdapters, LowRank, StepRows
from pd_cluster.native import lora_products as native

pytestmark = pytest.mark.skipif(not native.LoraTable.is_possible(), reason="without the C kernels")

# Input features, and the outputs of each module of a layer with its rank; None: the adapter has nothing there.
LAYERS: dict[str, tuple[int, list[tuple[int, int | None]]]] = {
    "queries, keys and values": (1024, [(1024, 16), (256, 16), (256, 16)]),
    "wide": (8192, [(2048, 64)]),
    "gate and up, one without": (2048, [(5632, None), (5632, 8)]),
    "sizes that fill no vector": (1037, [(77, 5), (130, 17), (3, 1)]),
    "fewer inputs than a vector": (3, [(5, 2)]),
}


def outputs_of(modules: Sequence[tuple[int, int | None]]) -> list[slice]:
    stops = np.cumsum([size for size, _ in modules]).tolist()
    return [slice(stop - size, stop) for stop, (size, _) in zip(stops, modules, strict=True)]


class Layer:
    """A linear layer with adapters in slots 1, 2, …, and their matrices."""

    def __init__(self, name: str, num_adapters: int) -> None:
        self.in_features, modules = LAYERS[name]
        self.outputs = outputs_of(modules)
        self.out_features = self.outputs[-1].stop
        self.site = LinearAdapters(StepRows())
        assert self.site.table is not None
        self.matrices: dict[int, list[tuple[slice, LowRank]]] = {}
        rng = torch.Generator().manual_seed(0)
        for slot in range(1, num_adapters + 1):
            parts = []
            for at, (size, rank) in zip(self.outputs, modules, strict=True):
                if rank is not None:
                    a = torch.randn(rank, self.in_features, generator=rng) / self.in_features**0.5
                    parts.append((at, LowRank(a, torch.randn(size, rank, generator=rng))))
            self.matrices[slot] = parts
            self.site.put(slot, parts)
        self.x = torch.randn(64, self.in_features, generator=rng)
        self.y = torch.randn(64, self.out_features, generator=rng)

    def add(self, rows: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """Returns y of these rows after a step in which row `rows[i]` has the adapter `slots[i]`."""
        self.site.rows.begin(np.array(slots), np.ones(len(slots), dtype=np.int64))
        return self.site.add(self.x[list(rows)], self.y[list(rows)].clone())

    def exact(self, row: int, slot: int) -> torch.Tensor:
        y = self.y[row].double()
        for at, low in self.matrices.get(slot, []):
            y[at] += low.b.double() @ (low.a.double() @ self.x[row].double())
        return y


@pytest.mark.parametrize("name", LAYERS)
def test_products(name: str) -> None:
    layer = Layer(name, 5)
    rng = random.Random(1)
    slots = [rng.randrange(6) for _ in range(64)]
    result = layer.add(range(64), slots)
    for row, slot in enumerate(slots):
        assert (result[row].double() - layer.exact(row, slot)).abs().max() < 2e-5 * layer.exact(row, slot).abs().max()
        assert torch.equal(result[row], layer.y[row]) == (slot == 0)


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(name: str) -> None:
    layer = Layer(name, 3)
    rng = random.Random(2)
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            slots = [rng.randrange(4) for _ in range(64)]
            order = rng.sample(range(64), 64)
            together = layer.add(order, [slots[row] for row in order])
            torch.set_num_threads(1)
            for at, row in enumerate(order):
                assert torch.equal(layer.add([row], [slots[row]])[0], together[at])
    finally:
        torch.set_num_threads(num_threads)


def test_slots_come_and_go_beside_steps() -> None:
    """An empty slot adds nothing, a dropped one frees its memory, and later slots may have much higher numbers."""
    layer = Layer("sizes that fill no vector", 2)
    table = layer.site.table
    assert table is not None
    assert torch.equal(layer.add([0], [99])[0], layer.y[0])
    parts = layer.matrices[1]
    layer.site.put(1000, parts)
    assert torch.equal(layer.add([5], [1000]), layer.add([5], [1]))
    layer.site.drop(1)
    assert torch.equal(layer.add([5, 6], [1, 2])[0], layer.y[5])
    assert set(table.kept) == {2, 1000}
