"""Child of `benchmarks lora`: decode steps with and without adapters, in turn. Prints nothing.

`python -m benchmarks.peers.lora SPEC RESULT`
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from benchmarks.engine.lora_spec import LoraSpec, LoraTimes
from benchmarks.lora_folders import LoraFolders
from benchmarks.peers.variants import batch_of, pool_of
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.devices.device import CPU
from pd_cluster.model.attention_choice import DEFAULT_BLOCK_SIZE
from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.model.loader import layout_of, load_model
from pd_cluster.native.memory import keep_what_is_freed
from pd_cluster.settings.adapters import AdapterSettings
from pd_cluster.settings.engine import EngineConfig

NUM_SERIES = 200  # steps of which the slowest hundredth counts
Step = Callable[[], object]


def model_of(spec: LoraSpec, adapters: AdapterSettings) -> CausalLM:
    return load_model(Checkpoint.of(EngineConfig(model=spec.model, dtype="float32", adapters=adapters)), "float32", CPU)


def adapted(batch: ForwardBatch, slots: Sequence[int] | None) -> ForwardBatch:
    """Returns the step with these adapters, one for each sequence."""
    changed = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    changed["adapters"] = None if slots is None else torch.tensor(slots).numpy()
    return type(batch)(**changed)


def drawn_slots(num_adapters: int, num_seqs: int) -> list[int]:
    weights = [1 / (at + 1) for at in range(num_adapters)]
    return random.Random(num_adapters).choices(range(1, num_adapters + 1), weights, k=num_seqs)


def least_s(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Returns each step's least seconds; they take turns."""
    found = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            begun_s = time.perf_counter()
            step()
            found[name] = min(found[name], time.perf_counter() - begun_s)
    return found


def p99_s(step: Step) -> float:
    """Returns what the slowest hundredth of a series of steps takes at least."""
    took_s = []
    for _ in range(NUM_SERIES):
        begun_s = time.perf_counter()
        step()
        took_s.append(time.perf_counter() - begun_s)
    return statistics.quantiles(took_s, n=100)[98]


class Loading:
    """`with Loading(…) as loading:` loads adapters one after another on a thread."""

    def __init__(self, model: CausalLM, folders: LoraFolders, rank: int) -> None:
        self.took_s: list[float] = []
        self._model, self._folders, self._rank = model, folders, rank
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Loading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        assert self._model.adapters is not None
        while not self._is_over.is_set():
            folder = self._folders.next()
            begun_s = time.perf_counter()
            read = LoraFolder.read(folder, self._rank)
            self._model.adapters.load(read)
            self.took_s.append(time.perf_counter() - begun_s)
            self._model.adapters.drop(read.digest)


def peft_step(spec: LoraSpec, folders: list[Path]) -> Step:
    """Returns the same step by transformers and PEFT, whose batches may mix adapters, too."""
    import peft

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32)
    model: Any = peft.PeftModel.from_pretrained(loaded, str(folders[0]), adapter_name="0")
    for at, folder in enumerate(folders[1:], 1):
        model.load_adapter(str(folder), adapter_name=str(at))
    model.eval()
    cache = transformers.DynamicCache()
    names = [str(at % len(folders)) for at in range(spec.batch)]
    model(torch.ones(spec.batch, spec.context, dtype=torch.int64), past_key_values=cache, adapter_names=names)
    ids = torch.ones(spec.batch, 1, dtype=torch.int64)

    def step() -> None:
        model(ids, past_key_values=cache, adapter_names=names)
        cache.crop(-1)

    return step


def times_of(spec: LoraSpec) -> LoraTimes:
    keep_what_is_freed()  # as workers do
    bare = model_of(spec, AdapterSettings())
    model = model_of(spec, AdapterSettings(enable_lora=True, max_loras=spec.batch, max_lora_rank=spec.rank))
    assert model.adapters is not None
    folders = LoraFolders(Path(spec.folder), Path(spec.model), spec.rank)
    paths = [folders.next() for _ in range(max(spec.drawn + spec.distinct))]
    for path in paths:
        model.adapters.load(LoraFolder.read(path, spec.rank))
    layout = layout_of(model.config, DEFAULT_BLOCK_SIZE, "float32")
    pool = pool_of(layout, spec.batch * (spec.context + 1 + DEFAULT_BLOCK_SIZE))
    batch = batch_of(pool, spec.batch, spec.context + 1, spec.context)
    drawn = {num: drawn_slots(num, spec.batch) for num in spec.drawn}
    distinct = {num: [1 + at % num for at in range(spec.batch)] for num in spec.distinct}

    def step_of(slots: Sequence[int] | None) -> Step:
        asked = adapted(batch, slots)
        return lambda: model(asked)

    steps: dict[str, Step] = {"bare": lambda: bare(batch), "none": step_of(None)}
    steps |= {f"distinct {num}": step_of(slots) for num, slots in distinct.items()}
    steps |= {f"drawn {num}": step_of(slots) for num, slots in drawn.items()}
    few = max(num for num in spec.distinct if num <= 8)
    with torch.inference_mode():
        if spec.has_peft:
            steps["peft"] = peft_step(spec, paths[:few])
        took_s = least_s(steps, spec.rounds)
        others = step_of(distinct[few])
        quiet_p99_s = p99_s(others)
        with Loading(model, folders, spec.rank) as loading:
            loading_p99_s = p99_s(others)
    return LoraTimes(
        bare_s=took_s["bare"],
        none_s=took_s["none"],
        distinct_s={num: took_s[f"distinct {num}"] for num in spec.distinct},
        drawn_s={num: took_s[f"drawn {num}"] for num in spec.drawn},
        num_drawn={num: len(set(slots)) for num, slots in drawn.items()},
        load_s=min(loading.took_s),
        quiet_p99_s=quiet_p99_s,
        loading_p99_s=loading_p99_s,
        peft_s=took_s.get("peft"),
    )


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=LoraSpec)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(times_of(asked)))
