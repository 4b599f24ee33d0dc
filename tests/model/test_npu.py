"""Models on the NPU path: torch-npu's real operator schemas and meta kernels, computed on CPU. No NPU is needed."""

from __future__ import annotations

import pytest

from tests.support.npu_wheel import run_cases

CASES = (
    "npu_cases.py",
    "npu_coded_cases.py",
    "npu_head_cases.py",
    "npu_lora_cases.py",
    "npu_parity_cases.py",
    "npu_graph_cases.py",
    "npu_tp_cases.py",
)


SLOW = ("npu_coded_cases.py", "npu_head_cases.py", "npu_lora_cases.py", "npu_tp_cases.py")
FILES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_the_path_is_exact_over_the_operators_own_schemas(file: str) -> None:
    assert " passed" in run_cases(file, "-m", "not slow", timeout_s=1150)
