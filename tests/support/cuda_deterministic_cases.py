"""Tests `--deterministic`: a row has the same bits in any batch, for each kernel and for whole engines.

Interpreted on CPU; on a GPU if the cases run without TRITON_INTERPRET. Run by tests/model/test_cuda_ops.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values, latents
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules
from pd_cluster.model.graphs.step_graphs import StepGraphs
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.kernels.attention_backend import triton_attention
from pd_cluster.model.kernels.cuda import deterministic
from pd_cluster.model.kernels.cuda.attention.attention_configs import AttentionConfigs, TileConfig, padded
from pd_cluster.model.kernels.cuda.attention.attention_plan import tiles_of
from pd_cluster.model.kernels.cuda.attention.triton_planner import AttentionShape
from pd_cluster.model.kernels.cuda.deterministic import DeterministicOps, attend_rows
from pd_cluster.model.kernels.cuda.experts import experts_kernels
from pd_cluster.model.kernels.cuda.experts.expert_matrices import BlockMatrices, ExpertMatrices
from pd_cluster.model.kernels.cuda.experts.grouped_experts import TritonGroupedExperts
from pd_cluster.model.kernels.cuda.linear import linear_kernels
from pd_cluster.model.kernels.cuda.linear.triton_linear import TritonLinear
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.model.layers.expert_weights import experts_of
from pd_cluster.model.layers.gated_mlp import ExpertRouter, Routing
from pd_cluster.model.layers.ops import Rope
from pd_cluster.model.loading import model_loader
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from tests.support.checkpoints import make_checkpoint
from tests.support.cuda_latent_cases import rows_of
from tests.support.draft_steps import Steps, random_orders
from tests.support.engines import assert_all_same, generate, random_prompt, run
from tests.support.interpreted import DTYPES, SLOW_IF_INTERPRETED, Noted, choose_device, multiplied_in_order
from tests.support.spread import spread

choose_device()

COMPANIES = (1, 2, 7, 33, 64, 200)  # batch sizes
ASKING = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
Answer = list[tuple[int, float, list[tuple[int, float]]]]


@pytest.fixture(scope="module", autouse=True)
def in_order() -> Iterator[None]:
    with multiplied_in_order():
        yield


# ---- kernels


def assert_same_rows(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Asserts that rows have the same bits in batches of any size and at any position. Returns all results."""
    whole = function(rows)
    for num_rows in COMPANIES:
        for shift in (0, 3, 70):
            assert torch.equal(function(rows.roll(shift, 0)[:num_rows]), whole.roll(shift, 0)[:num_rows]), num_rows
    return whole


@pytest.mark.parametrize(("dtype", "num_inputs", "num_outputs"), spread(DTYPES, [(64, 48), (90, 70)]), ids=str)
def test_a_linear_layers_row_is_the_same_among_any_rows(dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    torch.manual_seed(num_inputs)
    weight, bias = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    x = torch.randn(200, num_inputs).to(dtype)
    found = assert_same_rows(TritonLinear(weight, bias), x)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "num_inputs", "num_outputs"),
    [(torch.float16, 4096, 16), (torch.bfloat16, 64, 8200), (torch.float32, 8192, 8)],
    ids=str,
)
def test_a_wide_linear_layers_row_is_the_same_among_any_rows(
    dtype: torch.dtype, num_inputs: int, num_outputs: int
) -> None:
    torch.manual_seed(1)
    layer = TritonLinear(torch.randn(num_outputs, num_inputs).to(dtype))
    rows = torch.randn(65, num_inputs).to(dtype)
    whole = layer(rows)
    for num_rows in (1, 33):
        assert torch.equal(layer(rows[30 : 30 + num_rows]), whole[30 : 30 + num_rows]), num_rows


