"""LoRA adapters with quantized layers give the tokens of the dequantized model merged with the adapter."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pd_cluster import LLM, LoRARequest, SamplingParams
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.types import Sampling
from tests.model.test_quantize_at_load import with_numbers_of
from tests.support.adapters import digest_of, loaded, make_adapter, merged, outputs_of
from tests.support.checkpoints import make_checkpoint, reference_greedy
from tests.support.engines import assert_all_same, make_core, random_prompt
from tests.support.quantized import FORMATS, W8A8, Format, rewritten
from tests.support.ranks import ranks

NUM_TOKENS = 8
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]
QUICK = ("awq", "gptq desc_act", "fp8 blocks")
WIDE = {
    "hidden_size": 1280,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 2560,
    "num_hidden_layers": 1,
    "initializer_range": 0.05,
}


class Case:
    """A quantized folder, two adapters, and the reference models by adapter digest."""

    def __init__(self, folder: Path, form: Format | str, architecture: str = "qwen2", **settings: Any) -> None:
        """`form`: the folder's format, or the scheme that quantizes plain weights at load."""
        base = make_checkpoint(folder / "model", architecture, **settings)
        if isinstance(form, Format):
            self.quantized, plain = rewritten(base, folder, form)
        else:
            self.quantized, plain = base, make_checkpoint(folder / "plain", architecture, **settings)
            with_numbers_of(plain, form)
        strength = {"strength": 0.05} if settings else {}
        self.folders = [
            make_adapter(folder / "a", base, 1, **strength),
            make_adapter(folder / "b", base, 2, rank=7, only="mlp|self_attn.q", **strength),
        ]
        self.models = {digest_of(each): merged(plain, each, folder / f"merged-{each.name}") for each in self.folders}
        self.models[""] = self.plain = plain

    def outputs(self, core: EngineCore) -> dict[str, list[list[int]]]:
        return outputs_of(core, PROMPTS, self.models, GREEDY)

    def check(self, core: EngineCore) -> None:
        found = self.outputs(core)
        for variant, model in self.models.items():
            assert_said_by(model, found[variant])
        assert len({str(each) for each in found.values()}) == len(self.models)

    def from_python(self, **settings: Any) -> list[list[int]]:
        """Returns the answers of each adapter, and of none, to a prompt, from `LLM`."""
        requests = [LoRARequest(each.name, at + 1, str(each)) for at, each in enumerate(self.folders)]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        with LLM(str(self.quantized), max_model_len=128, num_blocks=64, enable_lora=True, **settings) as llm:
            outputs = llm.generate(
                prompt_token_ids=[prompt for prompt in PROMPTS for _ in range(3)],
                sampling_params=params,
                lora_request=[*requests, None] * len(PROMPTS),
                use_tqdm=False,
            )
        return [list(output.outputs[0].token_ids) for output in outputs]


def assert_said_by(model: Path, outputs: list[list[int]]) -> None:
    """Asserts the reference's outputs, up to the reference's end."""
    references = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert_all_same(model, PROMPTS, [out[: len(own)] for out, own in zip(outputs, references, strict=True)], NUM_TOKENS)


CUT = ("awq", "gptq desc_act", "packed asymmetric", "fp8 blocks", "mxfp4")
# These have experts (only attention is adapted), layers joined in the files, or rows that rope reorders.
OTHERS = ("mixtral", "qwen3_moe", "phi3", "glm4", "gemma2")


def cases() -> Iterator[Any]:
    """Yields (folder format or scheme at load, architecture, changes, number of ranks)."""
    for name in FORMATS:
        yield pytest.param(name, "qwen2", {}, 1, marks=() if name in QUICK else pytest.mark.slow)
    slow = [(scheme, "qwen2", {}, size) for scheme in ("int8_wo", "int4_wo", "fp8") for size in (1, 2)]
    slow += [(name, "qwen2", WIDE, 1) for name in QUICK] + [(name, "qwen2", {}, 2) for name in CUT]
    slow += [("packed 4", architecture, {}, 1) for architecture in OTHERS]
    yield from (pytest.param(*case, marks=pytest.mark.slow) for case in slow)


@pytest.mark.parametrize(("name", "architecture", "changes", "num_ranks"), cases())
def test_tokens_are_those_of_the_merged_numbers(
    tmp_path: Path, name: str, architecture: str, changes: dict[str, Any], num_ranks: int
) -> None:
    case = Case(tmp_path, FORMATS.get(name, name), architecture, **changes)
    given: dict[str, Any] = {"adapters": loaded(*case.folders), "max_num_batched_tokens": 32, "num_blocks": 64}
    if name not in FORMATS:
        given["quantization"] = name
    with ranks(case.quantized, num_ranks, **given) as core:
        case.check(core)


class Int8(torch.nn.Module):
    """A linear layer that rounds its input rows to int8, with an adapter that sees the unrounded rows."""

    def __init__(self, base: torch.nn.Linear, delta: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.delta = delta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        codes = (x * (127 / most)).round()
        y = torch.nn.functional.linear(codes.double() * (most / 127).double(), self.weight.double())
        if self.delta is not None:
            y += torch.nn.functional.linear(x.double(), self.delta)
        return y.float() if self.bias is None else y.float() + self.bias


def in_int8(plain: Path, adapter: Path | None) -> Any:
    """Returns transformers' model with such layers, because layers that round inputs allow no merging."""
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tensors, scale = {}, 0.0
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        settings = json.loads((adapter / "adapter_config.json").read_text())
        scale = settings["lora_alpha"] / settings["r"]
    for name, module in list(model.named_modules()):
        if name.endswith("_proj"):
            a, b = (tensors.get(f"base_model.model.{name}.lora_{side}.weight") for side in "AB")
            delta = scale * b.double() @ a.double() if a is not None and b is not None else None
            model.set_submodule(name, Int8(module, delta))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, WIDE], ids=["tiny", "wide"])
def test_activations_in_int8(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A code near a boundary may round either way, so tokens may be within a small margin of the best."""
    case = Case(tmp_path, W8A8, "llama", **settings)
    given = {"adapters": loaded(*case.folders), "max_num_batched_tokens": 32, "num_blocks": 64}
    found = case.outputs(make_core(case.quantized, **given))
    for adapter, outputs in zip([*case.folders, None], found.values(), strict=True):
        model = in_int8(case.plain, adapter)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = torch.tensor([prompt + output[:-1]])
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 :]
            behind = logits.amax(-1) - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
            assert behind.max() < 0.02 * logits.std()
    assert len({str(each) for each in found.values()}) == len(case.models)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "quantization"), [("awq", None), ("int8", None), ("int8_wo", "int8"), ("int8_wo", "int4_wo")]
)
def test_across_the_split_as_in_one_process(tmp_path: Path, form: str, quantization: str | None) -> None:
    """Covers W8A8 and four bits, each from a quantized folder and quantized at load."""
    case = Case(tmp_path, {"int8": W8A8, "awq": FORMATS["awq"]}.get(form, form), "llama")
    outputs = case.from_python(quantization=quantization)
    assert case.from_python(quantization=quantization, prefill=1, decode=1) == outputs
    assert len({str(outputs[at::3]) for at in range(3)}) == 3
