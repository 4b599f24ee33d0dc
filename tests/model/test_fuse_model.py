"""Fused layers compute the same as transformers' modules, with and without C kernels; no weight is kept twice."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssForCausalLM

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs.step_graphs import rope_type
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.language_model.architecture_quirks import ARCHITECTURES
from pd_cluster.model.language_model.cache_declaration import LayerCache, caches_of, layout_of
from pd_cluster.model.language_model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.language_model.fuse_model import can_fuse, fuse, is_known
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, Served
from pd_cluster.model.language_model.layer_maker import norm_of
from pd_cluster.model.layers.gated_mlp import GatedMLP
from pd_cluster.model.layers.ops import Ops, TorchOps
from pd_cluster.model.layers.packed_linear import make_linear
from pd_cluster.model.loading import model_loader, transformers_modules
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import FUSED, VOCAB_SIZE
from tests.support.engines import generate, make_core
from tests.support.more_checkpoints import MORE
from tests.support.usual import usual_first

CPU = Device("cpu")
GREEDY = Sampling(max_tokens=8, temperature=0.0)
Checkpoints = Callable[[str], Path]
INDEXED = [name for name, own in MORE.items() if "index_topk" in own]  # tests/model/test_sparse_latents.py


def all_logits(model: CausalLM, caches: tuple[LayerCache, ...]) -> list[torch.Tensor]:
    """Returns logits of every row for prompts in chunks and whole, then of a decode step."""
    rng = random.Random(9)
    pool = KVPool(layout_of(caches, 16, "float32"), num_blocks=24)
    lens = [1, 17, 40, 90]
    requests, free = [], list(range(24))
    rng.shuffle(free)
    for i, n in enumerate(lens):
        table = [free.pop() for _ in range(n // 16 + 1)]
        requests.append(
            Request(str(i), RequestSpec([rng.randrange(VOCAB_SIZE) for _ in range(n)], GREEDY), tables=[table])
        )
    found = []
    for count in (16, 90, 1):
        chunks = [(r, min(count, r.num_behind)) for r in requests if r.num_behind]
        batch = build_batch(chunks, pool)
        batch.sample_rows = torch.arange(batch.num_tokens)
        with torch.inference_mode():
            found.append(model(batch))
        for request, n in chunks:
            request.num_computed_tokens += n
            if not request.num_behind:
                request.output_token_ids.append(7)
    return found


def kernels(name: str, caches: tuple[LayerCache, ...]) -> Ops:
    ops = TorchOps() if name == "torch" else model_loader.choose_ops(layout_of(caches, 16, "float32"))
    if ops.name != name:
        pytest.skip("no C kernels here")
    return ops


@pytest.mark.parametrize("name", ["torch", "C"])
@pytest.mark.parametrize("architecture", usual_first([each for each in FUSED if each not in INDEXED]))
def test_logits_stay(checkpoint: Checkpoints, architecture: str, name: str) -> None:
    folder = Checkpoint.open(str(checkpoint(architecture)))
    plain = transformers_modules.load_plain(folder, "float32", CPU)
    assert can_fuse(plain)
    caches = caches_of(plain)
    expected = all_logits(PlainCausalLM(plain, caches), caches)
    actual = all_logits(fuse(plain, kernels(name, caches), Served(caches)), caches)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral", "gpt_oss"])
def test_no_plain_weight_is_left(checkpoint: Checkpoints, architecture: str) -> None:
    """Fusing frees the weights of all linear layers and experts that it packs; tied embeddings are kept."""
    model = transformers_modules.load_plain(Checkpoint.open(str(checkpoint(architecture))), "float32", CPU)
    big = {name: weakref.ref(p) for name, p in model.named_parameters() if p.dim() > 1}
    fused = fuse(model, TorchOps(), Served(()))
    del model
    gc.collect()
    kept = {name for name, ref in big.items() if ref() is not None}
    assert {name for name in kept if not name.endswith("mlp.gate.weight")} <= {"model.embed_tokens.weight"}
    assert isinstance(fused, FusedCausalLM)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_norms_round_in_16_bits_as_the_modules_do(checkpoint: Checkpoints, architecture: str) -> None:
    model: Any = transformers_modules.load_plain(Checkpoint.open(str(checkpoint(architecture))), "bfloat16", CPU)
    torch.manual_seed(1)
    x = torch.randn(40, model.config.hidden_size).bfloat16()
    with torch.inference_mode():
        expected = model.model.norm(x)
    quirks = ARCHITECTURES[type(model).__name__]
    assert torch.equal(TorchOps().norm(x, norm_of(model.model.norm, quirks)), expected)


@pytest.mark.parametrize(
    ("architecture", "dtype", "order"),
    [
        ("llama", "float32", "model"),
        ("glm4", "float32", "halves"),
        ("glm4", "float16", "model"),
        ("phi3", "float32", "halves"),
    ],
)
def test_the_order_of_features_in_keys_is_part_of_the_numerics(
    checkpoint: Checkpoints, architecture: str, dtype: str, order: str
) -> None:
    """Unfused layers write keys in transformers' order, so a mixed pair would exchange keys in two orders."""
    settings = EngineConfig(model=str(checkpoint(architecture)), dtype=dtype, num_blocks=40)
    assert load_runner(settings).numerics.key_order == order


