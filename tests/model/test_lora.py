"""With LoRA adapters, each row gets the tokens of the model merged with its own adapter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.model.inputs.step_input import AdapterSlots, step_input
from pd_cluster.native import build
from pd_cluster.native import lora_products as native
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.adapters import digest_of, loaded, logits_of, make_adapter, merged
from tests.support.checkpoints import CONFIGS, reference_greedy_together
from tests.support.engines import assert_all_same, make_core, random_prompt, run
from tests.support.ranks import ranks
from tests.support.usual import usual_first

Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
PATTERNS = {"rank_pattern": {r"layers.\d+.self_attn.q_proj": 2, "h.1.attn.c_attn": 6}, "alpha_pattern": {"v_proj": 1}}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUICK_OF_RANKS = ("llama", "mixtral", "glm4")
WITHOUT_PLAN = ("gpt2", "opt", "stablelm", "gpt_oss", "gpt_neox")
OTHERS = [name for name in CONFIGS if name not in (*WITHOUT_PLAN, *QUICK_OF_RANKS)]


def of_adapters(prompts: list[list[int]], variants: list[str], sampling: Sampling = GREEDY) -> list[Request]:
    """Returns a request for each prompt, cycling through the adapters."""
    orders = [RequestSpec(prompt, sampling, variant=variants[i % len(variants)]) for i, prompt in enumerate(prompts)]
    return [Request(f"r{i}", order, arrival_s=float(i)) for i, order in enumerate(orders)]


def check(core: EngineCore, models: dict[str, Path], prompts: list[list[int]], sampling: Sampling = GREEDY) -> None:
    """Generates for all prompts at once; `models`: the merged model of each variant."""
    requests = of_adapters(prompts, list(models), sampling)
    run(core, requests)
    for variant, folder in models.items():
        own = [request for request in requests if request.order.variant == variant]
        outputs = [request.output_token_ids for request in own]
        assert_all_same(folder, [each.prompt_token_ids for each in own], outputs, sampling.max_tokens)


@pytest.mark.parametrize("architecture", usual_first(CONFIGS))
def test_tokens_are_those_of_the_merged_model(checkpoint: Checkpoints, architecture: str, tmp_path: Path) -> None:
    """Batches two adapters and the base model, with chunks, patterns, rsLoRA and omitted layers."""
    folder = checkpoint(architecture)
    first = make_adapter(tmp_path / "a", folder, 1, **PATTERNS)
    second = make_adapter(tmp_path / "b", folder, 2, rank=3, use_rslora=True, only=r"\.[02]\.")
    prompts = [random_prompt(random.Random(1), n) for n in (1, 16, 41, 70, 5, 33)]
    models = {"": folder}
    for adapter in (first, second):
        models[digest_of(adapter)] = merged(folder, adapter, tmp_path / f"merged-{adapter.name}")
    core = make_core(folder, adapters=loaded(first, second), max_num_batched_tokens=40, num_blocks=64)
    check(core, models, prompts)
    plain, *adapted = (reference_greedy_together(each, prompts, GREEDY.max_tokens) for each in models.values())
    assert plain not in adapted, "the adapters must change tokens"


def test_32_sequences_with_8_adapters_and_none(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Covers adapter files of every dtype."""
    folder = checkpoint("llama")
    adapters = [make_adapter(tmp_path / f"a{i}", folder, i, rank=1 + i, dtype=DTYPES[i % 3]) for i in range(8)]
    models = {digest_of(each): merged(folder, each, tmp_path / f"m-{each.name}") for each in adapters} | {"": folder}
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 60)) for _ in range(32)]
    core = make_core(folder, adapters=loaded(*adapters), max_num_batched_tokens=96, num_blocks=256)
    check(core, models, prompts, Sampling(max_tokens=8, temperature=0.0))


@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        ("phi3", 4),
        *((name, 2) for name in QUICK_OF_RANKS),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_ranks(checkpoint: Checkpoints, architecture: str, size: int, tmp_path: Path) -> None:
    """Covers four ranks, which have replicated heads."""
    folder = checkpoint(architecture)
    adapter = make_adapter(tmp_path / "a", folder, 3, **PATTERNS)
    models = {"": folder, digest_of(adapter): merged(folder, adapter, tmp_path / "m")}
    prompts = [random_prompt(random.Random(3), n) for n in (1, 41, 16, 30)]
    with ranks(folder, size, adapters=loaded(adapter), max_num_batched_tokens=40, num_blocks=64) as core:
        check(core, models, prompts, Sampling(max_tokens=6, temperature=0.0))


