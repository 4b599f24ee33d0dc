"""Prompt tuning, p-tuning and prefix tuning: the tokens of PEFT's own model, whose reading shares no code with ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pd_cluster import LLM, LoRARequest, PromptAdapterRequest, SamplingParams
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.settings.lora_settings import AdapterSettings, LoraModule
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.types.variants import num_virtual_tokens
from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import CONFIGS
from tests.support.engines import make_core, random_prompt, run
from tests.support.prompt_adapters import Kind, make_prompt_adapter, peft_greedy, variant_of
from tests.support.ranks import ranks
from tests.support.usual import slow_but

Checkpoints = Callable[..., Path]
NUM_TOKENS = 6
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PEFT_CANNOT = {  # with these, PEFT's own code raises
    "prefix": {"gpt_neox", "gpt2", "opt"},
    "prompt": {"opt"},
}


def taking(*folders: Path, **settings: Any) -> AdapterSettings:
    modules = tuple(LoraModule(folder.name, str(folder)) for folder in folders)
    return AdapterSettings(enable_prompt_adapter=True, prompt_adapters=modules, **settings)


def request_of(name: str, prompt: list[int], variant: str, sampling: Sampling = GREEDY) -> Request:
    order = RequestSpec([0] * num_virtual_tokens(variant) + prompt, sampling, variant=variant)
    return Request(name, order, arrival_s=0.0)


def tokens_of(core: EngineCore, prompts: list[list[int]], variants: list[str], **given: Any) -> list[list[int]]:
    """Returns the outputs of all prompts in one batch."""
    pairs = zip(prompts, variants, strict=True)
    requests = [request_of(f"r{at}", prompt, variant, **given) for at, (prompt, variant) in enumerate(pairs)]
    run(core, requests)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("architecture", slow_but({"llama", "gpt2", "gemma2", "glm4"}, CONFIGS))
def test_tokens_are_those_of_peft(checkpoint: Checkpoints, architecture: str, kind: Kind, tmp_path: Path) -> None:
    """Covers batches with adapter-free prompts, and chunks that end within the virtual tokens."""
    if architecture in PEFT_CANNOT[kind]:
        pytest.skip("PEFT fails with this architecture itself")
    base = checkpoint(architecture)
    adapter = make_prompt_adapter(tmp_path / "a", base, kind)
    prompts = [random_prompt(random.Random(1), n) for n in (1, 7, 30)]
    core = make_core(base, adapters=taking(adapter), num_blocks=64, max_num_batched_tokens=11)
    found = tokens_of(core, [*prompts, *prompts], [variant_of(adapter)] * 3 + [""] * 3)
    assert found[:3] == [peft_greedy(base, adapter, prompt, NUM_TOKENS) for prompt in prompts]
    assert found[3:] == [peft_greedy(base, None, prompt, NUM_TOKENS) for prompt in prompts]
    assert found[:3] != found[3:]


@pytest.mark.parametrize(("kind", "pool"), [("prompt", "auto"), ("prefix", "int8")])
def test_it_matters_in_logits(checkpoint: Checkpoints, kind: Kind, pool: str, tmp_path: Path) -> None:
    """The adapter changes logits; a row's bits are the same alone, batched, and for any chunks."""
    base = checkpoint("llama", max_position_embeddings=512)
    adapters = [make_prompt_adapter(tmp_path / f"a{i}", base, kind, 20 + i, seed=i) for i in range(2)]
    variants = ["", *(variant_of(each) for each in adapters)]
    prompt = random_prompt(random.Random(4), 50)
    sampling = Sampling(max_tokens=8, temperature=0.9, seed=4, logprobs=3, ignore_eos=True)

    def all_of(core: EngineCore, ids: list[int]) -> dict[int, Any]:
        requests = [request_of(f"r{at}", prompt, variants[at], sampling) for at in ids]
        outputs = run(core, requests)
        return {at: [(t.token_id, t.logprobs) for t in outputs[f"r{at}"][0]] for at in ids}

    def core_of(**given: Any) -> EngineCore:
        return make_core(base, adapters=taking(*adapters), num_blocks=64, kv_cache_dtype=pool, **given)

    together = all_of(core_of(), [0, 1, 2])
    assert len({str(each) for each in together.values()}) == 3
    for at in range(3):
        assert all_of(core_of(max_num_batched_tokens=16), [at]) == {at: together[at]}
    core = core_of()
    for _ in range(2):  # the second time from the variant's own cached prefix
        for at in (1, 2, 0):
            assert all_of(core, [at]) == {at: together[at]}
    assert core.scheduler.num_prefix_hit_tokens > 0


