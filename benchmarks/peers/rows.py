"""Child of `benchmarks rows`: decode steps with oneDNN's products and with own ones, in turn. Prints nothing.

`python -m benchmarks.peers.rows MODEL RESULT NUM_STEPS SEQUENCES`: both kinds use one engine and one packed copy of
the weights, and are switched before each step, so that they share everything else.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.engine.rows_spec import Times
from pd_cluster.engine.build import build_core
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.model.layers.linear import PackedLinear
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, Request, Sampling

NUM_PROMPT_TOKENS = 16
WARM_STEPS = 20


def times_of(core: EngineCore, linears: list[PackedLinear], num_steps: int, num_sequences: int) -> Times:
    """Returns the seconds of each step: even ones by oneDNN, odd ones by own kernels."""
    own = [each.few for each in linears]
    sampling = Sampling(max_tokens=2 * num_steps + 2 * WARM_STEPS, temperature=0.0, ignore_eos=True)
    for number in range(num_sequences):
        prompt = [number, *range(NUM_PROMPT_TOKENS)]
        core.scheduler.add(Request(f"rows-{number}", Order(prompt, sampling)))
    times = Times(onednn_s=[], own_s=[])
    for at in range(WARM_STEPS + 2 * num_steps):
        is_own = bool(at % 2)
        for linear, few in zip(linears, own, strict=True):
            linear.few = few if is_own else None
        begun_s = time.perf_counter()
        core.step()
        if at >= WARM_STEPS:
            (times.own_s if is_own else times.onednn_s).append(time.perf_counter() - begun_s)
    return times


def main(model: str, result: str, num_steps: str, num_sequences: str) -> None:
    core, _ = build_core(EngineConfig(model=model, enable_prefix_caching=False))
    linears = [each for each in gc.get_objects() if isinstance(each, PackedLinear)]
    gc.disable()
    found = times_of(core, linears, int(num_steps), int(num_sequences))
    if not any(each.few for each in linears):
        found.own_s = []
    Path(result).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