@pytest.mark.parametrize("rank", [1, 64])
def test_a_row_has_the_same_bits_in_any_company(checkpoint: Checkpoints, tmp_path: Path, rank: int) -> None:
    """A row has the same bits alone and beside rows of any adapter or none, also at widths above 1,024."""
    wide = {"hidden_size": 1280, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 128}
    folder = checkpoint("llama", **wide, intermediate_size=2560, num_hidden_layers=2, initializer_range=0.03)
    adapters = [make_adapter(tmp_path / f"a{i}", folder, i, rank=rank, strength=0.03) for i in range(3)]
    core = make_core(folder, adapters=loaded(*adapters, max_lora_rank=64), num_blocks=320)
    variants = [*(digest_of(each) for each in adapters), ""]
    for length in (1, 9):
        requests = of_adapters([random_prompt(random.Random(i), length) for i in range(20)], variants)
        together = logits_of(core, requests)
        for at in (0, 1, 3, 18):
            for company in ([at], [at, (at + 4) % 20], [(at + 1) % 20, at], [*range(12, 20), at]):
                row = logits_of(core, [requests[i] for i in company])[company.index(at)]
                assert torch.equal(row, together[at])
    plain = of_adapters([requests[0].prompt_token_ids], [""])
    assert not torch.equal(logits_of(core, requests[:1]), logits_of(core, plain))


