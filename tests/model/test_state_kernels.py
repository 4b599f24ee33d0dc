"""Kernels of recurrent layers: against a float64 recurrence and transformers' functions, and bit for bit."""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from pd_cluster.native import state_kernels
from pd_cluster.native.recurrence_values import GatedDelta, GatedNorm, Mamba2
from tests.support.recurrences import (
    BlocksOfStates,
    RecurrentCase,
    conv_case,
    delta_case,
    kernel_of,
    mamba_case,
    reference,
    table_of,
)

pytestmark = pytest.mark.skipif(not state_kernels.can_run(), reason="no C kernels here")

CLAMPED = (0.5, 1.5)
CASES: dict[str, Callable[[int], RecurrentCase]] = {
    "delta": lambda n: delta_case(4, 2, (16, 16), n),
    "delta wide": lambda n: delta_case(32, 16, (128, 128), n),
    "delta odd": lambda n: delta_case(3, 3, (20, 37), n, kernel=2),
    "delta of olmo": lambda n: delta_case(3, 3, (96, 192), n),
    "by channel": lambda n: delta_case(4, 4, (16, 16), n, by_channel=True),
    "by channel wide": lambda n: delta_case(16, 16, (128, 128), n, by_channel=True),
    "mamba": lambda n: mamba_case(8, 2, (16, 16), n),
    "mamba wide": lambda n: mamba_case(32, 1, (64, 128), n),
    "mamba odd": lambda n: mamba_case(6, 3, (5, 20), n, "silu after", CLAMPED, kernel=8),
    "mamba of falcon": lambda n: mamba_case(4, 2, (32, 256), n),
    "convolution": lambda n: conv_case(64, n),
}
OLDER = ["-mno-avx512f", "-march=x86-64"]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def a_case(name: str, num_rows: int) -> RecurrentCase:
    torch.manual_seed(num_rows)
    return CASES[name](num_rows)


def compute(case: RecurrentCase, pool: BlocksOfStates, *segments: tuple[int, int, int, int]) -> torch.Tensor:
    return kernel_of(case)(case.inputs, pool.planes, table_of(*segments))


@pytest.mark.parametrize(
    ("name", "flags"),
    [(name, "") for name in CASES]
    + [(name, flag) for flag in OLDER for name in ("delta odd", "by channel", "mamba odd", "convolution")],
)
def test_numbers(name: str, flags: str) -> None:
    """Covers more rows than are computed at once; no other block is written."""
    num_rows = 70 if "wide" in name else 150
    if flags and platform.machine() != "x86_64":
        pytest.skip("flags of x86-64")
    case = a_case(name, num_rows)
    pool = BlocksOfStates(case, 4)
    pool.data[2] = 0
    found = kernel_of(case, *flags.split())(case.inputs, pool.planes, table_of((0, num_rows, 2, -1)))
    expected = reference(case)
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()
    assert pool.data[[0, 1, 3]].isnan().all()


def cut(num_rows: int, sizes: Iterator[int]) -> list[tuple[int, int]]:
    found, at = [], 0
    while at < num_rows:
        found.append((at, min(num_rows, at + next(sizes))))
        at = found[-1][1]
    return found


def sizes(kind: str) -> Iterator[int]:
    """Yields lengths of a prompt's pieces; the first ones lie around the 64 rows that kernels compute together."""
    yield from {"1": [1] * 70, "63": [63, 1], "64": [64], "65": [65], "random": []}[kind]
    rng = random.Random(kind)
    while True:
        yield rng.choice([1, 2, 3, 15, 16, 17, 40, 63, 64, 65, 128, 129])


@pytest.mark.parametrize("kind", ["1", "63", "64", "65", "random"])
@pytest.mark.parametrize("name", [name for name in CASES if "of" not in name.split()])
def test_bits_depend_on_no_cut(name: str, kind: str) -> None:
    case = a_case(name, 200)
    whole, pieces = BlocksOfStates(case, 3), BlocksOfStates(case, 3)
    whole.data[1] = pieces.data[0] = 0
    expected = compute(case, whole, (0, 200, 1, -1))
    torch.set_num_threads(1)
    parts = cut(200, sizes(kind))
    found = [compute(case.rows(slice(*part)), pieces, (0, part[1] - part[0], 0, -1)) for part in parts]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(pieces.data[0], whole.data[1])


