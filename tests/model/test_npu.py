"""Models on the NPU path: torch-npu's real operator schemas and meta kernels, computed on CPU. No NPU is needed."""

from __future__ import annotations

import pytest

from tests.support.npu_wheel import run_cases

CASES = (
    *("npu_cases.py", "npu_expert_cases.py", "npu_parity_cases.py", "npu_graph_cases.py", "npu_unit_cases.py"),
    *("npu_latent_cases.py", "npu_weights_cases.py", "npu_sparse_cases.py"),
)
SLOW = ("npu_coded_cases.py", "npu_head_cases.py", "npu_lora_cases.py", "npu_tp_cases.py")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "files", [CASES, *(pytest.param((file,), marks=pytest.mark.slow) for file in SLOW)], ids=" ".join
)
def test_the_path_is_exact_over_the_operators_own_schemas(files: tuple[str, ...]) -> None:
    """The quick files share a child process, because starting one takes long."""
    assert " passed" in run_cases(files, "-m", "not slow", timeout_s=1150)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_further_cases_are_exact() -> None:
    assert " passed" in run_cases((*CASES, *SLOW), "-m", "slow", timeout_s=1150)