def test_a_linear_layer_takes_strided_rows_and_none() -> None:
    weight = torch.randn(24, 32)
    layer, wide = TritonLinear(weight), torch.randn(5, 64)
    assert torch.equal(layer(wide[:, 16:48]), layer(wide[:, 16:48].contiguous()))
    assert layer(wide[:0, :32]).shape == (0, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_passes_through_its_experts_the_same_among_any_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    config = MixtralConfig(hidden_size=40, intermediate_size=24, num_local_experts=5, num_experts_per_tok=3)
    block = MixtralSparseMoeBlock(config).to(dtype)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.2)
    experts = DeterministicOps(attend_rows).experts(ExpertRouter.of(block), experts_of(block.experts), "silu")
    rows = torch.randn(70, 40).to(dtype)
    whole = experts(rows)
    for num_rows in (1, 33):
        assert torch.equal(experts(rows[6 : 6 + num_rows]), whole[6 : 6 + num_rows]), num_rows
    assert len({row.tobytes() for row in whole.float().cpu().numpy()}) == 70


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_launches_have_the_same_constants_for_all_numbers_of_rows(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other constants compile to another kernel with another order of summation; by default they depend on the rows."""
    found: set[tuple[str, str]] = set()
    kernels = [(experts_kernels, name) for name in ("route", "gate_up_product", "down_product", "sum_pairs")]
    kernels.append((linear_kernels, "linear_product"))

    def note(name: str, options: dict[str, Any]) -> None:
        found.add((name, str(sorted((key, value) for key, value in options.items() if key != "num_row_tiles"))))

    for module, name in kernels:
        monkeypatch.setattr(module, name, Noted(getattr(module, name), partial(note, name)))
    router, gate_up, down = (torch.randn(*sizes).bfloat16() for sizes in ((2, 16), (2, 32, 16), (2, 16, 16)))
    matrices = BlockMatrices(ExpertMatrices.of(gate_up), ExpertMatrices.of(down))
    experts = TritonGroupedExperts(
        ExpertRouter(router, None, Routing(2)), matrices, "silu", is_deterministic=is_deterministic
    )
    for num_rows in COMPANIES:
        experts(torch.randn(num_rows, 16).bfloat16())
    kernels_used = {name for name, _ in found}
    if is_deterministic:
        assert kernels_used == {name for _, name in kernels}
        assert len(found) == len(kernels_used)
    else:
        assert len(found) > len(kernels_used) + 3


def test_the_gate_has_one_launch_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kernel of `CudaOps` depends on the number of rows."""
    monkeypatch.setattr("pd_cluster.model.kernels.cuda.ops.FEW_GATED", 1)
    rows = torch.randn(9, 64)
    ops = DeterministicOps(attend_rows)
    assert torch.equal(ops.gate(rows, "silu")[4:5], ops.gate(rows[4:5], "silu"))


# ---- attention


def small_configs(shape: AttentionShape, bits: int, device: object, has_codes: bool) -> AttentionConfigs:
    tile = TileConfig(padded(8 * shape.group), 16, 4, 2)
    return replace(shape.configs(bits, (9, 0)), prefill=tile, decode=tile, is_uniform=True)


@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "block_size"),
    spread(["float32", "bfloat16"], [(None, None, 16), (11, None, 8), (None, 5.0, 32)]),
)
def test_a_token_attends_the_same_however_its_prompt_is_cut(
    dtype: str, window: int | None, softcap: float | None, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deterministic, "configs_of", small_configs)
    torch.manual_seed(3)
    num_tokens, num_heads, head_dim = 43, 4, 16
    layout = KVLayout(1, 2, keys_and_values(head_dim), block_size, dtype)
    num_blocks = layout.num_blocks_for(num_tokens)
    pool = KVPool(layout, 2 * num_blocks)
    pool.data.copy_(torch.randn(pool.data.shape))
    query = torch.randn(num_tokens, num_heads, head_dim).to(TORCH_DTYPES[dtype])
    tables = [list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))]

    def attended(chunks: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Attends in chunks of (sequence, first token, last token + 1)."""
        requests = []
        for i, (seq, start, stop) in enumerate(chunks):
            order = RequestSpec([0] * num_tokens, Sampling())
            request = Request(f"{i}", order, num_computed_tokens=start, tables=[tables[seq]])
            requests.append((request, stop - start))
        batch = build_batch(requests, pool)
        together = torch.cat([query[start:stop] for _, start, stop in chunks])
        scoring = Scoring(0.2, window, softcap)
        return list(attend_rows(together, *pool.layer(0), batch, scoring).split([b - a for _, a, b in chunks]))

    (whole,) = attended([(0, 0, num_tokens)])
    assert torch.isfinite(whole).all()
    for cuts in ((0, 1, 17, 30, 43), (0, 19, 20, 43)):
        parts = [attended([(0, start, stop)])[0] for start, stop in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole), cuts
    for start in (0, 20, 42):
        assert torch.equal(attended([(1, 0, 30), (0, start, 43), (1, 40, 41)])[1], whole[start:])
        assert torch.equal(attended([(1, 3, 4), (0, start, start + 1)])[1], whole[start : start + 1])


def test_a_token_attends_to_latents_the_same_however_its_prompt_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked alone and beside the chunks of a second sequence with the same prompt, whose blocks lie elsewhere."""
    monkeypatch.setattr(deterministic, "configs_of", small_configs)
    shape = (4, (24, 40, 16, 32), 8, "float32", "float32")
    num_tokens, ops = 29, DeterministicOps(attend_rows)
    layer, queries, kept, rope = rows_of(shape, num_tokens, 3)

    def attended(*steps: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Returns the rows of the first sequence; chunks are (sequence, first token, last token + 1)."""
        pool = KVPool(KVLayout(2, 1, latents(40, 16), 8, "float32"), 8)
        found = []
        for chunks in steps:
            requests = []
            for seq, start, stop in chunks:
                order = RequestSpec([0] * num_tokens, Sampling())
                table = list(range(4 * seq, 4 * seq + 4))
                requests.append((Request(f"{seq}", order, num_computed_tokens=start, tables=[table]), stop - start))
            rows = torch.cat([torch.arange(start, stop) for _, start, stop in chunks])
            turned = Rope(rope.cos[rows], rope.sin[rows])
            result = ops.attend_latents(layer, queries[rows], kept[rows], turned, build_batch(requests, pool))
            parts = result.split([stop - start for _, start, stop in chunks])
            found += [part for (seq, *_), part in zip(chunks, parts, strict=True) if seq == 0]
        return found

    (whole,) = attended([(0, 0, num_tokens)])
    assert torch.isfinite(whole).all()
    for cuts in ((0, 1, 17, 29), (0, 27, 28, 29)):
        parts = attended(*([(0, start, stop)] for start, stop in itertools.pairwise(cuts)))
        assert torch.equal(torch.cat(parts), whole), cuts
    beside = attended([(1, 0, 20), (0, 0, 5)], [(0, 5, 6), (1, 20, 21)], [(1, 21, 29), (0, 6, 29)])
    assert torch.equal(torch.cat(beside), whole)


def test_tiles_cover_each_query_once() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        lens = rng.integers(1, 40, rng.integers(1, 9))
        contexts = lens + rng.integers(0, 50, len(lens))
        tiles, queries = tiles_of(lens, contexts, 8), []
        for seq, first in tiles.tolist():
            queries += [(seq, at) for at in range(first, min(first + 8, lens[seq]))]
        assert sorted(queries) == [(seq, at) for seq, length in enumerate(lens) for at in range(length)]


# ---- whole engines


def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, step: int, num_blocks: int = 64) -> EngineCore:
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: triton_attention(is_deterministic=True))
    monkeypatch.setattr(model_loader, "can_fuse", lambda model: True)  # otherwise only float32 models are fused on CPU
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        device="cpu",
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=28,
        max_num_batched_tokens=step,
        enable_prefix_caching=False,
        deterministic=True,
    )
    core, runner = build_core(config)
    assert isinstance(runner.model, FusedCausalLM)
    assert runner.model.ops.name == "deterministic Triton"
    assert runner.numerics.deterministic
    runner.graphs = StepGraphs(DecodeGraphs(runner.model, runner.pool, lambda run: run, GraphRules(8, 28)))
    return core


def answers(core: EngineCore, prompts: list[list[int]]) -> list[Answer]:
    """Returns each token with its logprob and with the two most likely tokens and their logprobs."""
    requests = [Request(f"r{i}", RequestSpec(prompt, ASKING), arrival_s=float(i)) for i, prompt in enumerate(prompts)]
    found = run(core, requests)
    return [[_told(token) for token in tokens[0]] for tokens in found.values()]


def _told(token: TokenOutput) -> tuple[int, float, list[tuple[int, float]]]:
    assert token.logprobs is not None
    return token.token_id, token.logprobs.logprob, token.logprobs.top


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("llama", marks=SLOW_IF_INTERPRETED),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mixtral", "qwen2_moe", "gpt_oss", "glm4", "deepseek_v3")
        ),
    ],
)
def test_an_answer_is_the_same_alone_in_a_batch_in_chunks_and_after_a_preemption(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    rng = random.Random(5)
    prompts = [random_prompt(rng, length) for length in (9, 2, 3)]
    core = engine(folder, monkeypatch, "bfloat16", step=64)
    alone = [answers(core, [prompt])[0] for prompt in prompts]
    assert answers(core, prompts) == alone
    tight = engine(folder, monkeypatch, "bfloat16", step=5, num_blocks=7)  # the first prompt is computed in two chunks
    assert answers(tight, prompts) == alone
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", "bfloat16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("llama", "float32"), ("gpt_oss", "bfloat16"))),
    ],
)
def test_rows_of_drafts_are_steps(
    architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with drafts equal single decode steps, in graphs (where a row counts as a sequence) and beside a prompt."""
    layers = {"num_hidden_layers": 1} if architecture == "llama" else {}
    runner: Any = engine(make_checkpoint(tmp_path, architecture, **layers), monkeypatch, dtype, step=64).runner
    steps = Steps(runner, random_orders((5, 9)), (5, 9), num_steps=4)
    steps.compare(([4, 0], False), ([2, 3], False), ([3, 1], True))


def test_float32_has_the_tokens_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    prompts = [random_prompt(random.Random(6), length) for length in (1, 9)]
    core = engine(folder, monkeypatch, "float32", step=8)
    greedy = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    assert_all_same(folder, prompts, generate(core, prompts, greedy), 3)


def test_a_weight_of_another_form_is_multiplied_by_as_numbers() -> None:
    @dataclass
    class Doubled:
        weight: torch.Tensor
        bias: torch.Tensor

        def matrix(self) -> torch.Tensor:
            return 2 * self.weight

    weight, bias, x = torch.randn(24, 32), torch.randn(24), torch.randn(5, 32)
    linear = DeterministicOps(attend_rows).linear(Doubled(weight, bias))  # type: ignore[arg-type]
    assert torch.equal(linear(x), TritonLinear(2 * weight, bias)(x))
