"""The models that `bench gpu` makes: whole, of the shape that was asked for, activations near one in every layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from pd_cluster.bench.gpu_spec import QUICK_SHAPES, GpuShape
from pd_cluster.bench.peers.gpu_clock import LaunchClock
from pd_cluster.bench.peers.gpu_model import write_config, write_weights
from pd_cluster.device import CPU

DEEP = GpuShape(
    name="deep",
    family="llama",
    num_layers=24,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=320,
)


@pytest.mark.parametrize("shape", [*QUICK_SHAPES, DEEP], ids=lambda shape: str(shape.name))
def test_transformers_loads_every_weight_and_no_activation_runs_away(tmp_path: Path, shape: GpuShape) -> None:
    write_config(shape, tmp_path)
    write_weights(shape, tmp_path, CPU)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name)
    assert sum(weight.numel() for weight in model.parameters()) == shape.num_parameters + norms
    with torch.inference_mode():
        output = model(torch.arange(259, 319)[None], output_hidden_states=True)
    assert all(0.05 < states.std() < 5 for states in output.hidden_states)
    assert 0.3 < output.logits.std() < 3


def test_shards_are_what_the_library_reads(tmp_path: Path) -> None:
    """Two layers a file, and the index names each file's tensors."""
    write_weights(DEEP, tmp_path, CPU)
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2 + DEEP.num_layers // 2
    for file in files:
        with safe_open(file, "pt") as shard:
            assert sorted(shard.keys()) == sorted(name for name, at in names.items() if at == file.name)
            assert all(shard.get_tensor(name).dtype == torch.bfloat16 for name in shard.keys())  # noqa: SIM118


def test_a_clock_counts_what_it_is_put_around_and_leaves_nothing_behind() -> None:
    class Runner:
        calls = 0

        def forward(self, number: int) -> int:
            self.calls += 1
            return 2 * number

    runner = Runner()
    with LaunchClock(runner, CPU) as clock:
        assert runner.forward(4) == 8
        assert clock.busy_s() > 0
        clock.forget()
        assert clock.busy_s() == 0
    assert runner.forward(5) == 10
    assert runner.calls == 2
    assert clock.busy_s() == 0
