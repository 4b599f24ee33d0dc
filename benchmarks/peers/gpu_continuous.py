"""transformers on the mixed workload: its continuous batching, or, if that cannot run, padded `generate()`.

The choice of the two, and its settings, are noted beside the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from benchmarks.gpu.spec import GpuSpec, Writer, child_main
from benchmarks.gpu.workloads import mixed
from benchmarks.peers.continuous import run as run_with_room_for_all
from benchmarks.peers.generate import generate as generate_on_host
from benchmarks.spec import Run, Workload
from pd_cluster.devices.device import Device, resolve, use
from pd_cluster.kv.memory import TORCH_DTYPES

GENERATE_BATCH = 32
NO_RESULT_TIMEOUT_S = 30.0
NUM_RUNS = 2  # the second run has nothing left to compile, capture or allocate, like ours
Way = Callable[[Any, Workload], list[Run]]


def measure(spec: GpuSpec, results: Writer) -> None:
    device = resolve(spec.device)
    use(device)
    with results.section("load"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=TORCH_DTYPES[spec.dtype], attn_implementation="sdpa", local_files_only=True
        )
        model = model.eval().to(device.torch_name)
    workload = mixed(spec.shape.vocab_size, spec.quick)
    for name, way in ways(device):
        with results.section(name):
            try:
                report_runs(spec, results, name, way(model, workload), workload)
                return
            except Exception as error:  # any kind: the next way is tried, and this one is noted
                results.note(f"{name} could not run: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    raise RuntimeError("no way to run transformers on the mixed workload; see the notes")


def ways(device: Device) -> Iterator[tuple[str, Way]]:
    if device.is_accelerator:  # on CPU it takes all memory, and minutes
        yield "continuous batching, its own settings", run_by_itself
    yield "continuous batching, pages of 32, room for all requests", run_with_room
    yield f"generate(), padded batches of {GENERATE_BATCH}", generate


def report_runs(spec: GpuSpec, results: Writer, name: str, runs: list[Run], workload: Workload) -> None:
    """Reports the runs. Raises RuntimeError if the numbers of tokens differ from the requested ones."""
    for which, run in zip(("first run", "second run"), runs, strict=True):
        counts = [len(output) for output in run.outputs]
        if counts != workload.output_lens:
            raise RuntimeError(f"{sum(counts)} output tokens instead of {workload.num_output_tokens}")
        rate = workload.num_output_tokens / run.took_s
        results.figure(f"{spec.shape.name} mixed workload, transformers, {which}", rate, "tokens/s", "higher")
    results.note(f"transformers {transformers.__version__}: {name}, sdpa")


def run_by_itself(model: Any, workload: Workload) -> list[Run]:
    """Lets it determine its memory; making the manager, its cache and its warm-up are not counted."""
    generation = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, max_new_tokens=max(workload.output_lens)
    )
    with model.continuous_batching_context_manager(generation_config=generation, timeout=10) as manager:
        return [run_once(manager, workload) for _ in range(NUM_RUNS)]


def run_once(manager: Any, workload: Workload) -> Run:
    start_s = time.perf_counter()
    ids = [
        manager.add_request(prompt, max_new_tokens=num)
        for prompt, num in zip(workload.prompts, workload.output_lens, strict=True)
    ]
    outputs: dict[str, list[int]] = {}
    while len(outputs) < len(ids):
        result = manager.get_result(timeout=NO_RESULT_TIMEOUT_S)
        if result is None or result.error:
            raise RuntimeError(result.error if result else "no result came")
        if result.is_finished():
            outputs[result.request_id] = list(result.generated_tokens)
    return Run(time.perf_counter() - start_s, [outputs[each] for each in ids])


def run_with_room(model: Any, workload: Workload) -> list[Run]:
    return [run_with_room_for_all(model, workload) for _ in range(NUM_RUNS)]


def generate(model: Any, workload: Workload) -> list[Run]:
    model.generation_config.eos_token_id = None
    return [generate_once(model, workload) for _ in range(NUM_RUNS)]


def generate_once(model: Any, workload: Workload) -> Run:
    """Generates in order of arrival; a batch ends with its longest output."""
    start_s = time.perf_counter()
    outputs: list[list[int]] = []
    for first in range(0, len(workload.prompts), GENERATE_BATCH):
        last = first + GENERATE_BATCH
        with torch.device(model.device):
            outputs += generate_on_host(model, workload.prompts[first:last], workload.output_lens[first:last])
    return Run(time.perf_counter() - start_s, outputs)


if __name__ == "__main__":
    child_main(measure)
