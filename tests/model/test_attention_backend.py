"""--attention-backend: its choice on each device, and its refusals."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values, latents
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs import step_graphs
from pd_cluster.model.kernels import attention_backend as choice
from pd_cluster.model.kernels.attention_backend import check_backend, choose_attention, latents_by_modules
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.loading import model_loader
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.loaded_parts import load_parts
from pd_cluster.numerics import Numerics
from pd_cluster.settings.engine_config import EngineConfig
from tests.support import fake_flashinfer as fake

CUDA = Device("cuda")
LAYOUT = KVLayout(2, 2, keys_and_values(64), 16, "bfloat16")
CONFIG = SimpleNamespace(num_attention_heads=4)


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes Triton and FlashInfer look installed only if they are in `names`."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return (name in names or None) if name in ("triton", "flashinfer") else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Yields the fake FlashInfer, on a fake Hopper GPU with memory on the CPU."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake.as_module())
    module = importlib.import_module("pd_cluster.model.kernels.cuda.attention.flashinfer")
    make = module.FlashInfer
    monkeypatch.setattr(module, "FlashInfer", lambda device: make(CPU))
    monkeypatch.setattr(choice, "compute_capability", lambda device: (9, 0))
    installed(monkeypatch, "triton", "flashinfer")
    yield module
    sys.modules.pop("pd_cluster.model.kernels.cuda.attention.flashinfer")


def test_on_cpu_sdpa_is_all_there_is() -> None:
    for wanted in ("auto", "sdpa"):
        check_backend(wanted, 24, CPU)
        attention = choose_attention(wanted, CONFIG, LAYOUT, CPU)
        assert (attention.name, attention.write_and_attend) == ("SDPA", None)
    for wanted in ("triton", "flashinfer"):
        with pytest.raises(ConfigError, match=f"--attention-backend {wanted}: on CPU expected auto or sdpa"):
            check_backend(wanted, 16, CPU)


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for names, lacks in ((("triton",), "it is not installed"), (("flashinfer",), "Triton")):
        installed(monkeypatch, *names)
        with pytest.raises(ConfigError, match=f"--attention-backend flashinfer: {lacks}"):
            check_backend("flashinfer", 16, CUDA)
    assert choose_attention("auto", CONFIG, LAYOUT, CUDA) == choice.SDPA
    assert "attention runs on SDPA, sequence by sequence, which is slow: Triton is not installed" in caplog.text
    with pytest.raises(ConfigError, match="--attention-backend triton: Triton is not installed"):
        choose_attention("triton", CONFIG, LAYOUT, CUDA)


def test_auto_is_triton_and_flashinfer_serves_when_it_is_asked_for(flashinfer: object) -> None:
    pytest.importorskip("triton")
    check_backend("flashinfer", 24, CUDA)  # any block size
    attention = choose_attention("flashinfer", CONFIG, LAYOUT, CUDA)
    assert attention.name == "FlashInfer 0.6.18 (sm_90)"
    assert attention.attend_batch is not None
    assert [choose_attention(each, CONFIG, LAYOUT, CUDA).name for each in ("auto", "triton")] == ["Triton"] * 2


@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_latents_have_kernels_on_cuda(wanted: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    layout = KVLayout(2, 1, latents(512, 64), 16, "bfloat16")
    attention = choose_attention(wanted, CONFIG, layout, CUDA)
    assert (attention.name, caplog.text) == ("Triton", "")
    assert attention.make_ops is not None
    deterministic = choose_attention(
        wanted, CONFIG, layout, CUDA, options=choice.AttentionOptions(is_deterministic=True)
    )
    assert deterministic.name == "deterministic Triton"
    too_wide = replace(layout, planes=latents(1024, 64))
    if wanted == "auto":
        assert choose_attention(wanted, CONFIG, too_wide, CUDA) == choice.SDPA
        assert "attention runs on SDPA, sequence by sequence, which is slow: latents of 1024" in caplog.text
    else:
        with pytest.raises(ConfigError, match="--attention-backend triton: latents of 1024"):
            choose_attention(wanted, CONFIG, too_wide, CUDA)


@pytest.mark.parametrize("device", [CUDA, Device("npu")])
def test_latents_whose_layers_are_not_fused_run_as_modules(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """For layers like longcat_flash's, `auto` warns, and `triton` is refused."""
    assert latents_by_modules("auto", False, device) == choice.SDPA
    assert "slow: latent attention (MLA) of this architecture runs as transformers' modules" in caplog.text
    assert latents_by_modules("sdpa", False, device) == choice.Attention("SDPA", is_asked_for=True)
    with pytest.raises(ConfigError, match=r"--attention-backend triton: latent attention .* use auto, or sdpa"):
        latents_by_modules("triton", False, device)