@pytest.mark.parametrize(("mode", "kind"), [("swap", "prefix"), ("recompute", "prompt")])
def test_preemption(checkpoint: Checkpoints, kind: Kind, mode: str, tmp_path: Path) -> None:
    base = checkpoint("qwen3")
    adapter = make_prompt_adapter(tmp_path / "a", base, kind)
    rng = random.Random(6)
    prompts = [random_prompt(rng, rng.randrange(4, 40)) for _ in range(6)]
    variants = [variant_of(adapter), ""] * 3
    sampling = Sampling(n=2, max_tokens=20, temperature=0.8, seed=7, ignore_eos=True)
    given = {"adapters": taking(adapter), "block_size": 4, "max_model_len": 96}
    expected = tokens_of(make_core(base, num_blocks=512, **given), prompts, variants, sampling=sampling)
    tight = make_core(base, num_blocks=26, preemption_mode=mode, swap_space_gib=0.01, **given)
    assert tokens_of(tight, prompts, variants, sampling=sampling) == expected
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("architecture", "sizes"), [("llama", [2]), pytest.param("glm4", [2, 4], marks=pytest.mark.slow)]
)
def test_ranks(checkpoint: Checkpoints, architecture: str, sizes: list[int], tmp_path: Path) -> None:
    """Each rank has its own heads' keys and values; four ranks share two heads."""
    base = checkpoint(architecture)
    folders = [make_prompt_adapter(tmp_path / kind, base, kind) for kind in ("prompt", "prefix")]  # type: ignore[arg-type]
    prompts = [random_prompt(random.Random(2), n) for n in (1, 20)]
    for size in sizes:
        given = {"adapters": taking(*folders), "num_blocks": 64, "max_num_batched_tokens": 16}
        with ranks(base, size, **given) as core:
            for folder in folders:
                found = tokens_of(core, prompts, [variant_of(folder)] * 2)
                assert found == [peft_greedy(base, folder, prompt, NUM_TOKENS) for prompt in prompts]


def test_penalties_and_prompt_logprobs_do_not_see_virtual_tokens(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    adapter = make_prompt_adapter(tmp_path / "a", base, "p-tuning")
    prompt = [5, 9, 12, 5, 40]
    request = PromptAdapterRequest("a", 1, str(adapter), 5)
    with LLM(str(base), enable_prompt_adapter=True, seed=0) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=2, ignore_eos=True)

        def ask(**given: Any) -> Any:
            (output,) = llm.generate(prompt_token_ids=prompt, sampling_params=params, use_tqdm=False, **given)
            return output

        adapted, plain = ask(prompt_adapter_request=request), ask()
        assert adapted.outputs[0].token_ids == peft_greedy(base, adapter, prompt, NUM_TOKENS)
        assert adapted.prompt_token_ids == prompt
        assert len(adapted.prompt_logprobs) == len(prompt)
        assert adapted.prompt_logprobs[0] is None
        assert [set(each) & {token} for each, token in zip(adapted.prompt_logprobs[1:], prompt[1:], strict=True)]
        assert adapted.prompt_logprobs != plain.prompt_logprobs
        with_virtual = [each.logprob for each in adapted.prompt_logprobs[1].values()]
        assert with_virtual != [each.logprob for each in plain.prompt_logprobs[1].values()]
        # A placeholder's id is 0; with a penalty for it, token 0 would be less likely than with none.
        params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=1.9, logprobs=0, allowed_token_ids=[0])
        penalized = ask(prompt_adapter_request=request).outputs[0].logprobs
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, allowed_token_ids=[0])
        assert penalized[0][0].logprob == ask(prompt_adapter_request=request).outputs[0].logprobs[0][0].logprob


