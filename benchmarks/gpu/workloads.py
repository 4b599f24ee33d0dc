"""The workloads of `benchmarks gpu`: the sizes of decode and prefill, and one mixed workload for all engines. Pure."""

from __future__ import annotations

from benchmarks.engine import workloads as workloads
from benchmarks.spec import Workload

DECODE_BATCHES = (1, 32, 128)
CONTEXT_LEN = 1024
NUM_PREFILL, PREFILL_LEN = 8, 2048
RAGGED, QUICK_RAGGED = ((31, 500), 32_768), ((3, 20), 200)  # (short prompts, their tokens), tokens of a long one
TOP_P = 0.9


def decode_batches(quick: bool) -> tuple[int, ...]:
    return (1, 3) if quick else DECODE_BATCHES


def context_len(quick: bool) -> int:
    """Returns the tokens of a prompt: halfway through the timed steps the context then has `CONTEXT_LEN` tokens."""
    return 32 if quick else CONTEXT_LEN - 40


def mixed(vocab_size: int, quick: bool) -> Workload:
    """Returns requests that all arrive at once: prompts of 64 to 2,048 tokens, outputs of 16 to 256, mostly short."""
    if quick:
        return workloads.mixed(vocab_size, 4, (4, 24), (2, 6))
    return workloads.mixed(vocab_size, 128, (64, 2048), (16, 256))
