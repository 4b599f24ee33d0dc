"""Child of `bench rows`: decode steps of one sequence, padded to several rows and not, in turn. Prints nothing.

`python -m pd_cluster.bench.peers.rows MODEL RESULT NUM_STEPS`: both ways by one engine and one packed copy of the
weights, whose layers are told before each step whether to pad, so that the two share everything else.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import msgspec

from pd_cluster.bench.rows_spec import Times
from pd_cluster.config import EngineConfig
from pd_cluster.engine.build import build_core
from pd_cluster.engine.core import EngineCore
from pd_cluster.model.linear import LEAST_ROWS, PackedLinear
from pd_cluster.types import Request, SamplingParams

NUM_PROMPT_TOKENS = 16
WARM_STEPS = 20


def times_of(core: EngineCore, linears: list[PackedLinear], num_steps: int) -> Times:
    """Seconds of each step: even ones unpadded, odd ones padded."""
    sampling = SamplingParams(max_tokens=2 * num_steps + WARM_STEPS, temperature=0.0, ignore_eos=True)
    core.scheduler.add(Request("rows", list(range(NUM_PROMPT_TOKENS)), sampling))
    times = Times(unpadded_s=[], padded_s=[])
    for at in range(WARM_STEPS + 2 * num_steps):
        is_padded = bool(at % 2)
        for linear in linears:
            linear.least_rows = LEAST_ROWS if is_padded else 1
        begun_s = time.perf_counter()
        core.step()
        if at >= WARM_STEPS:
            (times.padded_s if is_padded else times.unpadded_s).append(time.perf_counter() - begun_s)
    return times


def main(model: str, result: str, num_steps: str) -> None:
    core, _ = build_core(EngineConfig(model=model, enable_prefix_caching=False))
    linears = [each for each in gc.get_objects() if isinstance(each, PackedLinear) and each.least_rows > 1]
    gc.disable()
    Path(result).write_bytes(msgspec.json.encode(times_of(core, linears, int(num_steps))))


if __name__ == "__main__":
    main(*sys.argv[1:])
