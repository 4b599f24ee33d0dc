"""bfloat16 on a CPU: matrices of 16 bits, activations and sums in float32, and a cache of 16 bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pd_cluster import LLM, SamplingParams
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ModelError
from pd_cluster.model import loader
from pd_cluster.model.layers import linear
from pd_cluster.model.loader import load_model, resolve_dtype
from pd_cluster.native import products as quantized
from pd_cluster.numerics import Numerics
from pd_cluster.settings.engine import EngineConfig
from tests.model.test_company import numbers, prompts_of, wide
from tests.model.test_kv_cache_dtype import CacheOf
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import random_prompt
from tests.support.watched import watching

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
PROMPTS = [random_prompt(random.Random(1), n) for n in (3, 17, 40)]
ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi3",
    "olmo2",
    "granite",
    "glm4",
    "mixtral",
    "gpt_oss",
    "qwen2_moe",
]

pytestmark = pytest.mark.skipif(quantized.bf16_way() is None, reason="the C kernels cannot run here")


def narrow(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A checkpoint in bfloat16."""
    made = make_checkpoint(folder, architecture, **changes)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    model.save_pretrained(made)
    return made


@contextmanager
def rounded_products(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """transformers' model in float32, whose matrices see activations of bfloat16."""

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


def outputs_of(folder: Path, **settings: Any) -> list[Any]:
    with LLM(str(folder), max_model_len=128, num_blocks=64, **settings) as llm:
        return llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)


def tokens_of(folder: Path, **settings: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs_of(folder, **settings)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_rounded_products(tmp_path: Path, architecture: str) -> None:
    """Nearer to transformers in float32 with such inputs and such a cache than its own bfloat16 comes.

    The prompt's next token: later ones are chosen by what came before.
    """
    folder = narrow(tmp_path / "model", architecture)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    own = copy.deepcopy(exact).bfloat16()
    found, errors, others = outputs_of(folder, dtype="bfloat16"), [], []
    with rounded_products(exact), torch.inference_mode():
        for prompt, output in zip(PROMPTS, found, strict=True):
            ids = torch.tensor([prompt])
            wanted = exact(ids, past_key_values=CacheOf("bfloat16")).logits[0, -1].log_softmax(-1)
            theirs = own(ids).logits[0, -1].float().log_softmax(-1)
            token_id = output.outputs[0].token_ids[0]
            assert output.outputs[0].logprobs is not None
            errors.append(abs(output.outputs[0].logprobs[0][token_id].logprob - float(wanted[token_id])))
            others.append(abs(float(theirs[token_id] - wanted[token_id])))
    assert sum(errors) < max(sum(others), 0.02)
    assert max(errors) < 0.1


@pytest.mark.parametrize("architecture", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_split_and_ranks_compute_what_one_process_does(tmp_path: Path, architecture: str) -> None:
    folder = narrow(tmp_path / "model", architecture)
    alone = tokens_of(folder, dtype="bfloat16")
    assert tokens_of(folder, dtype="bfloat16", prefill=1, decode=1) == alone
    with LLM(
        str(folder), dtype="bfloat16", num_blocks=64, max_model_len=128, prefill=1, decode=1, tensor_parallel_size=2
    ) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone
    in_chunks = {"max_num_batched_tokens": 12, "enable_prefix_caching": False}
    assert tokens_of(folder, dtype="bfloat16", **in_chunks) == alone


@pytest.mark.usefixtures("one_thread", "freed")
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt_oss"])
def test_alone_and_among_others(tmp_path: Path, architecture: str) -> None:
    """Tokens and logprobs are equal to the bit, in a model as wide as real ones."""
    model, prompts = wide(tmp_path, architecture), prompts_of(1)
    together = numbers(model, prompts, dtype="bfloat16")
    assert numbers(model, prompts, alone=True, dtype="bfloat16") == together


@pytest.mark.parametrize(("threads", "rows"), [(1, 1), (2, 1), (1, 37), (2, 37)])
def test_rows_of_wide_products_do_not_depend_on_company_or_threads(threads: int, rows: int) -> None:
    """8,192 inputs, and a vocabulary of 150,000."""
    torch.manual_seed(1)
    before = torch.get_num_threads()
    for outputs, inputs in ((64, 8192), (150_000, 128)):
        layer = linear.make_linear(torch.randn(outputs, inputs).bfloat16())
        x = torch.randn(37, inputs)
        torch.set_num_threads(1)
        expected = layer(x)
        torch.set_num_threads(threads)
        assert torch.equal(layer(x[:rows]), expected[:rows])
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("stored", "architecture", "multiplies", "wanted"),
    [
        (torch.bfloat16, "llama", True, "bfloat16"),
        (torch.bfloat16, "llama", False, "float32"),
        (torch.bfloat16, "gpt2", True, "float32"),  # its layers are not fused, so 16 bits would be slow
        (torch.float16, "llama", True, "float32"),  # bfloat16 would lose bits of its weights
        (torch.float32, "llama", True, "float32"),
    ],
)
def test_auto(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    architecture: str,
    multiplies: bool,
    wanted: str,
) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder)
    monkeypatch.setattr(loader, "multiplies_bf16", lambda: multiplies)
    assert resolve_dtype("auto", Checkpoint.of(EngineConfig(model=str(folder))), CPU) == wanted
    if architecture == "llama":
        quantizing = Checkpoint.of(EngineConfig(model=str(folder), quantization="int8"))
        assert resolve_dtype("auto", quantizing, CPU) == "float32"


def test_the_pool_and_the_numerics_are_of_16_bits(tmp_path: Path) -> None:
    settings = {"dtype": "bfloat16", "num_blocks": 64, "max_model_len": 64}
    with watching() as made, LLM(str(narrow(tmp_path / "model")), **settings):
        numerics, pool = made[0].runner.numerics, made[0].runner.pool
        assert (numerics.dtype, numerics.kv_cache_dtype, pool.layout.dtype) == ("bfloat16",) * 3
        assert numerics.bf16_way == quantized.bf16_way()


def test_processors_that_multiply_in_other_ways_are_no_pair() -> None:
    tiles, floats = (Numerics(dtype="bfloat16", bf16_way=way) for way in ("tiles", "float32"))
    assert tiles.digest != floats.digest
    found = tiles.difference(floats)
    assert found is not None
    assert found[1:] == ("tiles", "float32")
    assert "processor" in found[0]


def test_wrong_products_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear | None:
        return quantized.bf16_linear(weight.roll(1, 0), bias)

    monkeypatch.setattr(linear, "bf16_linear", shifted)
    with pytest.raises(ModelError, match="fusing the layers changed the logits"):
        load_model(Checkpoint.of(EngineConfig(model=str(narrow(tmp_path / "model")))), "bfloat16", CPU)


def test_without_kernels_modules_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    model = load_model(Checkpoint.of(EngineConfig(model=str(narrow(tmp_path / "model")))), "bfloat16", CPU)
    assert model.kernels.startswith("transformers' modules")
    assert model.bf16_way == ""
