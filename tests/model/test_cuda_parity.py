"""16-bit attention's numbers: compiled kernels on a GPU, otherwise small shapes interpreted.

Errors are relative to a bound that follows from the precision (tests/support/cuda_parity).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.spread import spread
from tests.support.triton_child import triton_child

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
Sequences = list[tuple[int, int]]  # query_len, context_len
EDGES = [1, 2, 17, 255, 256, 257]

DECODE: Sequences = [(1, length) for length in (*EDGES, *((1000, 4096, 16129, 32768) if ON_GPU else (600,)))]
CHUNKED: Sequences = [(512, 8192), (300, 32768), (129, 129)] if ON_GPU else [(40, 300), (17, 17)]
MIXED: Sequences = [(1, 300), (70, 70), (1, 1), (33, 400), *([(1, 32768), (700, 2000)] if ON_GPU else [])]
STEPS = {"decode": DECODE, "mixed": MIXED, "chunked": CHUNKED}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "softcap": {"softcap": 20.0},
    "sinks": {"has_sinks": True},
    "all": {"window": 300, "softcap": 30.0, "has_sinks": True},
}
HEADS = {"gqa 4": (8, 2), "mha": (2, 2), "gqa 7": (7, 1)}
Case = tuple[str, int, str, str]  # dtype, head_dim, heads, features


def cases() -> list[Case]:
    """Combines every precision with every head size, feature and ratio of heads; on a GPU uses all ratios."""
    found = []
    for i, head_dim in enumerate((64, 96, 128, 256)):
        for j, dtype in enumerate(("bfloat16", "float16")):
            names, features = list(HEADS), list(FEATURES)
            chosen = names if ON_GPU else [names[(i + j) % 3]]
            found += [(dtype, head_dim, heads, features[(2 * i + j + k) % 5]) for k, heads in enumerate(chosen)]
    return found


RUNS = [(steps, *case) for steps in STEPS for case in cases()] if ON_GPU else spread(list(STEPS), cases())
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Yields a function that calls a function of tests.support.cuda_parity by name."""
    if ON_GPU:
        from tests.support import cuda_parity  # this process may compile

        yield lambda name, **given: getattr(cuda_parity, name)(**given)
        return
    with triton_child(True, tmp_path_factory.mktemp("triton")) as child:
        yield lambda name, **given: child.call("cuda_parity", name, **given)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("steps", "dtype", "head_dim", "heads", "features"), RUNS)
def test_numbers_are_as_exact_as_their_precision(
    call: Call, steps: str, dtype: str, head_dim: int, heads: str, features: str
) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    assert call("worst_error", sequences=STEPS[steps], **shape, **FEATURES[features]) < 1


def test_repeated_launches_have_the_same_bits(call: Call) -> None:
    """On a GPU splits complete in varying order, so a result that is merged too early fails here."""
    longest = 24 if ON_GPU else 2
    sequences = [(1, 300 + 977 * at) for at in range(longest)]
    assert call("repeated", sequences=sequences, num_launches=200 if ON_GPU else 2) == 0


FAR: Sequences = [(1, 20), (20, 20)]


def test_offsets_beyond_32_bits(call: Call) -> None:
    """The pool has 3.6 * 10**9 elements; on a CPU only used pages take memory."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "is_far": True}
    assert call("worst_error", sequences=FAR, **shape) < 1