def test_steps_without_adapters_have_nothing_of_them(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    adapter = make_adapter(tmp_path / "a", folder)
    core = make_core(folder, adapters=loaded(adapter), num_blocks=32)
    without = make_core(folder, num_blocks=32)
    requests = of_adapters([[1, 2, 3]], [""])
    slots = core.runner.held.variants  # type: ignore[attr-defined]
    assert step_input([(requests[0], 3)], 16, AdapterSlots(slots)).adapters is None
    assert torch.equal(logits_of(core, requests), logits_of(without, requests))
    assert not core.runner.model.adapters.places.rows.are_adapted  # type: ignore[attr-defined]
    assert without.runner.model.adapters is None  # type: ignore[attr-defined]


def test_without_the_kernels(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    assert not build.are_wanted()
    native._function.cache_clear()
    try:
        folder = checkpoint("qwen3")
        adapter = make_adapter(tmp_path / "a", folder)
        core = make_core(folder, adapters=loaded(adapter), num_blocks=64)
        models = {"": folder, digest_of(adapter): merged(folder, adapter, tmp_path / "m")}
        prompts = [random_prompt(random.Random(3), n) for n in (1, 30, 7)]
        check(core, models, prompts, Sampling(max_tokens=6, temperature=0.0))
    finally:
        native._function.cache_clear()


def test_a_long_prompt_is_computed_in_parts_of_its_mlp_only_without_adapters(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """GatedMLP divides many rows into parts, but an adapter's layers need to know their rows."""
    folder = checkpoint("llama", intermediate_size=4096, max_position_embeddings=2048)
    adapter = make_adapter(tmp_path / "a", folder, strength=0.05)
    models = {"": folder, digest_of(adapter): merged(folder, adapter, tmp_path / "m")}
    core = make_core(folder, adapters=loaded(adapter), num_blocks=256)
    prompts = [random_prompt(random.Random(i), 900) for i in range(2)]
    check(core, models, prompts, Sampling(max_tokens=4, temperature=0.0))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_forks_and_beams(checkpoint: Checkpoints, tmp_path: Path, mode: str) -> None:
    """A too small pool, and at most one adapter per step, give the same results as with room for all."""
    folder = checkpoint("qwen3")
    adapters = [make_adapter(tmp_path / f"a{i}", folder, i) for i in range(2)]
    variants = ["", *(digest_of(each) for each in adapters)]
    rng, sizes = random.Random(4), {"block_size": 4, "max_model_len": 96}
    prompts = [random_prompt(rng, rng.randrange(4, 40)) for _ in range(6)]
    sampling = [
        Sampling(n=3, max_tokens=20, temperature=0.8, seed=7),
        Sampling(n=2, max_tokens=10, temperature=0.0, beam_width=2),
    ]
    for each in sampling:
        ample = make_core(folder, adapters=loaded(*adapters), num_blocks=512, **sizes)
        expected = run(ample, of_adapters(prompts, variants, each))
        room = {"num_blocks": 26, "preemption_mode": mode, "swap_space_gib": 0.01, **sizes}
        tight = make_core(folder, adapters=loaded(*adapters, max_loras=1), **room)
        assert run(tight, of_adapters(prompts, variants, each)) == expected
        assert tight.scheduler.num_preemptions > 0


def test_prefix_hits_stay_within_an_adapter(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Adapters are identified by their content, so this holds even if a folder's files are replaced."""
    folder = checkpoint("llama")
    adapter = make_adapter(tmp_path / "a", folder, 1)
    core = make_core(folder, adapters=loaded(adapter), num_blocks=64)
    before = digest_of(adapter)
    make_adapter(adapter, folder, 2)
    core.runner.held.load_adapter(LoraFolder.read(adapter, 16))  # type: ignore[attr-defined]
    after = digest_of(adapter)
    model = merged(folder, adapter, tmp_path / "m")
    prompt = random_prompt(random.Random(1), 50)
    for variant, num_cached in [("", 0), (before, 0), (after, 0), ("", 48), (before, 48), (after, 48)]:
        (request,) = of_adapters([prompt], [variant])
        run(core, [request])
        assert request.num_cached_tokens == num_cached
        if variant == after:
            assert_all_same(model, [prompt], [request.output_token_ids], GREEDY.max_tokens)


def test_every_tensor_has_a_place_or_is_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    llama, down = checkpoint("llama"), r"down_proj: A .* and B \[128, 4\] do not fit .* 96 inputs and 64 outputs"
    for at, (base, only, why) in enumerate(
        [
            (checkpoint("gpt2"), "", r"h\.0\.attn\.c_attn: this model has no linear layer of this name"),
            (checkpoint("llama", hidden_size=128), "", down),
            (checkpoint("llama", num_hidden_layers=4), r"\.3\.", r"layers\.3\..*: this model has no linear layer"),
        ]
    ):
        adapter = make_adapter(tmp_path / str(at), base, only=only)
        with pytest.raises(ModelError, match=why):
            make_core(llama, adapters=loaded(adapter), num_blocks=32)
    with pytest.raises(ConfigError, match=r"--max-lora-rank 2; raise that"):
        make_core(llama, adapters=loaded(make_adapter(tmp_path / "r", llama), max_lora_rank=2), num_blocks=32)


def test_numbers_that_are_none(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    adapter = make_adapter(tmp_path / "a", folder, lora_alpha=4000)
    file, name = adapter / "adapter_model.safetensors", "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors = load_file(file)
    for value, why in ((float("nan"), "NaN or infinity"), (1e38, "overflow float32")):
        tensors[name][0, 0] = value
        save_file(tensors, file)
        with pytest.raises(ModelError, match=rf"model\.layers\.1\.mlp\.up_proj: .*{why}"):
            make_core(folder, adapters=loaded(adapter), num_blocks=32)


def test_an_adapter_that_is_not_here(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A missing adapter is the caller's error, and is never replaced by the base model."""
    folder = checkpoint("llama")
    core = make_core(folder, adapters=loaded(make_adapter(tmp_path / "a", folder)), num_blocks=32)
    (request,) = of_adapters([[1, 2]], ["0" * 64])
    with pytest.raises(KeyError):
        core.runner.forward([(request, 2)])
    limits = EngineLimits(320, 512, core.runner.model.rope_limit, core.runner.held.variants)  # type: ignore[attr-defined]
    assert limits.lacks(request) == "the adapter 000000000000 is not loaded on this instance"
    assert limits.lacks(of_adapters([[1, 2]], list(core.runner.held.variants))[0]) is None  # type: ignore[attr-defined]
    assert limits.lacks(of_adapters([[1, 2]], [""])[0]) is None
