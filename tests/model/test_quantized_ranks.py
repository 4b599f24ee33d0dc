"""Layers that quantize their inputs have one rank's bits on several ranks, however rows are divided.

Outliers are in the last rank's part, so that a separate scale for each part would change the other ranks' codes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.layers.whole_rows import WholeRows
from pd_cluster.model.parallel.rank_group import Group, Rendezvous, join
from pd_cluster.model.weights.quantized_weight import Int8Weight, W4A8Weight
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from tests.model.test_lora_targets import EXPERTS, written
from tests.support.adapters import loaded
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import make_core, random_prompt, run
from tests.support.quantized import INT8_FORMATS, OUTLIER, rewritten, with_outliers
from tests.support.ranks import WAIT_S, ranks

GREEDY = Sampling(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]
SETTINGS: dict[str, Any] = {"num_blocks": 64, "max_num_batched_tokens": 24}
# 1,024 and 2,048 inputs of row layers, heads of 128
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
slow = pytest.mark.slow


def outputs_of(core: EngineCore) -> list[list[TokenOutput]]:
    """Returns tokens with logprobs, whose bits depend on the logits' bits."""
    requests = [Request(f"r{i}", RequestSpec(prompt, GREEDY), arrival_s=float(i)) for i, prompt in enumerate(PROMPTS)]
    found = run(core, requests)
    return [found[f"r{i}"][0] for i in range(len(PROMPTS))]


def assert_same_bits(folder: Path, sizes: tuple[int, ...] = (2, 4), **settings: Any) -> None:
    settings = SETTINGS | settings
    expected = outputs_of(make_core(folder, **settings))
    for size in sizes:
        with ranks(folder, size, **settings) as core:
            assert outputs_of(core) == expected, f"{size} ranks"


# ---- layers


@pytest.fixture(params=[2, 3])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> list[Group]:
    size: int = request.param
    places = [Rendezvous(str(tmp_path / "ranks"), rank, size, WAIT_S, WAIT_S) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, places, timeout=WAIT_S))