@pytest.mark.parametrize(
    ("architecture", "changes", "dtype", "kind"),
    [
        ("llama", {}, "float16", PlainCausalLM),
        ("gpt_oss", {"swiglu_limit": 5.0}, "float32", PlainCausalLM),  # not supported by the kernels
        ("gemma3_text", {"attn_logit_softcapping": 1.0}, "float32", FusedCausalLM),  # Gemma 2's field, ignored here
    ],
)
def test_what_stays_with_transformers(
    checkpoint: Callable[..., Path], architecture: str, changes: dict[str, float], dtype: str, kind: type[CausalLM]
) -> None:
    folder = Checkpoint.open(str(checkpoint(architecture, **changes)))
    assert isinstance(model_loader.load_model(folder, dtype, CPU), kind)


def test_fields_that_configs_may_lack() -> None:
    """transformers 5.17's gpt-oss lacks swiglu_limit. If the kinds of layers differ in rope, a dynamic one counts."""
    assert is_known(GptOssForCausalLM, SimpleNamespace())
    assert not is_known(GptOssForCausalLM, SimpleNamespace(swiglu_limit=5.0))
    mixed = {"sliding_attention": {"rope_type": "linear"}, "full_attention": {"rope_type": "dynamic"}}
    for given, found in ((None, "default"), ({"rope_type": "yarn"}, "yarn"), (mixed, "dynamic")):
        assert rope_type(SimpleNamespace(rope_parameters=given)) == found


def test_without_the_kernels(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1, 2, 3], list(range(60))]
    with_kernels = generate(make_core(checkpoint("gemma2")), prompts, GREEDY)
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    core = make_core(checkpoint("gemma2"))
    assert core.runner.model.kernels == "fused layers, torch kernels, attention by SDPA"  # type: ignore[attr-defined]
    assert generate(core, prompts, GREEDY) == with_kernels


def test_fusing_that_changes_the_numbers_is_refused(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: TorchOps, x: torch.Tensor, norm: object) -> torch.Tensor:
        return x * 1.01

    monkeypatch.setattr(TorchOps, "norm", wrong)
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    with pytest.raises(ModelError, match="changed the logits by"):
        model_loader.load_model(Checkpoint.open(str(checkpoint("llama"))), "float32", CPU)


@pytest.mark.parametrize("num_rows", [1, 256, 257, 600])
def test_many_rows_go_through_the_mlp_in_parts(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr("pd_cluster.model.layers.gated_mlp.MLP_NBYTES_AT_ONCE", 1)
    torch.manual_seed(0)
    gate_up, down = torch.randn(64, 16), torch.randn(16, 32)
    mlp = GatedMLP(make_linear(gate_up), make_linear(down), TorchOps(), "silu", intermediate_size=32)
    x = torch.randn(num_rows, 16)
    gate, up = (x @ gate_up.T).split(32, dim=-1)
    torch.testing.assert_close(mlp(x), (torch.nn.functional.silu(gate) * up) @ down.T, rtol=1e-4, atol=1e-4)