def test_sdpa_asked_for_on_cpu_takes_the_place_of_the_c_kernels(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "CpuOps", lambda: pytest.fail("the C kernels were built"))
    folder = Checkpoint.open(str(checkpoint("llama")))
    model = model_loader.load_model(folder, "float32", CPU, choices=model_loader.LoadChoices(attention_backend="sdpa"))
    assert model.kernels == "fused layers, torch kernels, attention by SDPA"


def test_an_attention_s_name_keeps_instances_of_others_apart(
    flashinfer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name includes backend, FlashInfer version and GPU, because they give different numbers."""
    pytest.importorskip("triton")
    own = choose_attention("flashinfer", CONFIG, LAYOUT, CUDA).name
    names = {own, *(choose_attention(wanted, CONFIG, LAYOUT, CUDA).name for wanted in ("triton", "sdpa"))}
    monkeypatch.setattr(choice, "compute_capability", lambda device: (8, 0))
    names.add(choose_attention("flashinfer", CONFIG, LAYOUT, CUDA).name)
    monkeypatch.setattr(sys.modules["pd_cluster.model.kernels.cuda.attention.flashinfer"], "VERSION", "0.7.0")
    names.add(choose_attention("flashinfer", CONFIG, LAYOUT, CUDA).name)
    assert len(names) == 5
    for name in names:
        mine, other = Numerics(device="cuda", attention_backend=own), Numerics(device="cuda", attention_backend=name)
        found = mine.difference(other)
        assert found == (None if name == own else (called("attention_backend"), own, name))
        assert (mine.digest == other.digest) == (name == own)


def test_a_model_that_flashinfer_cannot_serve_is_an_error(flashinfer: object) -> None:
    for layout, has_sinks, named in (
        (KVLayout(2, 2, keys_and_values(80), 16, "bfloat16"), False, "head_dim 80"),
        (KVLayout(2, 2, keys_and_values(64), 16, "float32"), False, "dtype float32"),
        (LAYOUT, True, "attention sinks"),
    ):
        with pytest.raises(ConfigError, match=f"--attention-backend flashinfer: {named}.*; use auto"):
            choose_attention("flashinfer", CONFIG, layout, CUDA, has_sinks)


def test_the_loader_tells_of_sinks(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: told.append(given[4]) or choice.SDPA)  # type: ignore[func-returns-value]
    for architecture in ("gpt_oss", "llama"):
        model_loader.load_model(Checkpoint.open(str(checkpoint(architecture))), "float32", CPU)
    assert told == [True, False]


def test_block_sizes_are_tritons_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "triton", "flashinfer")
    for wanted in ("auto", "triton"):
        with pytest.raises(ConfigError, match="--block-size 24: on CUDA a power of 2"):
            check_backend(wanted, 24, CUDA)
    for wanted in ("flashinfer", "sdpa"):
        check_backend(wanted, 24, CUDA)


def test_layers_whose_rope_asks_for_positions_are_never_captured(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LoadPlan.of(EngineConfig(model=str(checkpoint("llama")), max_model_len=64), SingleRank(), CPU)
    model = load_parts(plan).model
    for rope in ("dynamic", "longrope"):
        monkeypatch.setitem(model.config.rope_parameters, "rope_type", rope)
        layout = layout_of(model.caches, plan.block_size, plan.kv_dtype)
        assert step_graphs.why_eager(plan, model, layout) == f"rope_type {rope} reads positions from the device"


@pytest.mark.parametrize(("start_s", "num_captured"), [(60.0, 2), (0.0, 0)])
def test_graphs_of_the_given_sizes_are_there_at_the_start(
    start_s: float, num_captured: int, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The given sizes are captured at the start if time permits; each graph has run once."""
    num_runs = 0

    def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        nonlocal num_runs
        num_runs += 1
        assert run().shape[0] in (2, 8)
        return run

    config = EngineConfig(model=str(checkpoint("llama")), max_model_len=64, max_num_seqs=8, graph_sizes=(2, 8))
    plan = LoadPlan.of(config, SingleRank(), CPU)
    model = load_parts(plan).model
    monkeypatch.setattr(step_graphs, "capture", lambda device: capture)
    monkeypatch.setattr(step_graphs, "MAX_START_S", start_s)
    with KVPool(layout_of(model.caches, plan.block_size, plan.kv_dtype), 40) as pool:
        graphs = step_graphs.capture_graphs(replace(plan, device=CUDA), model, pool, eager="").decode
    assert graphs is not None
    assert graphs.num_captured == num_runs == num_captured
