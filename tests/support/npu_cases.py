"""Whole models on the NPU path, with torch-npu's own operator schemas. Run by tests/model/test_npu.py."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device, bind
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError, told
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.layer_major import LayerMajor
from pd_cluster.model.kernels.npu.npu_attention import problem
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.causal_lm import PlainCausalLM
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, Served
from pd_cluster.model.layers.gated_mlp import ExpertRouter
from pd_cluster.model.loading import model_loader, transformers_modules
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, random_prompt, run

NPU = Device("npu")
GREEDY = Sampling(max_tokens=12, temperature=0.0)
LENS = (1, 5, 150, 127, 128)
SIZES = {"max_position_embeddings": 1024}
NUM_SIZES = 4  # number of graphs for up to 8 sequences
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def calls() -> dict[str, int]:
    """Returns the number of calls of each operator."""
    bind("npu", (), 0)  # imports torch-npu
    from tests.support.npu_simulated import calls

    calls.clear()
    return calls


def core_of(folder: Path, **settings: Any) -> tuple[EngineCore, ModelRunner]:
    settings = {
        "num_blocks": 24,
        "max_model_len": 300,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,  # capturing a size takes a second in Python
        "device": "npu",
        "dtype": "float32",
        **settings,
    }
    return build_core(EngineConfig(model=str(folder), **settings))


def check(folder: Path, core: EngineCore, lens: tuple[int, ...] = LENS) -> None:
    """Computes several prompts in one batch and compares their tokens with transformers'."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in lens]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


ATTENTION, WITH_SINKS = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
EXPERTS = "npu_grouped_matmul"


@pytest.mark.parametrize(
    ("architecture", "eager", "head_dim", "layout", "operators"),
    [
        ("llama", False, 128, "TND", {ATTENTION}),
        ("llama", False, 32, "BSND", {ATTENTION}),  # BSND: prompts one by one, decoded rows as a batch
        ("mistral", True, 128, "TND", {ATTENTION}),  # a window
        ("mixtral", False, 128, "TND", {ATTENTION, EXPERTS}),
        ("gpt_oss", False, 128, "TND", {WITH_SINKS, EXPERTS}),  # experts with biases
        pytest.param("mistral", False, 128, "TND", {ATTENTION}, marks=slow),
        *(pytest.param(name, False, 128, "TND", {ATTENTION}, marks=slow) for name in ("qwen2", "qwen3")),
        pytest.param("qwen3_moe", True, 128, "TND", {ATTENTION, EXPERTS}, marks=slow),
        pytest.param("gemma3_text", True, 128, "TND", {ATTENTION}, marks=slow),
    ],
)
def test_fused_layers_are_exact(
    architecture: str,
    eager: bool,
    head_dim: int,
    layout: str,
    operators: set[str],
    tmp_path: Path,
    calls: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pd_cluster.model.graphs.step_graphs.MAX_START_S", 0.0)  # the limit for other devices
    folder = make_checkpoint(tmp_path, architecture, head_dim=head_dim, **SIZES)
    core, runner = core_of(folder, enforce_eager=eager)
    assert runner.model.kernels == f"fused layers, NPU kernels, attention by torch-npu ({layout})"
    assert isinstance(runner.pool.memory, LayerMajor)
    assert runner.pool.layout.block_size == 128
    check(folder, core)
    assert operators == {name for name in (ATTENTION, WITH_SINKS, EXPERTS) if name in calls}
    graphs = runner.graphs.decode
    assert (graphs is None) == eager
    assert graphs is None or graphs.num_captured == NUM_SIZES, "not all sizes were captured at start"
    assert core.ahead.num_ahead > 0


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("gemma2", {}, "softcap.*--attention-backend sdpa is slow, but supports it"),
        ("llama", {"attention_backend": "triton"}, "on NPU expected auto or sdpa"),
        ("llama", {"num_blocks": 1 << 20}, "--num-blocks 1048576: an NPU takes at most 65532"),
    ],
)
def test_what_npus_cannot_do_is_refused_at_load(
    architecture: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, architecture, head_dim=128)
    with pytest.raises(ConfigError, match=message):
        core_of(folder, **settings)


@pytest.mark.parametrize(
    ("changes", "given", "reason"),
    [
        ({}, {}, "^$"),
        ({"num_kv_heads": 8}, {"heads": 8}, "^$"),
        ({"dtype": "int8"}, {}, "--dtype int8"),
        ({}, {"heads": 130}, "^65 query heads"),
        ({"num_kv_heads": 512}, {"heads": 512}, "^65536 values"),
        ({"block_size": 24}, {}, "--block-size 24: on NPUs a multiple of 16"),
        ({"planes": keys_and_values(24)}, {}, "head_dim 24: .* multiples of 16"),
        ({}, {"max_num_seqs": 5000}, "--max-num-seqs 5000: .* at most 4096"),
        (
            {"planes": keys_and_values(192)},
            {"traits": {"window"}},
            "head_dim 192: .* supports prompts with 128, .*window",
        ),
    ],
)
def test_limits_of_the_operators(changes: dict[str, Any], given: dict[str, Any], reason: str) -> None:
    usual: dict[str, Any] = {"heads": 128, "max_num_seqs": 8, "traits": set()}
    layout = replace(KVLayout(1, 2, keys_and_values(128), 128, "bfloat16"), **changes)
    assert re.search(reason, told(problem(layout, *(usual | given).values())))


