"""Measures the engine on a device: phases of the start, decode steps, a prefill, a mixed workload, and profiles of
steps.

Steps are run by `EngineCore`, with sampling, as in a worker. The spec selects the sections. Each section that changes a
setting (`deterministic` and `--cuda-speedups`) has its own engine.
"""

from __future__ import annotations

import gc
import itertools
import time
from pathlib import Path
from statistics import median

from benchmarks import workloads
from benchmarks.gpu.gpu_messages import CONTEXT_LEN, NUM_PREFILL, PREFILL_LEN, GpuSpec, Writer, child_main
from benchmarks.peers import gpu_profile
from benchmarks.peers.gpu_profile import process_age_s
from benchmarks.peers.ours import Driver, greedy, run
from pd_cluster.devices.device import Device, reset_peak, synchronize
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.settings.engine_config import PDL, PROMPT_GRAPHS, SKINNY_GATE, EngineConfig
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import Request, RequestSpec

MAX_MODEL_LEN = 36_864
STEP_TOKENS = 8192  # tokens per prefill step
NUM_SETTLING_STEPS = 8  # uncounted steps, in which graphs are captured and kernels are compiled
DETERMINISTIC, SPEEDUPS = "deterministic", (PDL, SKINNY_GATE, PROMPT_GRAPHS)
SEED = 7
NUM_DRAFTS = 4  # maximum number of drafts of a sequence in a step


