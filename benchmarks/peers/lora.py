"""Child process of `lora`: measures the shortest times of decode steps with and without adapters, which take turns."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.engine_messages import PeerResult, Spec, child_main
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.lora_folder import CONFIG_FILE, WEIGHTS_FILE, LoraFolder
from pd_cluster.devices.device import CPU
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.attention_backend import DEFAULT_BLOCK_SIZE
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.loading.model_loader import load_model
from pd_cluster.native.malloc_settings import keep_what_is_freed
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import Request, RequestSpec, Sampling

CONTEXT_LEN, RANK, DEVIATION = 64, 16, 0.02
DISTINCT, QUICK_DISTINCT = (0, 1, 8, 32), (0, 1, 2)
MODULES = (*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
Step = Callable[[], object]


class LoraFolders:
    """Adapters that share one file of weights, but have different settings and therefore different digests."""

    def __init__(self, place: Path, model: Path) -> None:
        """`place`: the folder in which adapters are made."""
        self._place = place
        self._num = 0
        numbers = np.random.default_rng(0)
        tensors: dict[str, np.ndarray[Any, Any]] = {}
        for name, (out_features, in_features) in _linears(model):
            for side, shape in (("A", (RANK, in_features)), ("B", (out_features, RANK))):
                drawn = numbers.standard_normal(shape, dtype=np.float32)
                tensors[f"base_model.model.model.{name}.lora_{side}.weight"] = DEVIATION * drawn
        save_file(tensors, place / WEIGHTS_FILE)

    def next(self) -> Path:
        """Makes a new adapter."""
        self._num += 1
        folder = self._place / str(self._num)
        folder.mkdir()
        os.link(self._place / WEIGHTS_FILE, folder / WEIGHTS_FILE)
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": self._num}
        settings["target_modules"] = sorted(module.partition(".")[2] for module in MODULES)
        (folder / CONFIG_FILE).write_text(json.dumps(settings))
        return folder


def _linears(model: Path) -> Iterator[tuple[str, list[int]]]:
    """Yields names and shapes of the matrices that adapters change."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                found = re.fullmatch(r"model\.(layers\.\d+\.(.+))\.weight", key)
                if found and found[2] in MODULES:
                    yield found[1], tensors.get_slice(key).get_shape()


def model_of(spec: Spec, adapters: AdapterSettings) -> CausalLM:
    return load_model(Checkpoint.of(EngineConfig(model=spec.model, dtype="float32", adapters=adapters)), "float32", CPU)


def batch_of(pool: KVPool, num_seqs: int, num_adapters: int | None) -> ForwardBatch:
    """Returns a decode step of sequences with scattered blocks, which use the adapters in turn."""
    per_seq = pool.layout.num_blocks_for(CONTEXT_LEN + 1)
    blocks = random.Random(num_seqs).sample(range(pool.num_blocks), num_seqs * per_seq)
    chunks = []
    for at in range(num_seqs):
        table = blocks[at * per_seq : (at + 1) * per_seq]
        request = Request(str(at), RequestSpec([1] * (CONTEXT_LEN + 1), Sampling()), tables=[table])
        request.num_computed_tokens = CONTEXT_LEN
        chunks.append((request, 1))
    batch = build_batch(chunks, pool)
    slots = np.array([1 + at % num_adapters for at in range(num_seqs)]) if num_adapters else None
    return type(batch)(**{name: getattr(batch, name) for name in batch.__dataclass_fields__} | {"adapters": slots})


def least_ms(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Returns the shortest time of each step in milliseconds. The steps take turns."""
    found = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            begun_s = time.perf_counter()
            step()
            found[name] = min(found[name], 1e3 * (time.perf_counter() - begun_s))
    return found


def measure(spec: Spec) -> PeerResult:
    keep_what_is_freed()  # as workers do
    distinct = QUICK_DISTINCT if spec.quick else DISTINCT
    bare = model_of(spec, AdapterSettings())
    model = model_of(spec, AdapterSettings(enable_lora=True, max_loras=max(distinct) + 1, max_lora_rank=RANK))
    assert model.adapters is not None
    layout = layout_of(model.caches, DEFAULT_BLOCK_SIZE, "float32")
    pool = KVPool(layout, 2 * spec.batch_size * layout.num_blocks_for(CONTEXT_LEN + 1))
    pool.data.normal_()
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        folders = LoraFolders(Path(place), Path(spec.model))
        paths = [folders.next() for _ in range(max(distinct))]
        for path in paths:
            model.adapters.load(LoraFolder.read(path, RANK))
        batches = {num: batch_of(pool, spec.batch_size, num) for num in distinct}
        steps: dict[str, Step] = {"bare": lambda: bare(batches[0])}
        steps |= {f"{num} adapters": lambda num=num: model(batches[num]) for num in distinct}  # type: ignore[misc]
        figures = least_ms(steps, spec.rounds)
    return PeerResult(figures=figures)


if __name__ == "__main__":
    child_main(measure)
