"""With `--kv-cache-dtype`, engines give the tokens of transformers with an equally quantized cache."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from pd_cluster import LLM, SamplingParams
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.kv.kv_layout import CODE_BITS
from pd_cluster.model.layers import packed_linear
from pd_cluster.model.loading import model_loader
from pd_cluster.model.loading.model_loader import load_model, resolve_dtype
from pd_cluster.native import packed_products as quantized
from pd_cluster.settings.engine_config import KV_CACHE_DTYPES, EngineConfig
from tests.model.test_company import numbers, prompts_of, wide
from tests.support.checkpoints import make_checkpoint, reference_model
from tests.support.coded_cache import CacheOf, generated
from tests.support.engines import random_prompt
from tests.support.spread import spread
from tests.support.watched import watching

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]
FUSED = ["llama", "qwen3", "gemma2", "gpt_oss", "phi3", "mixtral"]
UNFUSED = ["gpt2", "gpt_neox", "opt"]


def expected(folder: Path, dtype: str) -> list[list[int]]:
    return generated(folder, dtype, PROMPTS, 10)


def tokens_of(folder: Path, pool: str, **settings: Any) -> list[list[int]]:
    settings = {"max_model_len": 128, "num_blocks": 64, "kv_cache_dtype": pool} | settings
    with LLM(str(folder), **settings) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("dtype", "architecture"), spread(["bfloat16", *CODE_BITS], [*FUSED, *UNFUSED]))
def test_tokens_are_transformers_with_such_a_cache(tmp_path: Path, architecture: str, dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    assert tokens_of(folder, dtype) == expected(folder, dtype)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *(("llama", dtype) for dtype in ("bfloat16", *CODE_BITS)),
        ("gpt2", "int8"),
        *(("deepseek_v3", dtype) for dtype in ("bfloat16", "int8", "fp8_e4m3")),  # a scale for each plane
    ],
)
def test_logits_are_transformers_with_such_a_cache(tmp_path: Path, architecture: str, dtype: str) -> None:
    """Logits are much closer to a quantized cache's than to a plain cache's, so quantization is in effect."""
    folder = make_checkpoint(tmp_path / "model", architecture)
    with torch.inference_mode():
        ours, plain = (
            reference_model(folder)(torch.tensor([PROMPTS[2]]), past_key_values=CacheOf(each)).logits.log_softmax(-1)
            for each in (dtype, "float32")
        )
    wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), max_model_len=128, num_blocks=64, kv_cache_dtype=dtype, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate(prompt_token_ids=PROMPTS[2], sampling_params=wanted, use_tqdm=False)
    found = torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]])
    at = torch.tensor(PROMPTS[2][1:])[:, None]
    own, other = ((found - each[0, :-1].gather(1, at)[:, 0]).abs().mean() for each in (ours, plain))
    assert own < other / 5


@pytest.mark.parametrize(("dtype", "mode"), spread(list(CODE_BITS), ["recompute", "swap"]))
def test_preempted_requests_go_on_as_they_were(tmp_path: Path, dtype: str, mode: str) -> None:
    """With blocks for one and a half requests, small chunks and cached prefixes, preempted requests are unchanged."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    tight = {"num_blocks": 6, "block_size": 8, "max_model_len": 48, "max_num_batched_tokens": 12}
    prompts = [[*PROMPTS[1], *tail] for tail in ([], [5], PROMPTS[2][:7])]
    wanted = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for settings in ({"num_blocks": 64}, {**tight, "preemption_mode": mode, "growth_tokens": 0}):
        with LLM(str(folder), kv_cache_dtype=dtype, **({"max_model_len": 48} | settings)) as llm:
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=wanted, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


