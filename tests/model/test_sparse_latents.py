"""Sparse latent attention: the indexer chooses keys as transformers does, whatever happens to the pool's blocks.

References are passes over whole sequences, without transformers' cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError, LinkError, ModelError
from pd_cluster.kv.pool_compatibility import check_pair
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.attention_backend import choose_attention
from pd_cluster.model.language_model.cache_declaration import LayerCache, caches_of, layout_of
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.attention.sparse_indexer import Indexer
from pd_cluster.model.layers.fused_layer import LatentAttention
from pd_cluster.model.layers.ops import Rope
from pd_cluster.model.loading import model_loader
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.wire import Plane
from tests.model.test_latents import V3, prompts_of
from tests.model.test_lora import check
from tests.support.adapters import digest_of, loaded, make_adapter, merged
from tests.support.checkpoints import prefers
from tests.support.engines import generate, make_core, random_prompt, run
from tests.support.more_checkpoints import SPARSE
from tests.support.reference_beams import assert_all_same_beams

Checkpoints = Callable[..., Path]
TYPES = ["deepseek_v32", "glm_moe_dsa"]
CHOOSE = Indexer.choose
GREEDY = Sampling(max_tokens=16, temperature=0.0)
PLANES = (Plane("latent", 48), Plane("rope", 16), Plane("index", 64))
V32: dict[str, Any] = {**V3, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}


def assert_preferred(folder: Path, prompts: list[list[int]], outputs: list[list[int]], sampling: Sampling) -> None:
    """Asserts that each token is transformers' best one after the preceding tokens."""
    assert prefers(folder, prompts, outputs, [sampling.max_tokens] * len(prompts))


def layout_in(core: EngineCore) -> Any:
    return core.runner.pool.layout  # type: ignore[attr-defined]


