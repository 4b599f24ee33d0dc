"""`neighbours_script.py MODEL` prints JSON: tokens/s of `LLM` alone, and beside a busy program on each core.

It imports torch first, as users' programs do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch

from pd_cluster import LLM, SamplingParams

NUM_TOKENS, SECONDS = 16, 4.0


def rate(llm: LLM) -> float:
    """Warms up for a second; returns the tokens/s of the next four."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
    for seconds in (1.0, SECONDS):
        num_tokens, started_s = 0, time.monotonic()
        while (took_s := time.monotonic() - started_s) < seconds:
            llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
            num_tokens += NUM_TOKENS
    return num_tokens / took_s


def main() -> None:
    assert torch.get_num_threads() > 1
    with LLM(sys.argv[1], num_blocks=64, max_model_len=64) as llm:
        found = {"alone": rate(llm)}
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
        try:
            found["busy"] = rate(llm)
        finally:
            for each in busy:
                each.kill()
                each.wait()
    print(json.dumps(found))


main()
