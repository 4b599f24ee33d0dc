"""The models that `bench gpu` makes: whole, of the shape that was asked for, activations near one in every layer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open

from benchmarks.gpu.spec import QUICK_SHAPES, GpuShape
from benchmarks.peers.gpu_clock import timed_calls
from benchmarks.peers.gpu_kernels import launch
from benchmarks.peers.gpu_model import write_config, write_weights
from benchmarks.peers.gpu_profile import Read, busy_ms, covered_ms, page, profiled, write
from pd_cluster.devices.device import CPU

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


def test_calls_of_a_module_are_timed_and_nothing_is_left_behind() -> None:
    def double(number: int) -> int:
        return 2 * number

    module = SimpleNamespace(double=double)
    with timed_calls(module, ("double",)) as took_s:
        assert module.double(4) == 8
        assert took_s["double"] > 0
    assert module.double is double


def test_kernels_side_by_side_count_once() -> None:
    assert covered_ms([(0, 4000), (1000, 2000), (3000, 6000), (10000, 11000)]) == 7
    assert covered_ms([]) == 0


def test_a_page_has_every_kernel_and_the_bandwidth_of_products_and_attention() -> None:
    kernels = [(4.0, 2, "nvjet_tst_128x8"), (1.0, 2, "decode_kernel"), (0.5, 9, "norm_kernel")]
    lines = page(kernels, Read(weights=12e9, kv=2e9))
    assert [line.split()[-1] for line in lines[1:4]] == ["nvjet_tst_128x8", "decode_kernel", "norm_kernel"]
    assert lines[-2].split() == ["4.000", "12.0000", "3000.0", "products"]
    assert lines[-1].split() == ["1.000", "2.0000", "2000.0", "attention"]
    assert Read.of_decode(DEEP, 3, 10).kv == 30 * DEEP.kv_nbytes_per_token


def test_the_deciding_kernels_run_once_for_a_profiler() -> None:
    launch("cpu")


def test_a_profile_leaves_a_page_and_a_trace(tmp_path: Path) -> None:
    with profiled(CPU) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert busy_ms(profiler, CPU) > 0
    assert write(profiler, CPU, tmp_path / "profile-0.6B-decode", None) > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "profile-0.6B-decode.trace.json.gz",
        "profile-0.6B-decode.txt",
    ]
    assert "aten::mm" in (tmp_path / "profile-0.6B-decode.txt").read_text()
    with gzip.open(tmp_path / "profile-0.6B-decode.trace.json.gz") as trace:
        assert json.load(trace)["traceEvents"]
