"""`python -m benchmarks speculative --rows`: the cost of a step with drafts, as a multiple of a step of one token.

A step of n rows computes a token and n - 1 drafts after it, with one block table. The cached keys and values are random
numbers, as are the weights of the model with 125 million parameters.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.child_process import make_model
from benchmarks.figures import begin, finish, result
from benchmarks.model_shapes import QUICK_SHAPE, ModelShape
from benchmarks.speculative import WEIGHTS
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.result_tables import Report, Result
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling

ROWS, CONTEXTS = (1, 2, 4, 6, 8, 12, 16, 24, 32), (64, 1024, 4096)
NUM_TRIES = 3  # the shortest time counts
GOALS = {("float32", 4096, 8): 1.3}


def run(weights: str, rounds: int, threads: int, quick: bool, json: str) -> None:
    begin(json)
    torch.set_num_threads(threads)
    started_s, contexts = time.monotonic(), CONTEXTS[: 1 if quick else None]
    length = contexts[-1] + ROWS[-1]
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        shape = QUICK_SHAPE if quick else ModelShape(max_positions=length)
        form: dict[str, Any] = dict([WEIGHTS[weights]])
        model = str(make_model(Path(folder), shape, threads))
        sizes: dict[str, Any] = {"max_model_len": length, "num_blocks": length // 8}
        runner = load_runner(EngineConfig(model=model, device="cpu", **sizes, **form))
        took_ms = defaultdict[tuple[int, int], list[float]](list)
        for plane in (each for layer in range(shape.num_layers) for each in runner.pool.memory.planes(layer)):
            plane.normal_()
        for _, context, num_rows in product(range(1 + rounds), contexts, ROWS):
            took_ms[context, num_rows].append(_step_ms(runner, context, num_rows))
    asked = f"--rows --weights {weights} --rounds {rounds} --threads {threads}{' --quick' * quick}"
    report = Report(f"python -m benchmarks speculative {asked}", [*_results(weights, took_ms, contexts)])
    finish(report, f"{rounds} rounds, {threads} threads, {time.monotonic() - started_s:.0f} s", json, quick)


def _step_ms(runner: ModelRunner, context: int, num_rows: int) -> float:
    """Returns the CPU time per thread of a step after `context` tokens."""
    table = [*range(runner.pool.layout.num_blocks_for(context + num_rows))]
    order = RequestSpec([5] * (context + 1), Sampling())
    request, took_s = Request("r", order, num_computed_tokens=context, tables=[table]), list[float]()
    for _ in range(NUM_TRIES):
        start_s = time.process_time()
        runner.forward([(request, 1)], drafts={request: [5] * (num_rows - 1)}).logits.argmax(-1)
        took_s.append(time.process_time() - start_s)
    return 1e3 * min(took_s) / torch.get_num_threads()


def _results(weights: str, took_ms: dict[tuple[int, int], list[float]], contexts: tuple[int, ...]) -> Iterator[Result]:
    for context in contexts:
        _, *alone = took_ms[context, 1]  # the first round includes packing and compiling
        yield result(f"context of {context}: one row", alone, "ms")
        for num_rows in ROWS[1:]:
            ratios = [many / one for many, one in zip(took_ms[context, num_rows][1:], alone, strict=True)]
            goal = GOALS.get((weights, context, num_rows))
            yield result(f"context of {context}: {num_rows} rows ÷ one row", ratios, "x", goal=goal)