def test_a_narrower_pool_holds_more(tmp_path: Path) -> None:
    """A float32 pool takes 4 bytes per number, an int8 pool one, plus 4 for the scale of 16 numbers."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    sizes = {}
    for dtype in ("auto", "int8"):
        with watching() as made, LLM(str(folder), max_model_len=64, kv_cache_dtype=dtype, kv_cache_memory_gib=0.001):
            pool = made[0].runner.pool
            sizes[dtype] = (pool.num_blocks, pool.layout.dtype, pool.layout.planes[0].width)
    (plain, *names), (narrow, *others) = sizes["auto"], sizes["int8"]
    assert (names, others) == (["float32", 16], ["int8", 16])
    assert narrow == pytest.approx(plain * 4 * 16 / (16 + 4), rel=0.05)


def test_names_of_other_engines(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    others = {name: meaning for name, meaning in KV_CACHE_DTYPES.items() if name != meaning}
    meant = {meaning: tokens_of(folder, meaning) for meaning in set(others.values())}
    for name, meaning in others.items():
        assert tokens_of(folder, name) == meant[meaning]
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'fp8_e5m2': expected one of auto, bfloat16, int8"):
        tokens_of(folder, "fp8_e5m2")


# ---- bfloat16 on a CPU: matrices of 16 bits, activations and sums in float32


WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
BF16_PROMPTS = [random_prompt(random.Random(1), n) for n in (3, 17, 40)]
ARCHITECTURES = ["llama", "gemma2", "phi3", "glm4", "mixtral", "gpt_oss"]


def narrow(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Writes a bfloat16 checkpoint."""
    if quantized.bf16_way() is None:
        pytest.skip("the C kernels cannot run here")
    made = make_checkpoint(folder, architecture, **changes)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    model.save_pretrained(made)
    return made


