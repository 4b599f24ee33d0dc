"""Adapters from Python: `LoRARequest` of TACO-LLM and vLLM, `adapters` and `adapter_name` of LMDeploy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster import LLM, GenerationConfig, LoRARequest, PytorchEngineConfig, SamplingParams, pipeline
from pd_cluster.errors import ConfigError, RequestError
from tests.support.adapters import make_adapter, merged
from tests.support.engines import assert_all_same, random_prompt

Checkpoints = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [random_prompt(random.Random(1), n) for n in (3, 20, 41)]


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, folder = checkpoint("llama"), tmp_path_factory.mktemp("adapters")
    found = {"": base}
    for seed, name in enumerate(("a", "b")):
        found[name] = merged(base, make_adapter(folder / name, base, seed), folder / f"merged-{name}")
    return found


@pytest.fixture(scope="module")
def llm(models: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(models[""]), num_blocks=64, enable_lora=True, max_loras=1, max_cpu_loras=2) as made:
        yield made


def request(models: dict[str, Path], name: str, number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, str(models[name].parent / name))


def check(llm: LLM, models: dict[str, Path], names: list[str]) -> None:
    """Checks the answers to PROMPTS by the adapters `names`; "" is the base model."""
    requests = [request(models, name) if name else None for name in names]
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, lora_request=requests, use_tqdm=False)
    assert [output.lora_request for output in outputs] == requests
    for name, prompt, output in zip(names, PROMPTS, outputs, strict=True):
        assert_all_same(models[name], [prompt], [list(output.outputs[0].token_ids)], 8)


def test_a_list_of_requests(llm: LLM, models: dict[str, Path]) -> None:
    for names in (["a", "", "b"], ["b", "b", "b"], ["", "a", "a"]):
        check(llm, models, names)


def test_one_request_for_all_prompts_and_chats(llm: LLM, models: dict[str, Path]) -> None:
    one = request(models, "b")
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, lora_request=one, use_tqdm=False)
    assert_all_same(models["b"], PROMPTS, [list(output.outputs[0].token_ids) for output in outputs], 8)
    (chat,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, lora_request=one, use_tqdm=False)
    assert chat.lora_request == one
    assert_all_same(models["b"], [list(chat.prompt_token_ids)], [list(chat.outputs[0].token_ids)], 8)


def test_vectors(llm: LLM, models: dict[str, Path]) -> None:
    plain, adapted = llm.embed(["one", "one"], lora_request=[None, request(models, "a")], use_tqdm=False)
    with LLM(str(models["a"]), num_blocks=64) as whole:
        (expected,) = whole.embed(["one"], use_tqdm=False)
    assert adapted.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=1e-4)
    assert plain.outputs.embedding != pytest.approx(expected.outputs.embedding, abs=1e-2)


def test_a_folder_that_is_replaced_is_another_adapter(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    with LLM(str(base), num_blocks=64, enable_lora=True) as llm:
        for seed in (1, 2):
            folder = make_adapter(tmp_path / "x", base, seed)
            model = merged(base, folder, tmp_path / f"merged-{seed}")
            output = llm.generate(
                prompt_token_ids=PROMPTS[2], sampling_params=GREEDY, lora_request=LoRARequest("x", 1, str(folder))
            )[0]
            assert output.num_cached_tokens == 0
            assert_all_same(model, [PROMPTS[2]], [list(output.outputs[0].token_ids)], 8)


def test_what_is_refused(llm: LLM, models: dict[str, Path], tmp_path: Path) -> None:
    wide = make_adapter(tmp_path / "r", models[""], rank=17)
    for path, why in (
        (tmp_path / "nothing", "^lora_request: .*no such folder"),
        (wide, "rank 17 is above max_lora_rank 16; raise that"),
    ):
        with pytest.raises(RequestError, match=why):
            llm.generate("a", GREEDY, lora_request=LoRARequest("c", 3, str(path)), use_tqdm=False)
        check(llm, models, ["a", "b", ""])


def test_more_than_there_is_room_for(llm: LLM, models: dict[str, Path], tmp_path: Path) -> None:
    """Five adapters of one call take turns in memory for two, and evicted ones are read again."""
    adapters = [make_adapter(tmp_path / f"a{at}", models[""], 9 + at) for at in range(5)]
    folders = [merged(models[""], each, tmp_path / f"m{at}") for at, each in enumerate(adapters)]
    requests = [LoRARequest("a", 1, str(each)) for each in adapters]
    for _ in range(2):
        outputs = llm.generate(
            prompt_token_ids=[PROMPTS[2]] * 5, sampling_params=GREEDY, use_tqdm=False, lora_request=requests
        )
        for folder, output in zip(folders, outputs, strict=True):
            assert_all_same(folder, [PROMPTS[2]], [list(output.outputs[0].token_ids)], 8)
    check(llm, models, ["a", "b", ""])


@pytest.mark.usefixtures("one_preloader")
def test_worker_processes(models: dict[str, Path], tmp_path: Path) -> None:
    """Two ranks per side have adapters from the start, identified by content, and load others on first use."""
    folder = models["a"].parent
    modules = [f"a={folder / 'a'}", f"b={folder / 'b'}"]
    sizes = {"prefill": 1, "decode": 1, "tensor_parallel_size": 2, "num_blocks": 64}
    with LLM(str(models[""]), enable_lora=True, lora_modules=modules, max_loras=2, **sizes) as llm:  # type: ignore[arg-type]
        check(llm, models, ["a", "", "b"])
        other = make_adapter(tmp_path / "other", models[""], 7)
        first = LoRARequest("o", 1, str(other))
        (output,) = llm.generate("a", GREEDY, lora_request=first, use_tqdm=False)
        folder = merged(models[""], other, tmp_path / "merged")
        assert_all_same(folder, [output.prompt_token_ids], [list(output.outputs[0].token_ids)], GREEDY.max_tokens)
        wide = make_adapter(tmp_path / "wide", models[""], 8, rank=32)
        with pytest.raises(RequestError, match=r"rank 32 .*max_lora_rank 16"):
            llm.generate("a", GREEDY, lora_request=LoRARequest("w", 2, str(wide)), use_tqdm=False)


def test_adapters_of_a_pipeline(models: dict[str, Path]) -> None:
    folder = models["a"].parent
    config = PytorchEngineConfig(adapters={name: str(folder / name) for name in ("a", "b")}, num_gpu_blocks=64)
    greedy = GenerationConfig(max_new_tokens=8, top_k=1)
    with pipeline(str(models[""]), backend_config=config) as pipe:
        for name in ("a", "", "b"):
            options = {"adapter_name": name} if name else {}
            (answer,) = pipe(["Hello there"], gen_config=greedy, do_preprocess=False, **options)
            prompt = pipe.tokenizer.encode("Hello there")
            assert_all_same(models[name], [prompt], [list(answer.token_ids)], 8)
        with pytest.raises(RequestError, match="adapter_name: 'c'; the engine's adapters: a, b"):
            pipe("Hello", adapter_name="c")
    with pytest.raises(ConfigError, match="/a: no such folder"):
        pipeline(str(models[""]), backend_config=PytorchEngineConfig(adapters={"a": "/a"}))
