"""Sparse latent attention in whole models on a simulated CUDA device: loader, runner and graphs as on a GPU.

Interpreted; run by tests/model/test_cuda_ops.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.kv.block_major import DeviceBlocks
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.model.language_model import fuse_model
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.loading import model_loader
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.wire import KVPiece
from tests.support import cuda_simulated
from tests.support.checkpoints import make_checkpoint, prefers
from tests.support.engines import generate, random_prompt, run
from tests.support.interpreted import choose_device, multiplied_in_order

choose_device()

SHALLOW: dict[str, Any] = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
NUM_TOKENS = 4
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_simulated.install(monkeypatch)


def core_of(folder: Path, **settings: Any) -> tuple[EngineCore, ModelRunner]:
    usual = {"num_blocks": 40, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "device": "cuda"}
    return build_core(EngineConfig(model=str(folder), **{**usual, **settings}))


def prompts_of(*lens: int) -> list[list[int]]:
    rng = random.Random(3)
    return [random_prompt(rng, length) for length in lens]


def check(folder: Path, core: EngineCore, *lens: int) -> None:
    prompts = prompts_of(*lens)
    assert prefers(folder, prompts, generate(core, prompts, GREEDY), [NUM_TOKENS] * len(prompts))


def test_chunks_graphs_and_steps_ahead(tmp_path: Path) -> None:
    """Computes prompts in chunks beside decoding sequences; some see all keys at first, and later chosen ones."""
    folder = make_checkpoint(tmp_path, "glm_moe_dsa", **SHALLOW)
    core, runner = core_of(folder)
    assert runner.model.kernels == "fused layers, Triton kernels, attention by Triton"
    assert isinstance(runner.pool.memory, DeviceBlocks)
    assert runner.pool.layout.plane_layers == ((0, 1), (0, 1), (0,))
    check(folder, core, 1, 6, 14)
    assert runner.graphs.decode is not None
    assert runner.graphs.decode.num_captured > 0
    assert core.ahead.num_ahead > 0


@slow
@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("architecture", ["deepseek_v32", "glm_moe_dsa"])
def test_all_layers(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    core, runner = core_of(folder, **settings)
    assert runner.model.ops.name == ("deterministic Triton" if settings.get("deterministic") else "Triton")
    assert (runner.graphs.decode is None) == settings.get("enforce_eager", False)
    check(folder, core, 1, 7, 20, 40)


@slow
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_cached_sequences(mode: str, tmp_path: Path) -> None:
    """Index keys are swapped out and in, and a cached prefix's index keys are found."""
    folder = make_checkpoint(tmp_path, "glm_moe_dsa", **SHALLOW)
    core, _ = core_of(folder, num_blocks=5, preemption_mode=mode, swap_space_gib=0.01)
    prompts = prompts_of(15, 14, 13)
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    assert prefers(folder, prompts, generate(core, prompts, sampling), [20] * 3)
    assert core.scheduler.num_preemptions
    core, _ = core_of(folder)
    check(folder, core, 40)
    again = Request("again", RequestSpec(prompts_of(40)[0], GREEDY))
    run(core, [again])
    assert again.num_cached_tokens == 32
    assert prefers(folder, prompts_of(40), [again.output_token_ids], [NUM_TOKENS])


def answers(core: EngineCore, prompts: list[list[int]]) -> list[Any]:
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)
    requests = [Request(str(at), RequestSpec(prompt, sampling), arrival_s=at) for at, prompt in enumerate(prompts)]
    found = run(core, requests)
    return [[(token.token_id, token.logprobs) for token in found[request.request_id][0]] for request in requests]


@slow
def test_an_answer_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    folder, prompts = make_checkpoint(tmp_path, "glm_moe_dsa", **SHALLOW), prompts_of(20, 3, 9)
    with multiplied_in_order():
        settings: dict[str, Any] = {"deterministic": True, "enable_prefix_caching": False}
        core, _ = core_of(folder, **settings)
        alone = [answers(core, [prompt])[0] for prompt in prompts]
        assert answers(core, prompts) == alone
        assert answers(core_of(folder, **settings, enforce_eager=True)[0], prompts) == alone
        assert answers(core_of(folder, **{**settings, "max_num_batched_tokens": 5})[0], prompts) == alone


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load compares logits with transformers'; float16 keeps the weights of index heads in float32."""
    monkeypatch.setattr(model_loader, "can_fuse", lambda model: True)  # torch sees a CPU as the device
    monkeypatch.setattr(fuse_model, "is_narrow", lambda model: False)  # a CPU has other 16-bit layers
    core, runner = core_of(make_checkpoint(tmp_path, "deepseek_v32", num_hidden_layers=2), dtype=dtype)
    assert isinstance(runner.model, FusedCausalLM)
    assert [each.weighs_in_float32 for each in runner.model.indexers] == [dtype == "float16"] * 2
    assert all(map(len, generate(core, prompts_of(1, 12), GREEDY)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "sdpa"}, "^--attention-backend sdpa: sparse attention on accelerators has kernels"),
        ({"kv_cache_dtype": "int8"}, "^--kv-cache-dtype int8: the index keys of this model cannot be quantized"),
        ({"cuda_speedups": ("prompt-graphs",)}, "^--cuda-speedups prompt-graphs: its indexers choose keys"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        core_of(make_checkpoint(tmp_path, "glm_moe_dsa", **SHALLOW), **settings)


def test_indexers_beyond_the_kernels_are_refused(tmp_path: Path) -> None:
    folder = Checkpoint.open(str(make_checkpoint(tmp_path, "glm_moe_dsa", **SHALLOW, index_n_heads=136)))
    with pytest.raises(
        ConfigError, match=r"^--device cuda: this model's sparse attention: an indexer of 136 heads: .* up to 128"
    ):
        model_loader.load_model(folder, "float32", Device("cuda"))


@slow
def test_a_prompt_is_handed_over_to_a_pool_of_other_blocks(tmp_path: Path) -> None:
    """One instance's latents and index keys are handed over to another one, which decodes in graphs."""
    folder, (prompt,) = make_checkpoint(tmp_path, "glm_moe_dsa"), prompts_of(29)
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 32}
    source, target = (core_of(folder, block_size=size, **settings)[1] for size in (16, 8))
    request = Request("p", RequestSpec(prompt, GREEDY), tables=[[3, 1]])
    token = int(source.forward([(request, len(prompt))]).logits[0].argmax())
    layout, into = source.pool.layout, [5, 0, 2, 7]
    piece = KVPiece(0, len(prompt), 0, layout.num_layers, request.tables[0])
    route = PoolRoute(layout, target.pool.layout, False)
    payload = pack(source.pool.memory, piece, route)
    assert len(payload) == len(prompt) * layout.token_nbytes
    unpack(payload, piece, route, target.pool.memory, into)
    answer, there = [token], Request("d", RequestSpec(prompt, GREEDY), tables=[into])
    for num_known in range(len(prompt), len(prompt) + 2):
        there.num_computed_tokens = num_known
        there.output_token_ids.append(answer[-1])
        answer.append(int(target.forward([(there, 1)]).logits[0].argmax()))
    assert target.graphs.decode is not None
    assert target.graphs.decode.num_captured == 1
    assert prefers(folder, [prompt], [answer], [3])