@contextmanager
def rounded_products(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Makes transformers' float32 model round its matrices' inputs to bfloat16."""

    def round_inputs(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].bfloat16().float(), *args[1:])

    hooks = [
        module.register_forward_pre_hook(round_inputs)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    yield model
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_rounded_products(tmp_path: Path, architecture: str) -> None:
    """Logprobs are closer to transformers in float32 with such inputs and cache than transformers' bfloat16 is.

    Compares only the first token, because later ones depend on earlier choices.
    """
    folder = narrow(tmp_path / "model", architecture)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    own = copy.deepcopy(exact).bfloat16()
    errors, others = [], []
    with LLM(str(folder), max_model_len=128, num_blocks=64, dtype="bfloat16") as llm:
        found = llm.generate(prompt_token_ids=BF16_PROMPTS, sampling_params=WITH_LOGPROBS, use_tqdm=False)
    with rounded_products(exact), torch.inference_mode():
        for prompt, output in zip(BF16_PROMPTS, found, strict=True):
            ids = torch.tensor([prompt])
            wanted = exact(ids, past_key_values=CacheOf("bfloat16")).logits[0, -1].log_softmax(-1)
            theirs = own(ids).logits[0, -1].float().log_softmax(-1)
            token_id = output.outputs[0].token_ids[0]
            assert output.outputs[0].logprobs is not None
            errors.append(abs(output.outputs[0].logprobs[0][token_id].logprob - float(wanted[token_id])))
            others.append(abs(float(theirs[token_id] - wanted[token_id])))
    assert sum(errors) < max(sum(others), 0.02)
    assert max(errors) < 0.1


@pytest.mark.usefixtures("one_preloader")
@pytest.mark.parametrize("architecture", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_split_and_ranks_compute_what_one_process_does(tmp_path: Path, architecture: str) -> None:
    folder = narrow(tmp_path / "model", architecture)
    alone = tokens_of(folder, "auto", dtype="bfloat16")
    split: dict[str, Any] = {"prefill": 1, "decode": 1, "tensor_parallel_size": 2}
    assert tokens_of(folder, "auto", dtype="bfloat16", **split) == alone
    in_chunks = {"max_num_batched_tokens": 12, "enable_prefix_caching": False}
    assert tokens_of(folder, "auto", dtype="bfloat16", **in_chunks) == alone


@pytest.mark.usefixtures("one_thread", "freed")
def test_alone_and_among_others(tmp_path: Path) -> None:
    """Tokens and logprobs are equal bit for bit, alone and in a batch, in a model of real width."""
    model, prompts = wide(tmp_path, "llama"), prompts_of(1)
    together = numbers(model, prompts, dtype="bfloat16")
    assert numbers(model, prompts, alone=True, dtype="bfloat16") == together


@pytest.mark.parametrize(("threads", "rows"), [(1, 1), (2, 37)])
def test_rows_of_wide_products_do_not_depend_on_company_or_threads(threads: int, rows: int) -> None:
    """Covers 8,192 inputs, and a vocabulary of 150,000."""
    torch.manual_seed(1)
    before = torch.get_num_threads()
    for outputs, inputs in ((64, 8192), (150_000, 128)):
        layer = packed_linear.make_linear(torch.randn(outputs, inputs).bfloat16())
        x = torch.randn(37, inputs)
        torch.set_num_threads(1)
        expected = layer(x)
        torch.set_num_threads(threads)
        assert torch.equal(layer(x[:rows]), expected[:rows])
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("stored", "architecture", "multiplies", "device", "wanted"),
    [
        (torch.bfloat16, "llama", True, CPU, "bfloat16"),
        (torch.bfloat16, "llama", False, CPU, "float32"),
        (torch.bfloat16, "gpt2", True, CPU, "float32"),  # its layers are not fused, so 16 bits would be slow
        (torch.float16, "llama", True, CPU, "float32"),  # bfloat16 would lose bits of its weights
        (torch.float32, "llama", True, CPU, "float32"),
        (torch.bfloat16, "llama", False, Device("cuda"), "bfloat16"),
        (torch.bfloat16, "llama", False, Device("npu"), "bfloat16"),
    ],
)
def test_auto(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    architecture: str,
    multiplies: bool,
    device: Device,
    wanted: str,
) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder)
    monkeypatch.setattr(model_loader, "multiplies_bf16", lambda: multiplies)
    assert resolve_dtype("auto", Checkpoint.of(EngineConfig(model=str(folder))), device) == wanted
    if architecture == "llama" and device == CPU:
        quantizing = Checkpoint.of(EngineConfig(model=str(folder), quantization="int8"))
        assert resolve_dtype("auto", quantizing, CPU) == "float32"


def test_the_pool_and_the_numerics_are_of_16_bits(tmp_path: Path) -> None:
    """The numerics differ between processors that multiply differently, so such instances are not paired."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 64, "max_model_len": 64}
    with watching() as made, LLM(str(narrow(tmp_path / "model")), **settings):
        numerics, pool = made[0].runner.numerics, made[0].runner.pool
    assert (numerics.dtype, numerics.kv_cache_dtype, pool.layout.dtype) == ("bfloat16",) * 3
    assert numerics.bf16_way == quantized.bf16_way()
    other = replace(numerics, bf16_way="another")
    assert numerics.digest != other.digest
    found = numerics.difference(other)
    assert found is not None
    assert "processor" in found[0]
    assert found[1:] == (numerics.bf16_way, "another")


def test_wrong_products_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(weight: torch.Tensor, bias: torch.Tensor | None) -> packed_linear.Linear | None:
        return quantized.bf16_linear(weight.roll(1, 0), bias)

    monkeypatch.setattr(packed_linear, "bf16_linear", shifted)
    with pytest.raises(ModelError, match="fusing the layers changed the logits"):
        load_model(Checkpoint.of(EngineConfig(model=str(narrow(tmp_path / "model")))), "bfloat16", CPU)


def test_without_kernels_modules_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    model = load_model(Checkpoint.of(EngineConfig(model=str(narrow(tmp_path / "model")))), "bfloat16", CPU)
    assert model.kernels.startswith("transformers' modules")
    assert model.bf16_way == ""
