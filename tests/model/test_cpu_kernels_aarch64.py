"""Runs the tests of test_cpu_kernels.py on aarch64 under emulation, with the same inputs and references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from pd_cluster.model.layers.gated_mlp import Activation
from pd_cluster.native import packed_products as quantized
from tests.model import test_cpu_kernels as cases
from tests.model import test_cpu_kv_dtypes as kv_dtypes
from tests.model import test_cpu_quantized as products
from tests.model import test_shared_tables as shared_tables
from tests.support.aarch64 import EmulatedOps, emulator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The oldest aarch64, Kunpeng 920's processor, and one with SVE, for which compilers vectorize differently.
CPU_FLAGS = ("-march=armv8-a", "-mcpu=tsv110", "-march=armv8.5-a+sve")


@pytest.fixture(scope="module", params=CPU_FLAGS)
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedOps]:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        emulator(request.param, tmp_path_factory.mktemp("aarch64"), monkeypatch) as running,
    ):
        yield EmulatedOps(float32=running)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Uses two threads on every machine, because thread teams are under test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "shape", [(4, 2, 16, 3), (3, 1, 64, 16), (8, 8, 80, 1), (7, 1, 80, 16), (24, 2, 128, 64), (4, 2, 256, 16)]
)
def test_attention(ops: EmulatedOps, shape: tuple[int, int, int, int]) -> None:
    cases.test_attention(ops, *shape)


@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_reach_their_slots_and_no_others(ops: EmulatedOps, normed: bool) -> None:
    for head_dim in (16, 80):
        cases.test_keys_and_values_reach_their_slots_and_no_others(ops, head_dim, normed)


@pytest.mark.parametrize("dtype", kv_dtypes.NARROW)
@pytest.mark.parametrize("cpu_flag", CPU_FLAGS)
def test_attention_over_coded_pools(cpu_flag: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        emulator(cpu_flag, tmp_path, monkeypatch) as exact,
        emulator(cpu_flag, tmp_path, monkeypatch, dtype) as narrow,
    ):
        ops = EmulatedOps(float32=exact, **{dtype: narrow})
        for shape in ((4, 2, 32, 3), (7, 1, 128, 16)):
            kv_dtypes.check_attention(ops, dtype, shape)
        kv_dtypes.test_the_pool_s_bytes_are_those_of_the_reference(ops, dtype, ())
        kv_dtypes.test_a_row_does_not_depend_on_the_batch_or_the_threads(ops, dtype)
        if dtype != "bfloat16":
            kv_dtypes.test_a_prompt_attends_as_if_the_pool_had_its_numbers(ops, dtype)


def test_rows_do_not_depend_on_the_batch_or_the_threads(ops: EmulatedOps) -> None:
    cases.test_a_row_does_not_depend_on_the_batch_or_the_threads(ops)
    for features in cases.FEATURES_OF_ROWS:
        cases.test_norms_and_gates_of_a_row_do_not_depend_on_the_batch_or_the_threads(ops, features)


def test_rows_that_share_tables(ops: EmulatedOps) -> None:
    for shape in shared_tables.SHAPES[:3]:
        shared_tables.check(ops, "float32", shape, (6, 12))


def test_edges_of_attention(ops: EmulatedOps) -> None:
    cases.test_the_padding_block_can_be_written(ops)
    cases.test_layers_of_one_batch_have_ropes_of_their_own(ops)
    cases.test_scores_far_apart_and_infinite(ops)


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_norm(ops: EmulatedOps, num_rows: int) -> None:
    for features in (16, 96, 768, 771):
        cases.test_norm(ops, num_rows, features)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_gate(ops: EmulatedOps, activation: Activation) -> None:
    for num_rows, features in ((1, 16), (1, 9001), (3, 96), (3, 99), (40, 1000)):
        cases.test_gate(ops, num_rows, features, activation)
    cases.test_the_limited_gate_is_that_of_gpt_oss(ops)


def test_copies(ops: EmulatedOps) -> None:
    """Copies exactly `nbytes` bytes, from and to any address."""
    source = torch.randint(0, 256, (70_000,), dtype=torch.uint8)
    for nbytes in (0, 1, 63, 64, 65, 65_537):
        for to, of in ((0, 0), (1, 0), (0, 3), (33, 7)):
            target = torch.zeros(70_000, dtype=torch.uint8)
            expected = target.clone()
            expected[to : to + nbytes] = source[of : of + nbytes]
            ops.emulator.pd_copy(target.data_ptr() + to, source.data_ptr() + of, nbytes)
            assert torch.equal(target, expected)


@pytest.fixture
def flags(ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Returns compiler flags under which products find the emulated kernels."""
    monkeypatch.setitem(quantized._libraries, ("aarch64",), ops.emulator)
    monkeypatch.setattr(products, "MOST_ROWS", 40)
    monkeypatch.setattr(products, "ROWS", (1, 3, 5, 17))
    return ("aarch64",)


@pytest.mark.parametrize("shape", products.SHAPES[:-1], ids=str)
def test_products(flags: tuple[str, ...], shape: tuple[int, int, int]) -> None:
    products.test_int8(flags, shape)
    products.test_bf16(flags, shape)
    products.test_fp8(flags, shape, "float32")
    for has_zeros, activations in ((False, "float32"), (True, "int8"), (True, "bfloat16")):
        products.test_codes_of_4_and_8_bits(flags, shape, has_zeros, activations)  # type: ignore[arg-type]


def test_rows_of_products_that_are_not_numbers(flags: tuple[str, ...]) -> None:
    products.test_rows_that_are_zero_infinite_or_not_numbers(flags)
