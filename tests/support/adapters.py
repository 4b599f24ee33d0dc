"""Random LoRA adapters in PEFT's format, strong enough to change tokens, and models with these adapters merged in.

Merging is a second implementation of the format, in float64, which shares no code with the project.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.settings.lora_settings import AdapterSettings, LoraModule
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.engines import run

LAST = re.compile(r"\.(\d+)\.")


def linear_modules(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Maps the names of the linear modules in a model's layers to (out_features, in_features)."""
    found = {}
    for name, module in model.named_modules():
        if not LAST.search(name) or name.endswith("shared_expert_gate"):
            continue
        if type(module) is torch.nn.Linear:
            found[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":
            weight: Any = module.weight
            found[name] = (weight.shape[1], weight.shape[0])
    return found


def make_adapter(
    folder: Path,
    base: Path,
    seed: int = 0,
    rank: int = 4,
    only: str = "",
    dtype: torch.dtype = torch.float32,
    strength: float = 0.2,
    **config: Any,
) -> Path:
    """Writes an adapter for `base`, for the modules whose names match the regular expression `only`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors, ranks = {}, config.get("rank_pattern", {})
    modules = {name: shape for name, shape in linear_modules(model).items() if re.search(only, name)}
    for name, (out_features, in_features) in modules.items():
        own = next((r for key, r in ranks.items() if re.search(rf"(^|\.){key}$", name)), rank)
        for side, shape in (("A", (own, in_features)), ("B", (out_features, own))):
            matrix = torch.randn(shape, generator=generator) * strength
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = matrix.to(dtype)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "init_lora_weights": True,
        "base_model_name_or_path": "/somewhere/else",
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(base: Path, adapter: Path, out: Path) -> Path:
    """Writes the model with the adapter merged into its weights."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for key in [key for key in tensors if ".lora_A." in key]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[key].double(), tensors[key.replace(".lora_A.", ".lora_B.")].double()
        alphas = settings.get("alpha_pattern", {})
        alpha = next((v for k, v in alphas.items() if re.search(rf"(^|\.){k}$", name)), settings["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if settings.get("use_rslora") else len(a))
        weight: Any = model.get_submodule(name).weight
        delta = scale * b @ a
        is_transposed = type(model.get_submodule(name)).__name__ == "Conv1D"
        weight.data = (weight.data.double() + (delta.T if is_transposed else delta)).float()
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(out)
    return out


def merged_models(base: Path, folder: Path, ranks: Mapping[str, int], within: str = "") -> dict[str, Path]:
    """Makes adapters `folder`/`within`/NAME of these ranks. Returns folders by name: the model ("") and merged ones."""
    found = {"": base}
    for seed, (name, rank) in enumerate(ranks.items()):
        adapter = make_adapter(folder / within / name, base, seed, rank=rank)
        found[name] = merged(base, adapter, folder / f"merged-{name}")
    return found


def loaded(*folders: Path, **settings: Any) -> AdapterSettings:
    """Returns settings that load these adapters, named after their folders."""
    modules = tuple(LoraModule(folder.name, str(folder)) for folder in folders)
    return AdapterSettings(enable_lora=True, lora_modules=modules, **{"max_loras": 8, **settings})


def digest_of(adapter: Path) -> str:
    return LoraFolder.read(adapter, 512).digest


def logits_of(core: EngineCore, requests: list[Request]) -> torch.Tensor:
    """Returns the logits after each prompt, all computed in one step."""
    for at, request in enumerate(requests):
        num_blocks = -(-len(request.prompt_token_ids) // 16)
        request.tables[0] = list(range(4 * at, 4 * at + num_blocks))
    return core.runner.forward([(request, len(request.prompt_token_ids)) for request in requests]).logits.clone()


def outputs_of(
    core: EngineCore, prompts: list[list[int]], variants: Iterable[str], sampling: Sampling
) -> dict[str, list[list[int]]]:
    """Returns each variant's answers to all prompts, computed in one batch."""
    requests = [
        Request(f"{variant}-{at}", RequestSpec(prompt, sampling, variant=variant))
        for at, prompt in enumerate(prompts)
        for variant in variants
    ]
    run(core, requests)
    return {
        each: [request.output_token_ids for request in requests if request.order.variant == each] for each in variants
    }