class Bench(Driver):
    """One engine and its measurements. Every prompt is new, and prefixes are not cached."""

    def __init__(self, spec: GpuSpec, results: Writer, changed: str = "") -> None:
        """`changed`: the changed setting, which becomes part of every figure's name."""
        self.spec, self.results = spec, results
        self.prefix = f"{changed} " if changed else ""
        self.imported_s = process_age_s()
        config = EngineConfig(
            model=spec.model,
            device=spec.device,
            dtype=spec.dtype,
            max_model_len=spec.sizes(MAX_MODEL_LEN, 2048),
            num_blocks=512 if spec.quick else None,
            max_num_batched_tokens=spec.sizes(STEP_TOKENS, 128),
            enable_prefix_caching=False,
            deterministic=changed == DETERMINISTIC,
            speculation=Speculation(num_speculative_tokens=NUM_DRAFTS),
            cuda_speedups=(changed,) if changed in SPEEDUPS else (),
        )
        super().__init__(*build_core(config), SEED)
        self.ready_s = process_age_s()
        results.note(
            f"{self.prefix}engine: {self.runner.max_num_batched_tokens} tokens a step, "
            f"{self.runner.pool.num_blocks} blocks of {self.runner.pool.layout.block_size}"
        )

    @property
    def device(self) -> Device:
        return self.runner.device

    @property
    def num_steps(self) -> int:
        """The number of counted decode steps."""
        return self.spec.sizes(60, 3)

    def add_all(self, num_seqs: int, prompt_len: int, max_tokens: int) -> list[Request]:
        return [self.add(self.prompt(prompt_len), greedy(max_tokens)) for _ in range(num_seqs)]

    def decoding(self, batch: int) -> list[Request]:
        """Returns requests that have their context and have decoded for a while. The device has completed all steps.

        In the middle of the counted steps, the context has `CONTEXT_LEN` tokens.
        """
        max_tokens = 2 * NUM_SETTLING_STEPS + self.num_steps
        requests = self.add_all(batch, self.spec.sizes(CONTEXT_LEN - 40, 32), max_tokens)
        self.until(lambda: all(request.output_token_ids for request in requests))
        for _ in range(NUM_SETTLING_STEPS):
            self.core.step()
        synchronize(self.device)
        return requests

    def put(self, what: str, values: list[float], unit: str) -> None:
        better = "higher" if "/s" in unit else "lower"
        self.results.figure(self.prefix + what, median(values), unit, better, values)  # type: ignore[arg-type]

    # ---- sections

    def startup(self) -> None:
        self.put("start-up: process to engine ready", [self.ready_s], "s")
        self.put("start-up: interpreter and imports", [self.imported_s], "s")
        self.add_all(1, 16, 4)
        self.drain()
        self.put("start-up: process to the first request's end", [process_age_s()], "s")

    def decode(self) -> None:
        for batch in self.spec.batches:
            requests = self.decoding(batch)
            took_ms, contexts = [], []
            for _ in range(self.num_steps):
                contexts.append(sum(request.num_tokens for request in requests) / len(requests))
                start_s = time.perf_counter()
                self.core.step()
                took_ms.append(1e3 * (time.perf_counter() - start_s))
            self.put(f"decode {batch}: step", took_ms, "ms")
            self.put(f"decode {batch}: context", contexts, "tokens")
            self.drain()

    def overhead(self) -> None:
        """Measures a step's time without its kernels, as a share of the step.

        A profiler times the kernels in further steps, because it slows the host down.
        """
        for batch in self.spec.batches:
            self.decoding(batch)
            start_s = time.perf_counter()
            for _ in range(self.num_steps):
                self.core.step()
            step_ms = 1e3 * (time.perf_counter() - start_s) / self.num_steps
            self.drain()
            self.decoding(batch)
            with gpu_profile.profiled(self.device) as profiler:
                for _ in range(self.num_steps):
                    self.core.step()
            kernels_ms = gpu_profile.busy_ms(profiler, self.device) / self.num_steps
            self.put(f"decode {batch}: kernels of a step", [kernels_ms], "ms")
            self.put(f"decode {batch}: host overhead", [100 * max(0.0, 1 - kernels_ms / step_ms)], "%")
            self.drain()

    def prefill(self) -> None:
        count, length = self.spec.sizes(NUM_PREFILL, 2), self.spec.sizes(PREFILL_LEN, 32)
        took_s = []
        for _ in range(1 + self.spec.sizes(5, 1)):
            requests = self.add_all(count, length, 1)
            synchronize(self.device)
            start_s = time.perf_counter()
            self.until(lambda requests=requests: all(r.output_token_ids for r in requests))  # type: ignore[misc]
            took_s.append(time.perf_counter() - start_s)
            self.drain()
        self.put("prefill: time", [1e3 * each for each in took_s[1:]], "ms")
        flops = 1e-12 * self.spec.shape.prefill_flops(count, length)
        self.put("prefill: model FLOPs", [flops / each for each in took_s[1:]], "TFLOP/s")

    def mixed(self) -> None:
        """Runs requests of many lengths twice, because the first run captures graphs for the sizes that occur."""
        vocab = self.spec.shape.vocab_size
        shape = (4, (4, 24), (2, 6)) if self.spec.quick else (128, (64, 2048), (16, 256))
        workload = workloads.mixed(vocab, *shape)
        run(self.core, workloads.warmup(vocab, 4, 16, 2))
        for which in ("first run", "second run"):
            rate = workload.num_output_tokens / run(self.core, workload).took_s
            self.put(f"mixed workload, {which}", [rate], "tokens/s")

    def drafts(self) -> None:
        """Decodes answers without drafts, and again with these answers as predictions; counts tokens that differ."""
        for batch in (1, 2) if self.spec.quick else (1, 16, 64):
            prompts = [self.prompt(self.spec.sizes(256, 16)) for _ in range(batch)]
            length = self.spec.sizes(128, 8)
            self._answers([RequestSpec(prompt, greedy(length)) for prompt in prompts])  # captures graphs
            answers, plain = self._answers([RequestSpec(prompt, greedy(length), may_draft=False) for prompt in prompts])
            orders = [
                RequestSpec(prompt, greedy(length), prediction=tuple(answer))
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            self._answers(orders)
            found, drafting = self._answers(orders)
            pairs = zip(itertools.chain(*answers), itertools.chain(*found), strict=True)
            num_other = sum(one != other for one, other in pairs)
            self.put(f"drafts {batch}: without", [plain], "tokens/s")
            self.put(f"drafts {batch}: with {NUM_DRAFTS} right ones", [drafting], "tokens/s")
            self.put(f"drafts {batch}: tokens that differ", [float(num_other)], "tokens")

    def _answers(self, orders: list[RequestSpec]) -> tuple[list[list[int]], float]:
        """Returns the answers, and the tokens a second after all answers have their first token."""
        requests = [self.ask(order) for order in orders]
        self.until(lambda: all(request.output_token_ids for request in requests))
        start_s, num_before = time.perf_counter(), sum(len(request.output_token_ids) for request in requests)
        self.drain()
        num_tokens = sum(len(request.output_token_ids) for request in requests) - num_before
        rate = num_tokens / (time.perf_counter() - start_s)
        return [request.output_token_ids for request in requests], rate

    def profile(self) -> None:
        """Writes the profiles of steps, with all their kernels, to files."""
        batch = self.spec.sizes(32, 2)
        self.decoding(batch)
        self._profile(f"decode-{batch}")
        self.add_all(self.spec.sizes(STEP_TOKENS // PREFILL_LEN, 2), self.spec.sizes(PREFILL_LEN, 32), 1)
        self._profile("prefill")

    def _profile(self, what: str) -> None:
        """Profiles one step. The total time of its kernels (operators on CPU) is a figure."""
        with gpu_profile.profiled(self.device) as profiler:
            self.core.step()
        total_ms = gpu_profile.write(profiler, self.device, Path(self.spec.out, f"profile-{what}"))
        self.put(f"profile of one {what} step: all kernels", [total_ms], "ms")
        self.drain()


def measure(spec: GpuSpec, results: Writer) -> None:
    plain = [name for name in spec.sections if name not in (DETERMINISTIC, *SPEEDUPS)]
    if plain:
        bench = Bench(spec, results)
        for name in plain:
            with results.section(name):
                getattr(bench, name)()
        return
    for name in spec.sections:
        with results.section(name):
            measure_changed(spec, results, name)


def measure_changed(spec: GpuSpec, results: Writer, name: str) -> None:
    """Measures steps with one setting changed, to show what it costs or gains."""
    bench = Bench(spec, results, name)
    if name == PROMPT_GRAPHS:
        bench.mixed()
    else:
        bench.decode()
    if name == DETERMINISTIC:
        bench.drafts()
    device = bench.device
    del bench
    gc.collect()
    if device.is_accelerator:
        reset_peak(device)  # the next engine gets this one's memory


if __name__ == "__main__":
    child_main(measure)
