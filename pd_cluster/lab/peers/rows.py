"""Child of `bench rows`: decode steps of one sequence, padded to several rows and not, in turn. Prints nothing.

`python -m pd_cluster.lab.peers.rows MODEL RESULT NUM_STEPS`: both kinds use one engine and one packed copy of the
weights, whose padding is switched before each step, so that they share everything else.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import msgspec

from pd_cluster.engine.build import build_core
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.lab.engine.rows_spec import Times
from pd_cluster.model.layers.linear import LEAST_ROWS, PackedLinear
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, Request, Sampling

NUM_PROMPT_TOKENS = 16
WARM_STEPS = 20


def times_of(core: EngineCore, linears: list[PackedLinear], num_steps: int) -> Times:
    """Returns the seconds of each step: even ones unpadded, odd ones padded."""
    sampling = Sampling(max_tokens=2 * num_steps + WARM_STEPS, temperature=0.0, ignore_eos=True)
    core.scheduler.add(Request("rows", Order(list(range(NUM_PROMPT_TOKENS)), sampling)))
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