@pytest.mark.usefixtures("one_preloader")
def test_llm_in_one_process_and_split(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Takes a list with one adapter per prompt, loaded on first use, also in worker processes."""
    base = checkpoint("llama")
    soft = make_prompt_adapter(tmp_path / "soft", base)
    prefix = make_prompt_adapter(tmp_path / "prefix", base, "prefix", 9)
    lora = make_adapter(tmp_path / "lora", base)
    prompt = random_prompt(random.Random(5), 20)
    asked: list[Any] = [PromptAdapterRequest("a", 1, str(soft), 5), PromptAdapterRequest("b", 2, str(prefix), 9), None]
    expected = [peft_greedy(base, adapter, prompt, NUM_TOKENS) for adapter in (soft, prefix, None)]
    expected.append(peft_greedy(merged(base, lora, tmp_path / "m"), None, prompt, NUM_TOKENS))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for split in ({}, {"prefill": 1, "decode": 1}):
        with LLM(str(base), enable_prompt_adapter=True, enable_lora=True, **split) as llm:
            outputs = llm.generate(
                prompt_token_ids=[prompt] * 4,
                sampling_params=params,
                use_tqdm=False,
                prompt_adapter_request=[*asked, None],
                lora_request=[None, None, None, LoRARequest("c", 1, str(lora))],
            )
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert [output.error_msg for output in outputs] == [None] * 4


def test_what_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    soft = make_prompt_adapter(tmp_path / "soft", base)
    lora = make_adapter(tmp_path / "lora", base)
    other = make_prompt_adapter(tmp_path / "other", checkpoint("llama", hidden_size=32, head_dim=16))
    with LLM(str(base), enable_prompt_adapter=True, enable_lora=True, max_prompt_adapter_token=8) as llm:
        own = PromptAdapterRequest("a", 1, str(soft), 5)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"prompt_adapter_request": "x"}, r"prompt_adapter_request: 'x'; expected a PromptAdapterRequest"),
            ({"prompt_adapter_request": PromptAdapterRequest("a", 0, "/", 5)}, r"\.prompt_adapter_id: 0; must be"),
            (
                {"prompt_adapter_request": PromptAdapterRequest("a", 1, str(soft), 4)},
                r"virtual_tokens: 4, but .* has 5",
            ),
            ({"prompt_adapter_request": PromptAdapterRequest("a", 1, str(lora), 4)}, r"peft_type 'LORA': not one of"),
            (
                {"prompt_adapter_request": PromptAdapterRequest("a", 1, str(other), 5)},
                r"rows have 32 values; this model has 64",
            ),
            (
                {"prompt_adapter_request": own, "lora_request": LoRARequest("b", 1, str(lora))},
                r"prompt_adapter_request: not with lora_request for one prompt",
            ),
        ]
        for given, why in refused:
            with pytest.raises(RequestError, match=why):
                llm.generate("a", use_tqdm=False, **given)
        long = make_prompt_adapter(tmp_path / "long", base, "prompt", 9)
        with pytest.raises(RequestError, match=r"num_virtual_tokens 9 is above --max-prompt-adapter-token 8"):
            llm.generate("a", use_tqdm=False, prompt_adapter_request=PromptAdapterRequest("a", 1, str(long), 9))
    with LLM(str(base)) as llm, pytest.raises(RequestError, match=r"needs LLM\(…, enable_prompt_adapter=True\)"):
        llm.generate("a", use_tqdm=False, prompt_adapter_request=own)
    with pytest.raises(ConfigError, match="needs enable_prompt_adapter"):
        LLM(str(base), prompt_adapters=[f"a={soft}"])


@pytest.mark.parametrize("architecture", ["llama", "glm4"])
def test_keys_and_values_lie_where_the_pool_has_them(
    checkpoint: Checkpoints, architecture: str, tmp_path: Path
) -> None:
    """Prefix tuning's keys have the model's order of features, but glm4's pool groups the halves of a head."""
    base = checkpoint(architecture)
    folder = make_prompt_adapter(tmp_path / "a", base, "prefix", num_tokens=3)
    core = make_core(base, adapters=taking(folder), num_blocks=64)
    run(core, [request_of("r", [5, 6], variant_of(folder), Sampling(max_tokens=1, temperature=0.0))])
    given = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"].view(3, 3, 2, 2, 16)
    order = core.runner.model.key_features  # type: ignore[attr-defined]
    assert (order is None) == (architecture == "llama")
    order = torch.arange(16) if order is None else order
    pool = core.runner.pool  # type: ignore[attr-defined]
    for layer in range(3):
        keys, values = (cache.reshape(-1, *cache.shape[2:]) for cache in pool.layer(layer))  # by slot
        written = [row for row in range(len(values)) if torch.equal(values[row], given[0, layer, 1])]
        assert len(written) == 1
        rows = slice(written[0], written[0] + 3)  # of one block
        assert torch.equal(values[rows], given[:, layer, 1])
        assert torch.equal(keys[rows], given[:, layer, 0][..., order])
