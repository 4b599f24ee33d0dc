"""Weights with NaN or infinity, of every dtype that has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pd_cluster.checkpoints import plain_files
from pd_cluster.errors import ModelError
from pd_cluster.model.weights import finite_files
from pd_cluster.model.weights.finite_files import check_finite_files

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)


def folder_of(place: Path, **tensors: torch.Tensor) -> Path:
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 9])
def test_one_number_is_found_wherever_it_is(
    dtype: torch.dtype, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite_files, "STEP_NBYTES", 2 * dtype.itemsize)
    assert plain_files.STEP_NBYTES % 8 == 0, "a part has whole numbers"
    limits = torch.finfo(dtype)
    numbers = torch.tensor([limits.max, limits.min, 0.0, -0.0, limits.tiny, 1.0], dtype=torch.float64)
    plain = numbers.to(dtype).repeat(2)[:size]
    whole = torch.arange(size)
    base = folder_of(tmp_path / "base", first=plain, second=whole)
    check_finite_files(base, base)
    values = [float("nan")] if dtype is torch.float8_e4m3fn else [float("nan"), float("inf"), -float("inf")]
    for at in range(size):
        for value in values:
            spoilt = plain.float() if dtype.itemsize < 4 else plain.clone()
            spoilt[at] = value
            bad = folder_of(tmp_path / f"bad-{at}-{value}", first=spoilt.to(dtype), second=whole)
            with pytest.raises(ModelError, match="first: contains NaN or infinity"):
                check_finite_files(base, bad)
            check_finite_files(bad, bad)
