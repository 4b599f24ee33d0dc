"""Runs pd-cluster's engine in this process: adds all requests at once, and runs steps until none is left.

Prefix caching is off, as in the other engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from msgspec import structs

from benchmarks.engine_messages import PeerResult, Run, Spec, Workload, child_main
from benchmarks.workloads import random_prompt
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling


class Driver:
    """An engine core, with methods to add requests with new prompts."""

    def __init__(self, core: EngineCore, runner: ModelRunner, seed: int) -> None:
        self.core, self.runner = core, runner
        self._rng = random.Random(seed)
        self._num_requests = 0

    def prompt(self, length: int) -> list[int]:
        return random_prompt(self._rng, self.runner.vocab_size, length)

    def add(self, prompt: list[int], sampling: Sampling) -> Request:
        return self.ask(RequestSpec(prompt, structs.replace(sampling, seed=self._num_requests + 1)))

    def ask(self, order: RequestSpec) -> Request:
        self._num_requests += 1
        request = Request(f"r{self._num_requests}", order, arrival_s=float(self._num_requests))
        self.core.scheduler.add(request)
        return request

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.core.step()

    def drain(self) -> None:
        self.until(lambda: not self.core.scheduler.requests)


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    core, _ = build_core(EngineConfig(model=spec.model, dtype="float32", device="cpu", enable_prefix_caching=False))
    return PeerResult(runs={workload.name: run(core, workload) for workload in [spec.warmup, *spec.workloads]})


def run(core: EngineCore, workload: Workload) -> Run:
    start_s = time.perf_counter()
    requests = [
        Request(f"{workload.name}-{i}", RequestSpec(prompt, greedy(num)), arrival_s=float(i))
        for i, (prompt, num) in enumerate(zip(workload.prompts, workload.output_lens, strict=True))
    ]
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.requests:
        core.step()
    return Run(time.perf_counter() - start_s, [request.output_token_ids for request in requests])


def greedy(max_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


if __name__ == "__main__":
    child_main(measure)
