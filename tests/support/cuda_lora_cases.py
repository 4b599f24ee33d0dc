"""LoRA adapters in Triton, interpreted or on a GPU, against float64, and whole models against merged ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.devices.device import CPU
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules
from pd_cluster.model.graphs.step_graphs import StepGraphs
from pd_cluster.model.kernels.attention_backend import triton_attention
from pd_cluster.model.kernels.cuda.linear.lora_tables import CudaTable
from pd_cluster.model.language_model.adapter_devices import to_tables
from pd_cluster.model.loading import model_loader
from pd_cluster.model.lora.adapted_linear import LowRank
from pd_cluster.model.lora.adapter_row_blocks import AdaptedBlocks, blocks_of
from pd_cluster.model.runner.model_adapters import ModelAdapters
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.adapters import loaded, make_adapter, merged
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, random_prompt, run
from tests.support.interpreted import SLOW_IF_INTERPRETED, choose_device

choose_device()

MODULES = [slice(0, 128), slice(128, 160), slice(160, 192)]  # queries, keys, values
RANKS = {1: (16, 16, 16), 2: (3, 0, 40), 5: (0, 8, 0)}  # adapter slot -> its rank in each module; 0: no adapter there
PLACES = {1: 7, 2: 0, 5: 3}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
GREEDY = Sampling(max_tokens=5, temperature=0.0)


def given(num_inputs: int, dtype: torch.dtype) -> tuple[CudaTable, dict[int, torch.Tensor]]:
    """Returns a table of adapters, and each slot's additional weight, float64 [num_outputs, num_inputs]."""
    table = CudaTable(MODULES, num_inputs, dtype, torch.get_default_device(), max_rank=40)
    whole = {}
    for slot, ranks in RANKS.items():
        parts, whole[slot] = [], torch.zeros(192, num_inputs, dtype=torch.float64)
        for outputs, rank in zip(MODULES, ranks, strict=True):
            if rank:
                a, b = torch.randn(rank, num_inputs), torch.randn(outputs.stop - outputs.start, rank) / num_inputs
                parts.append((outputs, LowRank(a, b)))
                whole[slot][outputs] = b.to(dtype).double() @ a.to(dtype).double()
        table.put(PLACES[slot], parts)
    return table, whole


def step_of(slots: list[int], padding: int = 0) -> AdaptedBlocks:
    rows, blocks = blocks_of(np.array(slots), PLACES)
    blocks = np.concatenate((blocks, np.zeros((padding, 3), dtype=np.int32)))
    return AdaptedBlocks(*(torch.tensor(each) for each in (rows, blocks)))


@pytest.mark.parametrize(
    ("num_inputs", "dtype"),
    [
        (1024, torch.float32),
        pytest.param(1024, torch.bfloat16, marks=SLOW_IF_INTERPRETED),
        pytest.param(4100, torch.float32, marks=SLOW_IF_INTERPRETED),
        (4100, torch.bfloat16),
    ],
    ids=str,
)
def test_each_row_gets_what_its_adapter_adds(num_inputs: int, dtype: torch.dtype) -> None:
    """One step mixes three adapters of different ranks and rows without one; a row has the same bits alone."""
    torch.manual_seed(num_inputs)
    table, whole = given(num_inputs, dtype)
    slots = [1, 0, 5, 2, 2, 1, 0, *[1] * 16, 2]
    x, base = torch.randn(len(slots), num_inputs).to(dtype), torch.randn(len(slots), 192).to(dtype)
    y = base.clone()
    table.add(x, y, step_of(slots, padding=2))
    for row, slot in enumerate(slots):
        if not slot:
            assert torch.equal(y[row], base[row])
            continue
        expected = base[row].double() + whole[slot] @ x[row].double()
        assert (y[row].double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    for row in (2, 5, 23):
        alone = base[row : row + 1].clone()
        table.add(x[row : row + 1], alone, step_of([slots[row]]))
        assert torch.equal(alone[0], y[row])


def test_a_dropped_adapter_adds_nothing_and_its_place_serves_another() -> None:
    table, _ = given(256, torch.float32)
    x, y = torch.randn(1, 256), torch.zeros(1, 192)
    table.drop(PLACES[5])
    table.add(x, y, step_of([5]))
    assert not y.any()
    table.put(PLACES[5], [(MODULES[2], LowRank(torch.ones(1, 256), torch.ones(32, 1)))])
    table.add(x, y, step_of([5]))
    assert torch.allclose(y[0, 160:], x.sum().expand(32), atol=1e-4)
    assert not y[0, :160].any()


@pytest.mark.parametrize("architecture", [pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "phi3", "gpt2")])
def test_tokens_are_those_of_merged_models(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches two adapters and the base model, in chunks and in graphs; one adapter is loaded after their capture."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU engines choose by themselves")
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: triton_attention())
    original = ModelAdapters.load_named

    def load_named(self: object, settings: AdapterSettings) -> None:
        to_tables(self._lora_needed.places, settings, CPU, "float32")  # type: ignore[attr-defined]
        original(self, settings)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelAdapters, "load_named", load_named)
    folder = make_checkpoint(tmp_path / "base", architecture)
    first = make_adapter(tmp_path / "a", folder, 1, rank=5)
    second = make_adapter(tmp_path / "b", folder, 2, rank=3, only=r"\.[02]\.")
    settings = loaded(first)
    core, model_runner = build_core(
        EngineConfig(model=str(folder), num_blocks=40, max_model_len=64, device="cpu", adapters=settings,
                     max_num_batched_tokens=16)
    )  # fmt: skip
    given = (model_runner.model, model_runner.pool, lambda run: run, GraphRules(8, 64))
    plain, adapted = DecodeGraphs(*given), DecodeGraphs(*given, max_loras=2)
    model_runner.graphs = StepGraphs(plain, adapted)
    rng = random.Random(3)

    def check(folders: dict[str, Path]) -> None:
        prompts = [random_prompt(rng, length) for length in (1, 5, 18)]
        orders = [RequestSpec(p, GREEDY, variant=v) for p, v in zip(prompts, [*folders] * 3, strict=False)]
        requests = [Request(f"r{i}", order, arrival_s=float(i)) for i, order in enumerate(orders)]
        run(core, requests)
        for request in requests:
            output = [request.output_token_ids]
            assert_all_same(folders[request.order.variant], [request.prompt_token_ids], output, GREEDY.max_tokens)

    one = LoraFolder.read(first, 16)
    models = {one.digest: merged(folder, first, tmp_path / "m-a"), "": folder}
    check(models)
    num_captured = adapted.num_captured
    assert num_captured > 0
    other = LoraFolder.read(second, 16)
    model_runner.held.load_adapter(other)
    check({other.digest: merged(folder, second, tmp_path / "m-b"), **models})
    check({"": folder})
    assert plain.num_captured > 0
