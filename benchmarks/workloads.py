"""The requests of `engine` and `gpu`. They are seeded token ids, the same in every run and for every engine.

Pure; knows nothing of engines.
"""

from __future__ import annotations

import math
import random

from benchmarks.engine_messages import Workload

SEED = 0
FIRST_WORD_ID = 259  # smaller ids are bytes and special tokens


def uniform(
    vocab_size: int,
    num_requests: int = 32,
    input_len: int = 128,
    output_len: int = 64,
    name: str = "uniform",
    seed: int = SEED,
) -> Workload:
    """Makes requests of one shape."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, vocab_size, input_len) for _ in range(num_requests)]
    return Workload(name=name, prompts=prompts, output_lens=[output_len] * num_requests)


def mixed(
    vocab_size: int,
    num_requests: int = 64,
    input_lens: tuple[int, int] = (16, 1024),
    output_lens: tuple[int, int] = (8, 256),
) -> Workload:
    """Makes requests of many lengths, which are log-normal between the bounds: most are short, some are long."""
    rng = random.Random(SEED + 1)
    prompts = [random_prompt(rng, vocab_size, log_normal(rng, *input_lens)) for _ in range(num_requests)]
    return Workload(name="mixed", prompts=prompts, output_lens=[log_normal(rng, *output_lens) for _ in prompts])


def warmup(vocab_size: int, num_requests: int = 32, input_len: int = 128, output_len: int = 8) -> Workload:
    """Makes uncounted requests with the same steps as `uniform`, for which an engine allocates, compiles and packs.

    They share no prompt with the counted requests.
    """
    return uniform(vocab_size, num_requests, input_len, output_len, "warmup", SEED + 2)


def random_prompt(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(FIRST_WORD_ID, vocab_size) for _ in range(length)]


def log_normal(rng: random.Random, least: int, most: int) -> int:
    """Draws a length.

    The median is the bounds' geometric mean. The bounds are two standard deviations away from it, and limit the result.
    """
    mu, sigma = (math.log(most) + math.log(least)) / 2, (math.log(most) - math.log(least)) / 4
    return min(most, max(least, round(rng.lognormvariate(mu, sigma))))