def test_the_pool_leaves_memory_to_the_pairs_of_other_hosts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """HCCL allocates memory for links outside torch's allocator, once they connect."""
    folder = make_checkpoint(tmp_path, "llama", head_dim=128, **SIZES)
    nbytes = []
    for paired in ((), (1, 2, 1)):  # one of our ranks has four lanes
        settings = {"num_blocks": None, "gpu_memory_utilization": 0.6, "enforce_eager": True}
        with caplog.at_level("INFO"):
            _, runner = core_of(folder, **settings, paired_tp_sizes=paired)
        nbytes.append(runner.pool.num_blocks * runner.pool.layout.block_nbytes)
        runner.pool.close()
    assert nbytes[0] - nbytes[1] == pytest.approx(4 * 128 << 20, abs=2 * runner.pool.layout.block_nbytes)
    assert "0.50 GiB are reserved for communicators, 4 of them for KV transfers" in caplog.text


def test_float32_becomes_bfloat16_unless_it_is_asked_for(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(make_checkpoint(tmp_path, "llama", head_dim=128)))
    assert checkpoint.config.get("dtype") == "float32"
    assert [model_loader.resolve_dtype(dtype, checkpoint, NPU) for dtype in ("auto", "float32")] == [
        "bfloat16",
        "float32",
    ]


def test_sdpa_serves_when_it_is_asked_for(tmp_path: Path, calls: dict[str, int]) -> None:
    folder = make_checkpoint(tmp_path, "gemma2", head_dim=32, **SIZES)
    core, runner = core_of(folder, attention_backend="sdpa", block_size=16)
    assert runner.graphs.decode is None
    check(folder, core, (5, 40))
    assert "npu_fused_infer_attention_score" not in calls


