"""msmodelslim's W4A16 formats: one or two codes per byte, or eight per word."""

from __future__ import annotations

import pytest
import torch

from pd_cluster.checkpoints.quantization_config import Quantization
from pd_cluster.errors import ModelError
from pd_cluster.model.weights.quantized_formats import decoded

SCALES = torch.tensor([[0.5], [2.0]])
CODES = torch.tensor([[-8, -1, 0, 7, 1, 2, 3, 4], [7, 6, 5, 4, -4, -3, -2, -1]], dtype=torch.int8)
GOLDEN = {  # the same codes, written out by hand
    "bytes": CODES,
    "pairs": torch.tensor([[-8, 112, 33, 67], [103, 69, -36, -2]], dtype=torch.int8),
    "words": torch.tensor(
        [[0x432170F8], [int.from_bytes(bytes([0x67, 0x45, 0xDC, 0xFE]), "little", signed=True)]], dtype=torch.int32
    ),
}


def read(weight: torch.Tensor, group_size: int = -1, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    found = Quantization("msmodelslim", "quant_model_description.json", group_size=group_size)
    given = {"weight": weight, "weight_scale": SCALES, "weight_offset": torch.zeros_like(SCALES), **tensors}
    return decoded("model.layers.0.mlp.up_proj", given, found, "W4A16")


@pytest.mark.parametrize("form", GOLDEN)
@pytest.mark.parametrize("group_size", [-1, 8])
def test_the_codes_of_every_packing(form: str, group_size: int) -> None:
    parts = read(GOLDEN[form], group_size)
    assert torch.equal(parts["codes"], CODES)
    assert torch.equal(parts["code_scales"], SCALES)


def test_offsets_and_group_sizes_of_small_codes() -> None:
    parts = read(CODES, weight_offset=torch.tensor([[3.0], [-2.0]]))
    assert torch.equal(parts["code_zeros"], torch.tensor([[-3.0], [2.0]])), "expected (code - zero) * scale"
    pairs = torch.tensor([[1, 2, 3, 4], [0, 1, 0, 1]], dtype=torch.int8)  # each byte would also be a valid single code
    assert read(pairs, 8)["codes"].shape == (2, 8)
    assert read(pairs, 4)["codes"].shape == (2, 4)


@pytest.mark.parametrize(
    ("weight", "why"),
    [(CODES[:1], "outputs packed in pairs"), (CODES[:, :6], "for 1 groups of scales"), (CODES.float(), "float32")],
)
def test_what_fits_no_packing_is_named(weight: torch.Tensor, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read(weight, 8)
