"""Measures the parts of steps of pd-cluster's engine: decode of 1 and of 32, a long prefill, sampling, a cached prefix.

Whole steps are timed here; `core.times` has the times of their parts. All figures are medians.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median

import torch
from msgspec import structs

from benchmarks.engine_messages import PeerResult, Spec, child_main
from benchmarks.peers.ours import Driver, greedy
from pd_cluster import wire
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.commit import StepResult
from pd_cluster.settings.engine_config import EngineConfig

SEED = 1000
PROMPT_LEN = 128
SUFFIX_LEN = 64
NUM_SETTLING_STEPS = 3  # number of uncounted decode steps at the start
TOP_K_TOP_P = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
GREEDY: dict[str, float] = {}


class Bench(Driver):
    """One engine with default settings, and so with the prefix cache, which only some prompts use."""

    def decode(self, num_seqs: int, num_steps: int, sampling: dict[str, float]) -> dict[str, float]:
        """Returns the medians of decode steps in milliseconds, by part; `step` is the whole step."""
        num_tokens = 1 + NUM_SETTLING_STEPS + num_steps
        drawn = structs.replace(greedy(num_tokens + 1), **sampling)
        requests = [self.add(self.prompt(PROMPT_LEN), drawn) for _ in range(num_seqs)]
        self.until(lambda: all(request.output_token_ids for request in requests))
        for _ in range(NUM_SETTLING_STEPS):
            self.core.step()
        parts: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_steps):
            for part, took_s in self._timed_step().items():
                parts[part].append(took_s)
        self.drain()
        return {part: 1e3 * median(values) for part, values in parts.items()}

    def _timed_step(self) -> dict[str, float]:
        times = self.core.times
        before = times.forward_s, times.sample_s, times.plan_s + times.commit_s
        start_s = time.perf_counter()
        result = self.core.run(self.core.plan())
        end_s = time.perf_counter()
        return {
            "step": end_s - start_s,
            "forward": times.forward_s - before[0],
            "sampling": times.sample_s - before[1],
            "bookkeeping": times.plan_s + times.commit_s - before[2] + message_s(result),
        }

    def ttft_s(self, prompt: list[int]) -> tuple[float, int]:
        """Returns the seconds from adding a single request to its first token, and its cached prompt tokens."""
        start_s = time.perf_counter()
        request = self.add(prompt, greedy(1))
        self.drain()
        return time.perf_counter() - start_s, request.num_cached_tokens

    def prefix(self, prefix_len: int, num_repeats: int) -> dict[str, float]:
        """Measures a suffix after a cached prefix and a suffix alone, in turn. Suffixes are new each time."""
        shared = self.prompt(prefix_len)
        for _ in range(2):
            self.ttft_s(shared + self.prompt(SUFFIX_LEN))
            self.ttft_s(self.prompt(SUFFIX_LEN))
        after_prefix, alone, cached = [], [], []
        for _ in range(num_repeats):
            took_s, num_cached = self.ttft_s(shared + self.prompt(SUFFIX_LEN))
            after_prefix.append(took_s)
            cached.append(num_cached)
            alone.append(self.ttft_s(self.prompt(SUFFIX_LEN))[0])
        return {
            "prefix_ttft_ms": 1e3 * median(after_prefix),
            "alone_ttft_ms": 1e3 * median(alone),
            "prefix_cached_tokens": min(cached),
        }

    def prefill(self, length: int, num_repeats: int) -> float:
        """Returns the median milliseconds of the step that computes a whole prompt."""
        took_s = [self.ttft_s(self.prompt(length))[0] for _ in range(1 + num_repeats)]
        return 1e3 * median(took_s[1:])


def message_s(result: StepResult) -> float:
    """Returns the seconds that it takes to encode a step's tokens for the scheduler."""
    start_s = time.perf_counter()
    wire.encode_body(wire.Outputs([token for _, token in result.sampled]))
    return time.perf_counter() - start_s


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    bench = Bench(*build_core(EngineConfig(model=spec.model, dtype="float32", device="cpu")), SEED)
    num_steps, num_repeats = (3, 1) if spec.quick else (40, 5)
    one = bench.decode(1, num_steps, GREEDY)
    many = bench.decode(spec.batch_size, num_steps, GREEDY)
    drawn = bench.decode(spec.batch_size, num_steps, TOP_K_TOP_P)
    figures = {
        "decode_1_ms": one["step"],
        "decode_32_ms": many["step"],
        "forward_32_ms": many["forward"],
        "bookkeeping_32_ms": many["bookkeeping"],
        "greedy_32_ms": many["sampling"],
        "drawn_32_ms": drawn["sampling"],
        "drawn_step_32_ms": drawn["step"],
        "prefill_1024_ms": bench.prefill(1024, num_repeats),
        **bench.prefix(1024, num_repeats),
    }
    return PeerResult(figures=figures)


if __name__ == "__main__":
    child_main(measure)
