"""What `bench gpu` asks of engines: the sizes of decode and prefill, and one mixed workload for all. Pure."""

from __future__ import annotations

from pd_cluster.bench import engine_workloads as workloads
from pd_cluster.bench.engine_spec import Workload

DECODE_BATCHES = (1, 32, 128)
CONTEXT_LEN = 1024
NUM_PREFILL, PREFILL_LEN = 8, 2048


def decode_batches(quick: bool) -> tuple[int, ...]:
    return (1, 3) if quick else DECODE_BATCHES


def context_len(quick: bool) -> int:
    """Tokens of a prompt: the steps that are timed then have `CONTEXT_LEN` tokens of context in the middle."""
    return 32 if quick else CONTEXT_LEN - 40


def mixed(vocab_size: int, quick: bool) -> Workload:
    """All there at once: prompts of 64 to 2,048 tokens, outputs of 16 to 256, most of them short."""
    if quick:
        return workloads.mixed(vocab_size, 4, (4, 24), (2, 6))
    return workloads.mixed(vocab_size, 128, (64, 2048), (16, 256))
