"""The engine on a device: start-up by phase, decode steps, a prefill, workloads, graphs, and profiles of steps.

Steps are `EngineCore`'s own, with sampling, as in a worker. The spec selects the sections.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pd_cluster.devices.device import Device, synchronize
from pd_cluster.engine.build import build_core
from pd_cluster.lab.engine import workloads as workloads
from pd_cluster.lab.engine.workloads import random_prompt
from pd_cluster.lab.gpu.spec import GpuSpec, Writer, child_main
from pd_cluster.lab.gpu.workloads import (
    NUM_PREFILL,
    PREFILL_LEN,
    QUICK_RAGGED,
    RAGGED,
    TOP_P,
    context_len,
    decode_batches,
    mixed,
)
from pd_cluster.lab.peers import gpu_graphs, gpu_profile
from pd_cluster.lab.peers.gpu_clock import process_age_s, timed_calls
from pd_cluster.lab.peers.ours import greedy, run
from pd_cluster.model import runner as runner_module
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.tables import spread
from pd_cluster.types import Order, Request, Sampling

MAX_MODEL_LEN = 36_864
STEP_TOKENS = 8192  # per prefill step
NUM_SETTLING_STEPS = 8  # the first of them capture graphs and compile kernels
PHASES = {  # of a start, by the functions of the runner that take their time
    "load_parts": "weights",
    "peak_of_a_step": "the largest step",
    "KVPool": "KV pool",
    "prove": "proof",
}
SEED = 7


class Bench:
    """One engine and its measurements. Every prompt is new, and prefixes are not cached."""

    is_deterministic = False
    speedups: tuple[str, ...] = ()

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
            deterministic=self.is_deterministic,
            cuda_speedups=self.speedups,
        )
        self.imported_s = process_age_s()
        with timed_calls(runner_module, tuple(PHASES)) as self.phases_s:
            self.core, self.runner = build_core(config)
        self.ready_s = process_age_s()
        self.rng = random.Random(SEED)
        self._num_requests = 0
        results.note(
            f"{self.name}: {self.runner.max_num_batched_tokens} tokens a step, {self.runner.pool.num_blocks} blocks of "
            f"{self.runner.pool.layout.block_size}; {getattr(self.runner.model, 'kernels', 'transformers as it is')}"
        )

    @property
    def name(self) -> str:
        return self.spec.shape.name

    @property
    def device(self) -> Device:
        return self.runner.device

    def add(self, num_seqs: int, prompt_len: int, max_tokens: int, top_p: float = 0.0) -> list[Request]:
        """`top_p` above 0: tokens are drawn with it at temperature 1."""
        sampling = greedy(max_tokens)
        if top_p:
            sampling = Sampling(temperature=1.0, top_p=top_p, seed=SEED, max_tokens=max_tokens, ignore_eos=True)
        requests = []
        for _ in range(num_seqs):
            self._num_requests += 1
            prompt = random_prompt(self.rng, self.runner.vocab_size, prompt_len)
            arrival_s = float(self._num_requests)
            requests.append(Request(f"r{self._num_requests}", Order(prompt, sampling), arrival_s=arrival_s))
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
        """Measures the start by phase; the label says whether Triton's cache held the kernels."""
        what = f"start-up{self.spec.label}"
        self.put(f"{what}: process to engine ready", self.ready_s, "s")
        self.put(f"{what}: interpreter and imports", self.imported_s, "s")
        for function, phase in PHASES.items():
            self.put(f"{what}: {phase}", self.phases_s.get(function, 0.0), "s")
        self.add(1, 16, 4)
        self.drain()
        self.put(f"{what}: process to the first request's end", process_age_s(), "s")

    def decode(self) -> None:
        for batch in decode_batches(self.spec.quick):
            with self.results.section(f"decode {batch}"):
                self.time_steps(f"decode {batch}", self.decoding(batch))

    def time_steps(self, what: str, requests: list[Request]) -> float:
        """Measures steps of requests that decode; returns the median in ms."""
        took_ms, contexts = [], []
        for _ in range(self.num_steps):
            contexts.append(sum(request.num_tokens for request in requests) / len(requests))
            start_s = time.perf_counter()
            self.core.step()
            took_ms.append(1e3 * (time.perf_counter() - start_s))
        self.put(f"{what}: step", median(took_ms), "ms", values=took_ms)
        self.put(f"{what}: context", median(contexts), "tokens", "higher")
        self.drain()
        return median(took_ms)

    def overhead(self) -> None:
        """Measures a step's time less that of its kernels, as a share of the step.

        The kernels are timed by a profiler in further steps, since it slows the host down.
        """
        for batch in decode_batches(self.spec.quick):
            with self.results.section(f"overhead {batch}"):
                step_ms = self.time_steps(f"decode {batch}, once more", self.decoding(batch))
                self.decoding(batch)
                with gpu_profile.profiled(self.device) as profiler:
                    for _ in range(self.num_steps):
                        self.core.step()
                kernels_ms = gpu_profile.busy_ms(profiler, self.device) / self.num_steps
                self.put(f"decode {batch}: kernels of a step", kernels_ms, "ms")
                self.put(f"decode {batch}: host overhead", 100 * max(0.0, 1 - kernels_ms / step_ms), "%")
                self.drain()

    def sampled(self) -> None:
        """Decodes with drawn tokens."""
        for batch in decode_batches(self.spec.quick):
            with self.results.section(f"sampled {batch}"):
                self.time_steps(f"decode {batch}, top_p {TOP_P}", self.decoding(batch, TOP_P))

    def ragged(self) -> None:
        """Decodes one long context among short ones."""
        short, long = RAGGED if not self.spec.quick else QUICK_RAGGED
        max_tokens = 4 * NUM_SETTLING_STEPS + self.num_steps
        requests = [*self.add(1, long, max_tokens), *self.add(*short, max_tokens)]
        self.settle(requests)
        self.time_steps("decode of long among short", requests)

    def seats(self) -> None:
        """Runs more requests than may run at once, twice: the first run captures graphs."""
        vocab_size, count = self.spec.shape.vocab_size, self.spec.sizes(400, 6)
        seats = self.core.scheduler.max_num_seqs
        workload = workloads.uniform(vocab_size, count, self.spec.sizes(128, 8), self.spec.sizes(64, 3))
        for which in ("first run", "second run"):
            rate = workload.num_output_tokens / run(self.core, workload).took_s
            self.put(f"{count} requests at {seats} seats, {which}", rate, "tokens/s", "higher")

    def graphs(self) -> None:
        if self.runner.device.is_accelerator and self.runner.graphs is None:
            self.results.note("graphs: not measured, decode steps of this model run eagerly here; the log says why")
            return
        gpu_graphs.measure(self.runner, self.spec.quick, self.put)

    @property
    def num_steps(self) -> int:
        """The number of counted decode steps."""
        return self.spec.sizes(60, 3)

    def decoding(self, batch: int, top_p: float = 0.0) -> list[Request]:
        """Returns requests that have their context and have decoded for a while; the device has caught up."""
        max_tokens = 2 * NUM_SETTLING_STEPS + self.num_steps
        requests = self.add(batch, context_len(self.spec.quick), max_tokens, top_p)
        self.settle(requests)
        return requests

    def settle(self, requests: list[Request]) -> None:
        self.until(lambda: all(request.output_token_ids for request in requests))
        for _ in range(NUM_SETTLING_STEPS):
            self.core.step()
        synchronize(self.device)

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
        """Runs twice: the first run captures graphs for the sizes that occur."""
        workload = mixed(self.spec.shape.vocab_size, self.spec.quick)
        run(self.core, workloads.warmup(self.spec.shape.vocab_size, 4, 16, 2))
        for which in ("first run", "second run"):
            rate = workload.num_output_tokens / run(self.core, workload).took_s
            self.put(f"mixed workload, ours, {which}", rate, "tokens/s", "higher")

    def profile(self) -> None:
        """Writes all kernels of steps to pages, with the bytes that they read where those are known."""
        batch = self.spec.sizes(32, 2)
        requests = self.decoding(batch)
        context_len = sum(request.num_tokens for request in requests) / batch
        read = gpu_profile.Read.of_decode(self.spec.shape, batch, context_len)
        self._profile(f"decode-{batch}", read)
        self.drain()
        self.add(self.spec.sizes(STEP_TOKENS // PREFILL_LEN, 2), self.spec.sizes(PREFILL_LEN, 32), 1)
        self._profile("prefill", None)
        self.drain()

    def _profile(self, what: str, read: gpu_profile.Read | None) -> None:
        """Profiles one step; the sum of all kernels (operators on CPU) is a figure."""
        with gpu_profile.profiled(self.device) as profiler:
            self.core.step()
        place = Path(self.spec.out, f"profile-{self.name}-{what}")
        self.put(
            f"profile of one {what} step: all kernels", gpu_profile.write(profiler, self.device, place, read), "ms"
        )


def measure(spec: GpuSpec, results: Writer, kind: type[Bench] = Bench) -> None:
    with results.section("load"):
        bench = kind(spec, results)
    every: dict[str, Callable[[], None]] = {
        "startup": bench.startup,
        "decode": bench.decode,
        "overhead": bench.overhead,
        "prefill": bench.prefill,
        "mixed": bench.mixed,
        "profile": bench.profile,
        "sampled": bench.sampled,
        "ragged": bench.ragged,
        "seats": bench.seats,
        "graphs": bench.graphs,
    }
    for name in spec.sections:
        with results.section(name):
            every[name]()


if __name__ == "__main__":
    child_main(measure)
