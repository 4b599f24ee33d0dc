"""LoRA adapters on the NPU path: every row uses its own adapter. Run by tests/model/test_npu.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from pd_cluster.errors import ConfigError
from pd_cluster.model.lora.device_addition import ActivationDevice, DeviceAddition
from pd_cluster.model.runner.memory_profile import nbytes_of_adapters
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import Request, RequestSpec
from tests.support.adapters import digest_of, loaded, make_adapter, merged
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, random_prompt, run
from tests.support.npu_cases import GREEDY, SIZES, calls, core_of

slow = pytest.mark.slow


__all__ = ["calls"]  # a fixture


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma3_text", marks=slow)])
def test_tokens_are_those_of_the_merged_model(architecture: str, tmp_path: Path) -> None:
    """Batches two adapters and the base model: prompts in chunks, and decoded rows that alternate between adapters."""
    folder = make_checkpoint(tmp_path / "base", architecture, head_dim=128, **SIZES)
    first = make_adapter(tmp_path / "a", folder, 1)
    second = make_adapter(tmp_path / "b", folder, 2, rank=3, use_rslora=True, only=r"\.[02]\.")
    models = {"": folder}
    for adapter in (first, second):
        digest = digest_of(adapter)
        models[digest] = merged(folder, adapter, tmp_path / f"merged-{adapter.name}")
    core, runner = core_of(folder, adapters=loaded(first, second))
    assert runner.graphs.decode is not None
    rng = random.Random(1)
    names = list(models)
    orders = [
        RequestSpec(random_prompt(rng, n), GREEDY, variant=names[i % 3]) for i, n in enumerate((1, 16, 41, 70, 5, 133))
    ]
    requests = [Request(f"r{i}", order, arrival_s=float(i)) for i, order in enumerate(orders)]
    run(core, requests)
    for variant, model in models.items():
        own = [request for request in requests if request.order.variant == variant]
        outputs = [request.output_token_ids for request in own]
        assert_all_same(model, [each.prompt_token_ids for each in own], outputs, GREEDY.max_tokens)


@slow
def test_steps_without_adapters_are_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "base", "llama", head_dim=128, **SIZES)
    adapter = make_adapter(tmp_path / "a", folder, 1)
    core, runner = core_of(folder, adapters=loaded(adapter))
    graphs = runner.graphs.decode
    assert graphs is not None
    steps: list[bool] = []
    compute = graphs.compute
    monkeypatch.setattr(graphs, "compute", lambda step, ids: steps.append(step.adapters is None) or compute(step, ids))
    digest = digest_of(adapter)
    run(core, [Request("r", RequestSpec([4, 5, 6], GREEDY, variant=digest))])
    assert steps == [], "steps with an adapter must run eagerly"
    run(core, [Request("s", RequestSpec([4, 5, 6], GREEDY))])
    assert len(steps) >= GREEDY.max_tokens - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wide_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, y = torch.randn(9, 4096).to(dtype), torch.randn(9, 6144).to(dtype)
    parts = [
        (at, torch.randn(16, 4096) * 0.02, torch.randn(at.stop - at.start, 16))
        for at in (slice(0, 4096), slice(5120, 6144))
    ]
    addition = DeviceAddition(parts, ActivationDevice(torch.device("cpu"), dtype))
    for rows in (slice(2, 6), torch.tensor([0, 3, 8])):
        found = y.clone()
        addition.add(x, found, rows)
        expected = y.double()
        for at, a, b in parts:
            added = x.double() @ a.double().T @ b.double().T
            expected[rows, at] += added[rows]
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < (0.005 if dtype == torch.float16 else 0.03)
        kept = [i for i in range(9) if i not in torch.arange(9)[rows].tolist()]
        assert torch.equal(found[kept], y[kept])


def test_the_pool_leaves_room_for_them(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "llama", head_dim=128, **SIZES)
    config = transformers.AutoConfig.from_pretrained(folder)
    settings = AdapterSettings(enable_lora=True, max_loras=2, max_lora_rank=8)
    nbytes = nbytes_of_adapters(config, settings, "bfloat16")
    # q and o: 64 + 512; k and v: 64 + 256; gate, up and down: 64 + 96
    assert nbytes == 2 * 8 * (2 * 576 + 2 * 320 + 3 * 160) * 3 * 2
    assert nbytes_of_adapters(config, AdapterSettings(), "bfloat16") == 0


def test_prompt_adapters_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", "llama", head_dim=128, **SIZES)
    with pytest.raises(ConfigError, match="--enable-prompt-adapter: prompt adapters run on CPUs and CUDA"):
        core_of(folder, adapters=AdapterSettings(enable_prompt_adapter=True))
