"""Times fused layers against transformers' modules in one process, for small random models of several types.

`python -m benchmarks.peers.fused TYPE...` makes a model of each type (28 to 165 million parameters, float32), loads
it twice, and lets the two take turns. A figure is the median of the ratios of neighbours: a prompt of 512 tokens, and a
decode step of 8 sequences.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from benchmarks.peers.make_model import INITIALIZER_RANGE, SEED, make_tokenizer
from benchmarks.tiny_model import EOS_ID
from pd_cluster.engine.build import build_core
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.model.quirks import ARCHITECTURES
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, Request, Sampling

NUM_PROMPT_TOKENS, NUM_SEQS, NUM_ROUNDS, NUM_STEPS = 512, 8, 5, 40
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": EOS_ID - 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID - 2,
}


def make(folder: Path, model_type: str, **changes: Any) -> None:
    torch.manual_seed(SEED)
    config_class: Any = CONFIG_MAPPING[model_type]
    known = config_class().to_dict()
    sizes = {name: size for name, size in {**SIZES, **changes}.items() if name in known or name not in SIZES}
    config = config_class(**sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))


def engine(folder: Path, fused: bool) -> EngineCore:
    """Loads the model with fused layers, or with transformers' modules, their linear layers packed."""
    known = dict(ARCHITECTURES)
    if not fused:
        ARCHITECTURES.clear()
    try:
        settings = EngineConfig(model=str(folder), enable_prefix_caching=False, num_blocks=256, max_model_len=2048)
        return build_core(settings)[0]
    finally:
        ARCHITECTURES.update(known)


def step_s(core: EngineCore) -> float:
    begun_s = time.perf_counter()
    core.step()
    return time.perf_counter() - begun_s


def prefill_s(core: EngineCore, at: int, num_tokens: int) -> float:
    """Returns the seconds of a whole prompt, whose request ends with its first token."""
    once = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    core.scheduler.add(Request(f"prompt {at}", Order([at + i for i in range(num_tokens)], once)))
    return step_s(core)


def times(cores: list[EngineCore], num_rounds: int, num_steps: int, num_tokens: int) -> dict[str, list[list[float]]]:
    """Returns the seconds of prompts and of decode steps, for each engine."""
    prompts = [[prefill_s(core, at, num_tokens) for core in cores] for at in range(num_rounds + 1)][1:]
    greedy = Sampling(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True)
    for core in cores:
        for at in range(NUM_SEQS):
            core.scheduler.add(Request(f"decode {at}", Order([at, 1, 2, 3], greedy)))
    steps = [[step_s(core) for core in cores] for _ in range(num_steps + 2)][2:]  # the prompts, and one to warm up
    return {"prompt": prompts, "decode": steps}


def ratio(pairs: list[list[float]]) -> float:
    return median(plain / fused for fused, plain in pairs)


def main(*model_types: str) -> None:
    print(f"transformers' modules in times of fused layers: a prompt of {NUM_PROMPT_TOKENS}, a step of {NUM_SEQS}")
    for model_type in model_types:
        with tempfile.TemporaryDirectory(prefix="pd-cluster-fused-") as place:
            make(Path(place), model_type)
            cores = [engine(Path(place), fused=True), engine(Path(place), fused=False)]
            found = times(cores, NUM_ROUNDS, NUM_STEPS, NUM_PROMPT_TOKENS)
        decode_ms = median(fused for fused, _ in found["decode"]) * 1e3
        print(
            f"{model_type}: {ratio(found['prompt']):.2f}, {ratio(found['decode']):.2f} ({decode_ms:.1f} ms)", flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