def on_all(groups: list[Group], compute: Callable[[Group], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(compute, groups, timeout=WAIT_S))


@pytest.mark.parametrize("shape", [(1, 5), (7, 4096), (2, 3, 8), (0, 4)])
def test_rows_are_gathered_to_all(groups: list[Group], shape: tuple[int, ...]) -> None:
    parts = [torch.randn(shape) for _ in groups]
    found = on_all(groups, lambda group: group.gather_to_all(parts[group.rank]))
    assert all(torch.equal(each, torch.cat(parts, dim=-1)) for each in found)


@pytest.mark.parametrize("form", ["int8", "w4a8", "static"])
def test_a_layer_s_bits_are_those_of_one_rank(groups: list[Group], form: str) -> None:
    """Covers outputs not divisible by three, zero rows, rows with NaN on one rank, and batch invariance."""
    torch.manual_seed(1)
    num_inputs, num_outputs = 1536, 1000
    codes = torch.randint(-8 if form == "w4a8" else -127, 8 if form == "w4a8" else 128, (num_outputs, num_inputs))
    bias, scales = torch.randn(num_outputs), torch.rand(num_outputs, num_inputs // 128)

    def layer(outputs: slice = slice(None)) -> Any:
        own = codes[outputs].to(torch.int8), scales[outputs], bias[outputs], torch.float32
        if form == "w4a8":
            return W4A8Weight(*own).linear()
        inputs = torch.tensor([0.05, 3.0]) if form == "static" else None
        return Int8Weight(own[0], own[1][:, 0].contiguous(), own[2], torch.float32, inputs).linear()

    x = torch.randn(9, num_inputs)
    x[:, -100:] *= OUTLIER
    x[2], x[4, 7] = 0, torch.nan if form != "static" else 1.0
    expected = layer()(x)

    def on(group: Group) -> torch.Tensor:
        own = group.rank * num_outputs // group.size, (group.rank + 1) * num_outputs // group.size
        rows = WholeRows(group, own, num_outputs)
        part = rows.around(layer(slice(*own)))
        features = rows.part(num_inputs // group.size)
        found = [group.sum(part(x[at, features])) for at in (slice(0, 9), slice(3, 4))]
        assert torch.equal(found[1], found[0][3:4])
        return found[0]

    for found in on_all(groups, on):
        assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert found.isnan().any(-1).nonzero().flatten().tolist() == ([] if form == "static" else [4])


# ---- models


USUAL = ("compressed-tensors",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else slow) for n in INT8_FORMATS])
def test_folders_of_every_format(tmp_path: Path, name: str) -> None:
    folder = with_outliers(make_checkpoint(tmp_path / "model", "llama", num_key_value_heads=4))
    assert_same_bits(rewritten(folder, tmp_path, INT8_FORMATS[name])[0])


@pytest.mark.parametrize(
    ("architecture", "scheme", "sizes"),
    [
        ("mixtral", "w4a8", (2,)),
        *(
            pytest.param(architecture, scheme, (2, 4), marks=slow)
            for architecture in ("mixtral", "qwen2", "qwen2_moe", "gemma2", "granite")
            for scheme in ("int8", "w4a8")
        ),
    ],
)
def test_quantized_at_load(tmp_path: Path, architecture: str, scheme: str, sizes: tuple[int, ...]) -> None:
    """Covers routed and shared experts, biases and, on four ranks, replicated heads."""
    folder = with_outliers(make_checkpoint(tmp_path / "model", architecture))
    assert_same_bits(folder, sizes, quantization=scheme)


@slow
@pytest.mark.parametrize(
    ("architecture", "scheme", "dtype"),
    [
        ("llama", "int8", "float32"),
        ("llama", "w4a8", "bfloat16"),
        ("mixtral", "w4a8", "float32"),
        ("mixtral", "int8", "bfloat16"),
    ],
)
def test_at_real_widths(tmp_path: Path, architecture: str, scheme: str, dtype: str) -> None:
    folder = with_outliers(make_checkpoint(tmp_path / "model", architecture, **WIDE))
    assert_same_bits(folder, quantization=scheme, dtype=dtype)


@slow
def test_a_large_vocabulary(tmp_path: Path) -> None:
    wide = {**WIDE, "num_hidden_layers": 1, "vocab_size": 150_000, "tie_word_embeddings": True}
    folder = with_outliers(make_checkpoint(tmp_path / "model", "qwen2", **wide))
    assert_same_bits(folder, (2,), quantization="int8", quantize_head="int8")


@slow
@pytest.mark.parametrize(("architecture", "scheme"), [("llama", "int8"), ("mixtral", "w4a8")])
def test_without_the_kernels(tmp_path: Path, architecture: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes equal one rank's; torch's attention and routers may differ in the last bits."""
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    folder = with_outliers(make_checkpoint(tmp_path / "model", architecture))
    settings = SETTINGS | {"quantization": scheme}
    expected = outputs_of(make_core(folder, **settings))
    with ranks(folder, 2, **settings) as core:
        found = outputs_of(core)
    for ours, theirs in zip(found, expected, strict=True):
        assert [token.token_id for token in ours] == [token.token_id for token in theirs]


@slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe"])
def test_adapters_beside_them(tmp_path: Path, architecture: str) -> None:
    """Covers adapters of attention, MLPs and experts, which use only the first rank's part, so that sums are exact."""
    base = with_outliers(make_checkpoint(tmp_path / "model", architecture))
    experts = {"target_parameters": EXPERTS} if architecture == "qwen2_moe" else {}
    written(tmp_path / "a", base, **experts)
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors, num_cut = load_file(file), 0
    for name, tensor in tensors.items():
        is_row = "o_proj" in name or "down_proj" in name or (".experts." in name and tensor.shape[1] == 48)
        if "lora_A" in name and is_row:
            tensor[:, tensor.shape[1] // 2 :] = 0
            num_cut += 1
    assert num_cut > 5
    save_file(tensors, file, {"format": "pt"})
    settings = SETTINGS | {"adapters": loaded(tmp_path / "a"), "quantization": "int8"}

    def outputs(core: EngineCore) -> list[list[TokenOutput]]:
        orders = [RequestSpec(prompt, GREEDY, variant=variant) for prompt in PROMPTS for variant in (digest, "")]
        found = run(core, [Request(str(at), order) for at, order in enumerate(orders)])
        return [found[str(at)][0] for at in range(len(orders))]

    digest = LoraFolder.read(tmp_path / "a", 16).digest
    expected = outputs(make_core(base, **settings))
    assert [t.token_id for t in expected[0]] != [t.token_id for t in expected[1]]
    with ranks(base, 2, **settings) as core:
        found = outputs(core)
    if architecture == "llama":
        assert found == expected
    assert found[1::2] == expected[1::2]
    for ours, theirs in zip(found, expected, strict=True):  # experts' sums are weighted before they are added up
        assert [token.token_id for token in ours] == [token.token_id for token in theirs]
