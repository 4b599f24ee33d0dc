"""A step's tensors reach the device in one copy, and are views of it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.model.inputs.forward_batch import packed


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    is_wide=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_all_arrays_cross_in_one_copy_and_are_whole(lens: list[int], is_wide: list[bool]) -> None:
    arrays = {
        str(i): np.arange(length, dtype=np.int64 if wide else np.int32) + 1000 * i
        for i, (length, wide) in enumerate(zip(lens, is_wide, strict=False))
    }
    arrays["of two dimensions"] = np.arange(12, dtype=np.int64).reshape(1, 12)
    copies: list[torch.Tensor] = []

    def copy(host: torch.Tensor) -> torch.Tensor:
        copies.append(host.clone())
        return copies[-1]

    found = packed(arrays, copy, pinned=False)
    assert len(copies) == 1
    for name, array in arrays.items():
        assert found[name].dtype == torch.from_numpy(array).dtype
        assert found[name].shape == array.shape
        assert np.array_equal(found[name].numpy(), array)
        assert found[name].numel() == 0 or found[name].untyped_storage().data_ptr() == copies[0].data_ptr()
