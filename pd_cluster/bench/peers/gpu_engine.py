"""The engine on a device: start-up, decode steps, a prefill, a mixed workload, and profiles of one step each.

Steps are `EngineCore`'s own, with sampling, as a worker takes them. Which of the sections are run is the spec's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from pd_cluster.bench import engine_workloads as workloads
from pd_cluster.bench.engine_workloads import random_prompt
from pd_cluster.bench.gpu_spec import GpuSpec, Writer, child_main
from pd_cluster.bench.gpu_workloads import NUM_PREFILL, PREFILL_LEN, context_len, decode_batches, mixed
from pd_cluster.bench.peers.gpu_clock import LaunchClock, process_age_s
from pd_cluster.bench.peers.ours import greedy, run
from pd_cluster.bench.report import spread
from pd_cluster.config import EngineConfig
from pd_cluster.device import Device, synchronize
from pd_cluster.engine.build import build_core
from pd_cluster.types import Request

MAX_MODEL_LEN = 8192
STEP_TOKENS = 8192  # of a prefill step
NUM_SETTLING_STEPS = 8  # graphs are captured and kernels compiled in the first of them
NUM_ROWS = 15  # of a profile
SEED = 7


class Bench:
    """One engine and what is asked of it. Every prompt is new, and prefixes are not cached."""

    def __init__(self, spec: GpuSpec, results: Writer) -> None:
        self.spec, self.results = spec, results
        config = EngineConfig(
            model=spec.model,
            device=spec.device,
            dtype=spec.dtype,
            max_model_len=spec.sizes(MAX_MODEL_LEN, 2048),
            num_blocks=512 if spec.quick else None,
            max_num_batched_tokens=spec.sizes(STEP_TOKENS, 128),
            enable_prefix_caching=False,
        )
        self.core, self.runner = build_core(config)
        self.ready_s = process_age_s()
        self.rng = random.Random(SEED)
        self._num_requests = 0
        results.note(
            f"{self.name}: {config.max_num_batched_tokens} tokens a step, {self.runner.pool.num_blocks} blocks of "
            f"{self.runner.pool.layout.block_size}; {getattr(self.runner.model, 'kernels', 'transformers as it is')}"
        )

    @property
    def name(self) -> str:
        return self.spec.shape.name

    @property
    def device(self) -> Device:
        return self.runner.device

    def add(self, num_seqs: int, prompt_len: int, max_tokens: int) -> list[Request]:
        requests = []
        for _ in range(num_seqs):
            self._num_requests += 1
            prompt = random_prompt(self.rng, self.runner.vocab_size, prompt_len)
            arrival_s = float(self._num_requests)
            requests.append(Request(f"r{self._num_requests}", prompt, greedy(max_tokens), arrival_s=arrival_s))
            self.core.scheduler.add(requests[-1])
        return requests

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.core.step()

    def drain(self) -> None:
        self.until(lambda: not self.core.scheduler.requests)

    def put(self, what: str, value: float, unit: str, better: str = "lower", values: list[float] | None = None) -> None:
        samples, far = (len(values), spread(values)) if values else (1, None)
        self.results.figure(f"{self.name} {what}", value, unit, better, samples, far)  # type: ignore[arg-type]

    # ---- sections

    def startup(self) -> None:
        """Kernels that were compiled before are read from Triton's cache; the second figure has what comes later."""
        self.put("start-up: process to engine ready", self.ready_s, "s")
        self.add(1, 16, 4)
        self.drain()
        self.put("start-up: process to the first request's end", process_age_s(), "s")

    def decode(self) -> None:
        for batch in decode_batches(self.spec.quick):
            with self.results.section(f"decode {batch}"):
                requests, took_ms, contexts = self.decoding(batch), [], []
                for _ in range(self.num_steps):
                    contexts.append(requests[0].num_tokens)
                    start_s = time.perf_counter()
                    self.core.step()
                    took_ms.append(1e3 * (time.perf_counter() - start_s))
                self.put(f"decode {batch}: step", median(took_ms), "ms", values=took_ms)
                self.put(f"decode {batch}: context", median(contexts), "tokens", "higher")
                self.drain()

    def overhead(self) -> None:
        """Apart from the steps' times, since events around launches cost the host a little."""
        for batch in decode_batches(self.spec.quick):
            with self.results.section(f"overhead {batch}"), LaunchClock(self.runner, self.device) as clock:
                self.decoding(batch)
                clock.forget()
                start_s = time.perf_counter()
                for _ in range(self.num_steps):
                    self.core.step()
                busy_s = clock.busy_s()  # waits for the step that was launched ahead, as the time below does
                took_s = time.perf_counter() - start_s
                share = 100 * max(0.0, took_s - busy_s) / took_s
                self.put(f"decode {batch}: host overhead", share, "%")
                self.drain()

    @property
    def num_steps(self) -> int:
        """Of decoding, that count."""
        return self.spec.sizes(60, 3)

    def decoding(self, batch: int) -> list[Request]:
        """So many requests that have their context and have decoded for a while; the device has caught up."""
        max_tokens = 2 * NUM_SETTLING_STEPS + self.num_steps
        requests = self.add(batch, context_len(self.spec.quick), max_tokens)
        self.until(lambda: all(request.output_token_ids for request in requests))
        for _ in range(NUM_SETTLING_STEPS):
            self.core.step()
        synchronize(self.device)
        return requests

    def prefill(self) -> None:
        count, length = self.spec.sizes(NUM_PREFILL, 2), self.spec.sizes(PREFILL_LEN, 32)
        took_s = []
        for _ in range(1 + self.spec.sizes(5, 1)):
            requests = self.add(count, length, 1)
            synchronize(self.device)
            start_s = time.perf_counter()
            self.until(lambda requests=requests: all(r.output_token_ids for r in requests))  # type: ignore[misc]
            took_s.append(time.perf_counter() - start_s)
            self.drain()
        took_s = took_s[1:]
        self.put("prefill: time", 1e3 * median(took_s), "ms", values=took_s)
        rate = 1e-12 * self.spec.shape.prefill_flops(count, length) / median(took_s)
        self.put("prefill: model FLOPs", rate, "TFLOP/s", "higher", took_s)

    def mixed(self) -> None:
        """Twice: the first time graphs are captured for the sizes that occur."""
        workload = mixed(self.spec.shape.vocab_size, self.spec.quick)
        run(self.core, workloads.warmup(self.spec.shape.vocab_size, 4, 16, 2))
        for which in ("first run", "second run"):
            rate = workload.num_output_tokens / run(self.core, workload).took_s
            self.put(f"mixed workload, ours, {which}", rate, "tokens/s", "higher")

    def profile(self) -> None:
        batch = self.spec.sizes(32, 2)
        self.decoding(batch)
        self._profile(f"decode-{batch}", self.core.step)
        self.drain()
        self.add(self.spec.sizes(STEP_TOKENS // PREFILL_LEN, 2), self.spec.sizes(PREFILL_LEN, 32), 1)
        self._profile("prefill", self.core.step)
        self.drain()

    def _profile(self, what: str, step: Callable[[], object]) -> None:
        """A page of what took longest; the sum of all kernels, on CPU of all operators, is a figure."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.is_accelerator:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        synchronize(self.device)
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            synchronize(self.device)
        rows = list(profiler.key_averages())
        if self.device.is_accelerator:  # an operator's row has its kernels' time, too
            rows = [each for each in rows if each.device_type.name != "CPU" and not each.is_user_annotation]
        of = "self_device_time_total" if self.device.is_accelerator else "self_cpu_time_total"
        found = sorted(((getattr(each, of) / 1e3, each.count, each.key) for each in rows), reverse=True)
        busy_ms = sum(took_ms for took_ms, _, _ in found)
        self.put(f"profile of one {what} step: all kernels", busy_ms, "ms")
        lines = [f"{'ms':>10} {'share':>7} {'calls':>6}  kernel"]
        lines += [f"{ms:10.3f} {ms / busy_ms:7.1%} {calls:6}  {name}" for ms, calls, name in found[:NUM_ROWS]]
        Path(self.spec.out, f"profile-{self.name}-{what}.txt").write_text("\n".join(lines) + "\n")


def measure(spec: GpuSpec, results: Writer) -> None:
    with results.section("load"):
        bench = Bench(spec, results)
    every: dict[str, Callable[[], None]] = {
        "startup": bench.startup,
        "decode": bench.decode,
        "overhead": bench.overhead,
        "prefill": bench.prefill,
        "mixed": bench.mixed,
        "profile": bench.profile,
    }
    for name in spec.sections:
        with results.section(name):
            every[name]()


if __name__ == "__main__":
    child_main(measure)