def test_copied_and_swapped_blocks_hold_what_they_held(tmp_path: Path) -> None:
    """Sequences of one prompt share its blocks, write to copies, and are swapped out when blocks run out."""
    folder = make_checkpoint(tmp_path, "llama", head_dim=128, **SIZES)
    params = Sampling(n=3, max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    prompt, kinds, outputs = random_prompt(random.Random(4), 126), set(), []
    for num_blocks in (24, 4):
        core, runner = core_of(folder, num_blocks=num_blocks, preemption_mode="swap", swap_space_gib=0.1)
        move = runner.move

        def note(moves: Any, move: Any = move) -> None:
            kinds.update(each.kind for each in moves)
            move(moves)

        runner.move = note  # type: ignore[method-assign]
        found = run(core, [Request("n", RequestSpec(prompt, params))])["n"]
        outputs.append([[token.token_id for token in found[index]] for index in range(3)])
    assert outputs[0] == outputs[1]
    assert kinds == {"copy", "out", "in"}


def test_in_16_bits_rows_go_to_the_experts_that_transformers_choose() -> None:
    """The router's softmax must not run in 16 bits, which would make small logits' weights equal."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    from pd_cluster.model.kernels.npu.grouped_experts import NpuGroupedExperts
    from pd_cluster.model.layers.expert_weights import experts_of
    from pd_cluster.model.layers.ops import TorchOps

    torch.manual_seed(2)
    block: Any = MixtralSparseMoeBlock(MixtralConfig(hidden_size=32, intermediate_size=64))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    block = block.bfloat16().requires_grad_(False)
    x = torch.randn(200, 32).bfloat16()
    expected = block(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0].float()
    found = NpuGroupedExperts(ExpertRouter.of(block), experts_of(block.experts), TorchOps(), "silu")(x)
    assert found.dtype == torch.bfloat16
    errors = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 0.02


def test_sixteen_bits_stay_near_float32(tmp_path: Path) -> None:
    """torch-npu's operators must have errors no larger than transformers' modules."""
    folder = make_checkpoint(tmp_path, "llama", head_dim=128)
    checkpoint = Checkpoint.open(str(folder))

    def logits(model: Any, dtype: str) -> torch.Tensor:
        return model_loader.probe_logits(model, layout_of(caches, 128, dtype), NPU)

    whole = model_loader.load_model(checkpoint, "float32", NPU, choices=model_loader.LoadChoices(block_size=128))
    caches = whole.caches
    exact = logits(whole, "float32")
    plain = transformers_modules.load_plain(checkpoint, "bfloat16", NPU)
    layout = layout_of(caches, 128, "bfloat16")
    attention = model_loader.choose_attention("auto", plain.config, layout, NPU)
    by_modules = logits(PlainCausalLM(plain, attention=attention), "bfloat16")
    fused = model_loader.fuse(plain, model_loader.choose_ops(layout, NPU, attention), Served(caches))
    assert isinstance(fused, FusedCausalLM)
    by_operators = logits(fused, "bfloat16")
    of_modules, of_operators = ((each - exact).norm() / exact.norm() for each in (by_modules, by_operators))
    assert of_operators < 1.5 * of_modules + 1e-3, (float(of_operators), float(of_modules))
    assert of_modules > 0


def test_torch_npu_has_what_links_and_groups_ask_of_it() -> None:
    """Checks only that the names and signatures exist, because calls need hardware."""
    from datetime import timedelta

    import torch_npu

    from pd_cluster.devices import device as devices
    from pd_cluster.devices import process_groups as device_group
    from pd_cluster.devices.hccl_environment import PAIR_BUFFER_MB
    from tests.support.npu_devices import replaced

    simulated = devices.process_group(NPU)
    assert simulated is torch_npu._C._distributed_c10d.ProcessGroupHCCL
    group = simulated.real
    for name in set(vars(simulated)) - {"real"}:  # every simulated method exists in torch-npu
        assert name.startswith(("__", "_run", "_begin", "_connect")) or hasattr(group, name)
    options = group.Options()
    options._timeout = timedelta(seconds=5)
    options.hccl_config = {"hccl_buffer_size": PAIR_BUFFER_MB}
    options.group_id = "a name"
    options.global_ranks_in_group = [0, 1]
    assert options.hccl_config["hccl_buffer_size"] == PAIR_BUFFER_MB
    # torch-npu does not bind `abort`, and the inherited one is empty. Its own method takes a reason and returns None.
    called = []
    recorder = type("Recorder", (), {"__getattr__": lambda self, name: lambda *given: called.append((name, given))})()
    device_group.abort(recorder, NPU, "the peer is dead")
    ((name, given),) = called
    assert name in vars(group)
    assert vars(group)[name].__doc__.startswith(f"{name}(self: {group.__module__}.ProcessGroupHCCL, arg0: str | None)")
    assert given == ("the peer is dead",)
    assert hasattr(torch_npu._C._NPUDeviceProperties, "uuid")
    storage = torch.UntypedStorage
    assert storage._release_ipc_counter_npu(b"/none", 0) is None
    with pytest.raises(TypeError):
        replaced["_new_shared_npu"](0, b"", 1, 0, b"", 0, b"", 0)
    assert callable(storage._share_npu_)


def test_torch_npu_writes_the_attention_of_a_graph_down_and_tells_it_new_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs torch-npu's own handlers with a call as models make it; streams, events and tasks are stubs."""
    import contextlib
    from types import SimpleNamespace

    import numpy as np
    import torch_npu
    from torch_npu.npu import graphs

    from pd_cluster.model.kernels.npu import npu_attention
    from pd_cluster.model.layers.attention.sdpa import Scoring

    told: list[tuple[list[int], list[int]]] = []

    def attend(query: Any, key: Any, value: Any, *, workspace: Any, out: Any, **options: Any) -> Any:
        told.append((options["actual_seq_lengths"], options["actual_seq_lengths_kv"]))
        return tuple(out)

    nothing = SimpleNamespace(wait=lambda s: None, reset=lambda s: None, record=lambda s: None)
    monkeypatch.setattr(torch.npu, "ExternalEvent", lambda: nothing)
    monkeypatch.setattr(torch.npu, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch_npu.npu, "current_stream", lambda: None, raising=False)
    monkeypatch.setattr(graphs._GraphDispatchMode, "update_stream", nothing)
    for name in ("group_begin", "group_end", "update_begin", "update_end"):
        monkeypatch.setattr(graphs, f"graph_task_{name}", lambda *given: None)
    name = "npu_fused_infer_attention_score"
    library = torch.library.Library("npu", "IMPL")
    library.impl(f"_{name}_get_max_workspace", lambda *given, **options: torch.empty(8), "CPU")
    library.impl(f"_{name}_infer_output", lambda q, v, **options: (torch.empty_like(q), torch.empty(1)), "CPU")
    library.impl(f"{name}.out", attend, "CPU")
    npu = npu_attention.NpuAttention(NPU, "TND")
    planned = npu_attention.PlannedStep(torch.zeros(3, 2, dtype=torch.int32), [1, 2, 3], [5, 6, 7])
    pool: Any = SimpleNamespace(pool=SimpleNamespace(layer=lambda layer_idx: torch.zeros(2, 5, 128, 2, 128)))
    mode = graphs._GraphDispatchMode()
    try:
        with torch.inference_mode(), mode:
            found = npu.attend(torch.zeros(3, 4, 128), 0, pool, planned, Scoring(0.1, 64, None))
            mode.update_capture_record([dict(npu_attention.host_values_of(np.array([9, 10, 0])))])
    finally:
        library._destroy()
    assert found.shape == (3, 4, 128)
    assert told == [([1, 2, 3], [5, 6, 7]), ([1, 2, 3], [9, 10, 1])]
