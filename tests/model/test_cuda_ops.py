"""The Triton kernels, and models with them, without a GPU: interpreted on CPU, and compiled for absent GPUs.

Both run in child processes, because triton decides at import whether to interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreted import ROOT, run_cases

pytest.importorskip("triton")

MAX_SHARED_NBYTES = {80: 99 << 10, 90: 227 << 10}  # limit per program; 80 also represents 86, 89 and 120
MULTIPROCESSOR_NBYTES = {80: 164 << 10, 90: 228 << 10}  # for 8.0 and 9.0; each program costs 1 KiB
CASES = [
    ("cuda_ops_cases.py", "cuda_heads_cases.py"),
    ("cuda_experts_cases.py",),
    ("cuda_draw_cases.py",),
    ("cuda_coded_cases.py", "cuda_pool_cases.py"),
    ("cuda_lora_cases.py",),
    ("cuda_states_cases.py", "cuda_fla_cases.py"),
    ("cuda_sparse_cases.py", "cuda_sparse_model_cases.py"),
    ("cuda_deterministic_cases.py",),
    ("cuda_model_cases.py", "cuda_hybrid_cases.py", "cuda_latent_cases.py"),
]


# Two children: starting one takes long, but a single one would delay the end of the test run.
SHARES = (CASES[:4], CASES[4:])


@pytest.mark.timeout(500)
@pytest.mark.parametrize("share", SHARES, ids=["rows and weights", "models"])
def test_kernels_agree_with_their_references(share: list[tuple[str, ...]]) -> None:
    """Runs the case files in a child; on failure the cases are listed one by one."""
    assert " passed" in run_cases([file for files in share for file in files], "-m", "not slow", timeout_s=480)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("files", CASES)
def test_kernels_agree_with_their_references_at_random_shapes(files: tuple[str, ...]) -> None:
    assert " passed" in run_cases(files, "-m", "slow", timeout_s=1180)


def compiled(*arguments: str, folder: Path, timeout_s: float = 220) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_cuda_ops", *arguments],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def most_stack_nbytes(facts: dict[str, Any]) -> int:
    """Allows ptxas to spill four registers in float32 quantized products on 8.0, so that two programs fit."""
    is_wide_product = facts["kernel"] == "coded_linear_product" and not facts["is_16_bits"]
    return 16 if is_wide_product and facts["arch"] == 80 and facts["registers"] == 128 else 0


def check(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["shared_nbytes"] <= MAX_SHARED_NBYTES[facts["arch"]], facts
        assert facts["stack_nbytes"] <= most_stack_nbytes(facts), f"spills registers: {facts}"
        assert not facts["fuses_doubles"], f"masses would have other bits than the host's: {facts}"
        if facts["kernel"].endswith("_product") and facts["is_16_bits"]:
            assert facts["mma"] or facts["wgmma"], f"multiplies without tensor cores: {facts}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_and_fit(arch: int, tmp_path: Path) -> None:
    """Kernels compile and fit, and move 16 bytes per instruction where bandwidth matters most."""
    found = compiled(str(arch), folder=tmp_path)
    check(found)
    kernels = {facts["kernel"] for facts in found}
    assert kernels == {
        *("rms_norm", "gated", "prepare_heads", "route", "sort_pairs", "gate_up_product", "down_product"),
        *("best_of_parts", "best_of_rows", "weigh_bins", "gather_likely", "choose_among"),
        *("linear_product", "sum_pairs", "skinny_gate_product", "coded_linear_product", "round_rows", "decode_rows"),
        *("lora_shrink", "lora_expand"),
        *("convolve_rows", "keep_inputs", "delta_rule", "mamba_scan", "gated_norm"),
        *("_copy", "prepare_latents", "heads_product", "prepare_index", "keep_index_keys", "score_keys", "keep_best"),
        "list_keys",
    }
    for facts in found:
        overlaps = int(facts["case"] == "overlapping")
        assert (facts["waits"], facts["lets_go"], facts["early_accesses"]) == (overlaps, overlaps, 0), facts
        is_split = facts["kernel"] == "coded_linear_product" and "200" not in facts["case"]
        assert facts["ordered_counts"] == facts["counts"] == is_split, facts  # results are stored first, added later
        if facts["kernel"] == "skinny_gate_product":  # two programs must fit
            assert facts["copies_16_bytes"], facts
            assert 2 * (facts["shared_nbytes"] + 1024) <= MULTIPROCESSOR_NBYTES[arch], facts
        if facts["kernel"] in ("rms_norm", "gated", "prepare_heads", "best_of_parts", "_copy"):
            assert facts["widest_load_nbytes"] == 16, facts
        if facts["kernel"] in ("rms_norm", "gated", "prepare_heads"):
            assert facts["narrowest_store_nbytes"] == 16, facts
        if facts["kernel"].endswith("_product"):
            assert facts["copies_16_bytes"], facts


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_and_fit_at_other_shapes(arch: int, tmp_path: Path) -> None:
    check(compiled(str(arch), "all", folder=tmp_path, timeout_s=1180))