@pytest.mark.parametrize("name", [name for name in CASES if "of" not in name.split()])
def test_company_and_checkpoints_change_no_bit(name: str) -> None:
    """One step has sequences of one, many and two tokens; the second one's state is kept twice."""
    case = a_case(name, 180)
    together, alone = BlocksOfStates(case, 8), BlocksOfStates(case, 8)
    together.data[:3] = alone.data[:3] = torch.randn(3, together.data.shape[1])
    segments = [(0, 1, 2, -1), (1, 3, 0, 5), (3, 130, 0, 6), (130, 178, 0, -1), (178, 180, 1, 7)]
    found = compute(case, together, *segments)
    torch.set_num_threads(1)
    for first, stop, block, states_at in ((0, 1, 2, ()), (1, 178, 0, ((3, 5), (130, 6))), (178, 180, 1, ((180, 7),))):
        rows, at = [], first
        for end, kept in (*states_at, (stop, None)):
            if end > at:
                rows.append(compute(case.rows(slice(at, end)), alone, (0, end - at, block, -1)))
            if kept is not None:
                assert torch.equal(together.data[kept], alone.data[block])
            at = end
        assert torch.equal(torch.cat(rows), found[first:stop])
        assert torch.equal(together.data[block], alone.data[block])
    resumed = compute(case.rows(slice(130, 178)), together, (0, 48, 6, -1))
    assert torch.equal(resumed, found[130:178])
    assert torch.equal(together.data[6], together.data[0])


# ---- transformers' own functions


def bare(case: RecurrentCase) -> RecurrentCase:
    """Returns the layer without its norm and gate."""
    assert case.recurrence is not None
    return replace(case, recurrence=replace(case.recurrence, norm=GatedNorm()))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.flatten() - expected.flatten()).abs().max() < 1e-5 * expected.abs().max()


def convolved(case: RecurrentCase) -> torch.Tensor:
    """Returns what transformers' convolution makes of the rows, [1, num_rows, num_channels]."""
    own = case.convolution
    x = case.inputs.convolved.t()[None].contiguous()
    bias = None if own.bias is None else torch.nn.Parameter(own.bias)
    return qwen.causal_conv1d_fn(x, own.weight, bias, activation="silu").transpose(1, 2)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_gated_delta_rule_is_transformers(by_channel: bool) -> None:
    torch.manual_seed(0)
    case = bare(delta_case(8, 8 if by_channel else 4, (128, 128), 100, by_channel))
    delta, inputs = case.recurrence, case.inputs
    assert isinstance(delta, GatedDelta)
    assert inputs.decays is not None
    assert inputs.betas is not None
    keys = delta.num_key_heads * delta.key_width
    parts = torch.split(convolved(case), [keys, keys, delta.num_heads * delta.value_width], dim=2)
    q, k, v = (part.unflatten(2, (-1, 128)) for part in parts)
    steps = softplus(inputs.decays + delta.decay_bias).view(1, 100, delta.num_heads, -1)
    decays = -delta.rates[:, None] * steps
    by_chunks, one_by_one = (
        (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention)
        if by_channel
        else (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule)
    )
    pool = BlocksOfStates(case, 1)
    pool.data[:] = 0
    found = compute(case, pool, (0, 100, 0, -1))
    decays = decays if by_channel else decays[..., 0]
    for function in (by_chunks, one_by_one):
        expected, state = function(
            q, k, v, g=decays, beta=inputs.betas.sigmoid()[None], initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        close(found, expected)
        close(pool.planes[0], state)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), CLAMPED])
def test_mamba_is_transformers(limits: tuple[float, float]) -> None:
    torch.manual_seed(0)
    case = bare(mamba_case(8, 2, (64, 128), 100, limits=limits))
    mamba, inputs = case.recurrence, case.inputs
    assert isinstance(mamba, Mamba2)
    assert inputs.decays is not None
    x, b, c = torch.split(convolved(case), [8 * 64, 2 * 128, 2 * 128], dim=2)
    rows = x.unflatten(2, (8, 64)), b.unflatten(2, (2, 128)), c.unflatten(2, (2, 128))
    expected, state = bamba.mamba2_chunk_scan(
        rows[0], inputs.decays[None], -mamba.rates, rows[1], rows[2], chunk_size=16, D=mamba.skips,
        dt_bias=mamba.step_bias, dt_softplus=True, dt_limit=limits, return_final_states=True,
    )  # fmt: skip
    pool = BlocksOfStates(case, 1)
    pool.data[:] = 0
    close(compute(case, pool, (0, 100, 0, -1)), expected)
    close(pool.planes[0], state)


def test_large_numbers_stay_numbers() -> None:
    """Decays, betas and gates stay finite for inputs whose exponential overflows."""
    for name in ("delta", "by channel", "mamba"):
        case = a_case(name, 40)
        inputs = case.inputs
        assert inputs.decays is not None
        signs = torch.from_numpy(np.sign(np.random.default_rng(0).standard_normal(inputs.decays.shape))).float()
        assert inputs.gate is not None
        wild = replace(case, inputs=inputs._replace(decays=signs * 1e4, gate=inputs.gate * 1e4))
        pool = BlocksOfStates(case, 1)
        pool.data[:] = 0
        found, expected = compute(wild, pool, (0, 40, 0, -1)), reference(wild)
        assert found.isfinite().all()
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