@pytest.fixture
def indexers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Records the choices of the indexers in a test: a layer, and whether it chose for some of the tokens."""
    seen: list[tuple[int, bool]] = []

    def noted(self: Indexer, x: torch.Tensor, residual: torch.Tensor, rope: Rope, batch: ForwardBatch) -> None:
        CHOOSE(self, x, residual, rope, batch)
        seen.append((self.layer_idx, batch.chosen is not None))

    monkeypatch.setattr(Indexer, "choose", noted)
    return seen


@pytest.mark.parametrize(("architecture", "num_tokens"), [("deepseek_v32", 5), ("glm_moe_dsa", 17)])
def test_prompts_in_chunks(
    checkpoint: Checkpoints, architecture: str, num_tokens: int, indexers: list[tuple[int, bool]]
) -> None:
    """Covers steps that begin anywhere in a block, with tokens that see all keys or only chosen ones."""
    folder, prompts = checkpoint(architecture), prompts_of(1)
    core = make_core(folder, block_size=4, max_num_batched_tokens=num_tokens, num_blocks=96, max_model_len=128)
    indexers.clear()
    assert_preferred(folder, prompts, generate(core, prompts, GREEDY), GREEDY)
    layers = {0, 1, 2} if architecture == "deepseek_v32" else {0, 2}
    assert {each for each in indexers if each[1]} == {(layer, True) for layer in layers}


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", range(1, 18))
@pytest.mark.parametrize("architecture", TYPES)
def test_chunks_of_every_length(checkpoint: Checkpoints, architecture: str, num_tokens: int) -> None:
    folder, prompts = checkpoint(architecture), prompts_of(num_tokens)
    core = make_core(folder, block_size=3, max_num_batched_tokens=num_tokens, num_blocks=96, max_model_len=128)
    assert_preferred(folder, prompts, generate(core, prompts, GREEDY), GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TYPES)
def test_in_torch_where_there_are_no_kernels(
    checkpoint: Checkpoints, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    folder, prompts = checkpoint(architecture), prompts_of(2)
    core = make_core(folder, block_size=4, max_num_batched_tokens=11, num_blocks=96, max_model_len=128)
    assert "torch kernels" in core.runner.model.kernels  # type: ignore[attr-defined]
    assert_preferred(folder, prompts, generate(core, prompts, GREEDY), GREEDY)


def numbers(core: EngineCore, prompts: list[list[int]], chosen: list[int]) -> dict[str, list[Any]]:
    sampling = Sampling(max_tokens=6, temperature=0.0, logprobs=4, ignore_eos=True)
    requests = [Request(str(i), RequestSpec(prompts[i], sampling), arrival_s=float(i)) for i in chosen]
    found = run(core, requests)
    return {name: [(token.token_id, token.logprobs) for token in tokens[0]] for name, tokens in found.items()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", [pytest.param("deepseek_v32", marks=pytest.mark.slow), "glm_moe_dsa"])
def test_logprobs_are_equal_to_the_bit(checkpoint: Checkpoints, architecture: str) -> None:
    """Covers single requests, batches, and chunks of every kind."""
    folder, prompts = checkpoint(architecture), prompts_of(3)
    settings: dict[str, Any] = {"num_blocks": 96, "max_model_len": 128, "enable_prefix_caching": False}
    core = make_core(folder, block_size=4, **settings)
    together = numbers(core, prompts, [0, 1, 2, 3])
    for only in range(4):
        assert numbers(core, prompts, [only])[str(only)] == together[str(only)]
    for num_tokens in (3, 16):
        chunked = make_core(folder, block_size=4, max_num_batched_tokens=num_tokens, **settings)
        assert numbers(chunked, prompts, [3, 2, 1, 0]) == together


@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
def test_sequences_that_are_preempted(checkpoint: Checkpoints, mode: str) -> None:
    """Runs four sequences that grow to 13 blocks each, in a pool of 30; layers have different planes."""
    folder, rng = checkpoint("glm_moe_dsa"), random.Random(2)
    prompts, sampling = [random_prompt(rng, 10) for _ in range(4)], Sampling(max_tokens=40, temperature=0.0)
    core = make_core(folder, block_size=4, num_blocks=30, preemption_mode=mode, swap_space_gib=0.01, max_model_len=64)
    outputs = generate(core, prompts, sampling)
    assert core.scheduler.num_preemptions
    assert_preferred(folder, prompts, outputs, sampling)


def test_cached_prefixes_forks_and_beams(checkpoint: Checkpoints) -> None:
    """Covers a repeated and an extended prompt, three sequences of one prompt, and four beams, which share blocks."""
    folder, prompt = checkpoint("glm_moe_dsa"), random_prompt(random.Random(7), 70)
    core = make_core(folder, block_size=8, max_num_batched_tokens=40, num_blocks=96, max_model_len=128)
    (answer,) = generate(core, [prompt], GREEDY)
    for again, num_cached in ((prompt, 64), ([*prompt, *answer, 5, 6], 80)):
        request = Request("again", RequestSpec(again, GREEDY))
        run(core, [request])
        assert request.num_cached_tokens == num_cached
        assert_preferred(folder, [again], [request.output_token_ids], GREEDY)
    forked = run(core, [Request("n", RequestSpec(prompt[:45], Sampling(max_tokens=12, temperature=0.0, n=3)))])["n"]
    outputs = [[token.token_id for token in forked[index]] for index in range(3)]
    assert prefers(folder, [prompt[:45]] * 3, outputs, [12] * 3)
    beams = Sampling(n=4, beam_width=4, temperature=0.0, max_tokens=12)
    found = run(core, [Request("b", RequestSpec(prompt[:33], beams))])["b"]
    outputs = [[token.token_id for token in found[index]] for index in range(4)]
    assert_all_same_beams(folder, [prompt[:33]], [outputs], beams)


def test_layers_without_an_indexer_keep_no_index_keys(checkpoint: Checkpoints) -> None:
    layout = layout_in(make_core(checkpoint("glm_moe_dsa"), num_blocks=32))
    assert (layout.num_kv_heads, layout.planes) == (1, PLANES)
    assert layout.plane_layers == ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2))
    assert layout.token_nbytes == (4 * (48 + 16) + 2 * 64) * 4


def test_a_token_of_deepseek_v32() -> None:
    """A token takes 61 layers of 512 + 64 + 128 two-byte numbers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v32", **V32))
    caches = caches_of(model)
    assert layout_of(caches[:1] * 61, 64, "bfloat16").token_nbytes == 85_888


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "int4"])
def test_index_keys_are_never_codes(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {dtype}: the index keys .* cannot be quantized; use auto"):
        layout_of((LayerCache(1, PLANES),), 16, dtype)


def test_layers_that_keep_other_widths_are_no_model_and_no_pair() -> None:
    full, shared = LayerCache(1, PLANES), LayerCache(1, PLANES[:2])
    mixed, all_full = layout_of((full, shared), 16, "float32"), layout_of((full, full), 16, "float32")
    assert all_full.plane_layers == ()
    with pytest.raises(LinkError, match=r"plane_layers is .* on the prefill instance and"):
        check_pair(mixed, all_full)
    with pytest.raises(LinkError, match="planes is latent, rope, index on the prefill instance and latent, rope on"):
        check_pair(all_full, layout_of((shared, shared), 16, "float32"))


def test_kernels_and_dtypes_without_fused_layers_are_refused(checkpoint: Checkpoints) -> None:
    layout = layout_of((LayerCache(1, PLANES),), 16, "bfloat16")
    for kind, backend in (("cuda", "sdpa"), ("cuda", "flashinfer"), ("npu", "sdpa")):
        with pytest.raises(ConfigError, match=f"--attention-backend {backend}: sparse attention .*; use auto"):
            choose_attention(backend, None, layout, Device(kind, 0))
    folder = Checkpoint.open(str(checkpoint("glm_moe_dsa")))
    with pytest.raises(
        ConfigError, match=r"--dtype float16: glm_moe_dsa supports sparse attention only in fused layers, .* use auto"
    ):
        model_loader.load_model(folder, "float16", CPU)


def changed(folder: Path, to: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Writes the same checkpoint with other weights."""
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (to / file.name).symlink_to(file)
    weights = {name: change(name, value) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def test_small_index_keys_are_normed_as_transformers_norms_them(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Uses keys so small that the norm's eps determines the best ones."""
    small = changed(checkpoint("deepseek_v32"), tmp_path, lambda name, value: value * (5e-4 if ".wk." in name else 1))
    core = make_core(small, block_size=4, num_blocks=96, max_model_len=128)
    prompts = prompts_of(4)
    assert_preferred(small, prompts, generate(core, prompts, GREEDY), GREEDY)
    for indexer in core.runner.model.indexers:  # type: ignore[attr-defined]
        assert indexer.norm.eps == 1e-6


def wrong_rotation(self: Indexer, x: torch.Tensor, residual: torch.Tensor, rope: Rope, batch: ForwardBatch) -> None:
    CHOOSE(self, x, residual, Rope(rope.cos[:, 4:12].contiguous(), rope.sin[:, 4:12].contiguous()), batch)


def wrong_number(self: Indexer, x: torch.Tensor, residual: torch.Tensor, rope: Rope, batch: ForwardBatch) -> None:
    self.index_topk = 4
    CHOOSE(self, x, residual, rope, batch)


@pytest.mark.parametrize("fault", [wrong_rotation, wrong_number])
def test_an_indexer_that_chooses_wrongly_is_noticed_at_load(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    """The check at load reduces the number of chosen keys, because its prompts are short."""
    monkeypatch.setattr(Indexer, "choose", fault)
    with pytest.raises(ModelError, match="fusing the layers changed the logits"):
        make_core(checkpoint("glm_moe_dsa"), num_blocks=32)


def test_layers_that_do_not_take_the_choice_of_the_last_full_one_are_noticed_at_load(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = LatentAttention.attend

    def by_itself(self: LatentAttention, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        if self.indexer is None:
            batch.chosen = None
        return attend(self, x, ropes, batch)

    monkeypatch.setattr(LatentAttention, "attend", by_itself)
    with pytest.raises(ModelError, match="fusing the layers changed the logits"):
        make_core(checkpoint("glm_moe_dsa"), num_blocks=32)


def test_the_number_of_chosen_keys_is_the_models_after_the_proof(checkpoint: Checkpoints) -> None:
    model = make_core(checkpoint("glm_moe_dsa"), num_blocks=32).runner.model  # type: ignore[attr-defined]
    assert isinstance(model, FusedCausalLM)
    assert [indexer.index_topk for indexer in model.indexers] == [SPARSE["index_topk"]] * 2


@pytest.mark.slow
def test_an_adapter_beside_an_indexer(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("glm_moe_dsa")
    adapter = make_adapter(tmp_path / "a", folder, 1, only=r"q_b_proj|kv_a_proj|o_proj|indexer")
    core = make_core(folder, adapters=loaded(adapter), max_num_batched_tokens=24, num_blocks=64, max_model_len=128)
    check(core, {"": folder, digest_of(adapter): merged(folder, adapter, tmp_path / "m")}, prompts_of(5), GREEDY)


@pytest.mark.slow
def test_layers_that_predict_further_tokens_are_left_out(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("deepseek_v32")
    weights = load_file(folder / "model.safetensors")
    further = {key.replace("layers.2.", "layers.3."): value.clone() for key, value in weights.items() if "rs.2." in key}
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (tmp_path / file.name).symlink_to(file)
    config = {**json.loads((folder / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({**weights, **further}, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = random_prompt(random.Random(5), 40)
    outputs = generate(make_core(tmp_path, num_blocks=32, max_model_len=128), [prompt], GREEDY)
    assert_preferred(folder, [prompt], outputs, GREEDY)
