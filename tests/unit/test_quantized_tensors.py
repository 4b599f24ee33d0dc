"""A quantized layer's tensors are dequantized, or refused with an error that names tensor and value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pd_cluster.checkpoints.quantization_config import METHODS, Quantization
from pd_cluster.errors import ModelError
from pd_cluster.model.weights.load_time_quantization import SCHEMES, encoded
from pd_cluster.model.weights.quantized_formats import decoded
from pd_cluster.model.weights.weight_forms import form_of
from pd_cluster.numerics import CODES_WAY, LONG_SPANS, WHOLE_ROWS, Numerics

NAN, INF = float("nan"), float("inf")
FP8 = torch.float8_e4m3fn
NUM_OUTPUTS = 8
Tensors = dict[str, torch.Tensor]


def numbers(method: str, tensors: Tensors, **settings: object) -> torch.Tensor:
    """Returns the dequantized weight of a layer in a folder with these settings."""
    found = METHODS[method](Quantization(method, "config.json"), {"bits": 4, **settings})
    parts = decoded("file: layer", tensors, found)
    return form_of(parts, "").weight.of(parts, torch.float32).matrix()


def gptq(num_inputs: int, num_groups: int, **changes: torch.Tensor) -> Tensors:
    """Returns GPTQ tensors: all codes are 9, all zero points 8, and group g's scale is g + 1."""
    scales = torch.arange(1.0, num_groups + 1).half().unsqueeze(1).expand(num_groups, NUM_OUTPUTS).contiguous()
    return {
        "qweight": torch.full((num_inputs // 8, NUM_OUTPUTS), 0x99999999 - (1 << 32), dtype=torch.int32),
        "qzeros": torch.full((num_groups, 1), 0x77777777, dtype=torch.int32),
        "scales": scales,
        **changes,
    }


def packed(**changes: torch.Tensor) -> Tensors:
    return {
        "weight_packed": torch.full((NUM_OUTPUTS, 4), 0x11111111, dtype=torch.int32),
        "weight_scale": torch.ones(NUM_OUTPUTS, 2),
        "weight_shape": torch.tensor([NUM_OUTPUTS, 32]),
        **changes,
    }


def eight_bits(dtype: torch.dtype, scales: torch.Tensor, num_inputs: int = 64) -> Tensors:
    return {"weight": torch.ones(NUM_OUTPUTS, num_inputs).to(dtype), "weight_scale": scales}


# ---- numbers


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_the_last_group_may_be_short(method: str) -> None:
    """960 inputs in groups of 128 are seven groups and one of 64, not eight groups of 120."""
    found = numbers(method, gptq(960, 8), group_size=128)
    expected = (torch.arange(960) // 128 + 1).float().expand(NUM_OUTPUTS, 960)
    assert torch.equal(found, expected)


def test_packed_words_with_a_short_last_group() -> None:
    words = torch.full((NUM_OUTPUTS, 6), 0x99999999 - (1 << 32), dtype=torch.int32)
    scales = torch.tensor([1.0, 2.0]).expand(NUM_OUTPUTS, 2).contiguous()
    group = {"weights": {"num_bits": 4, "group_size": 32}}
    tensors = packed(weight_packed=words, weight_scale=scales, weight_shape=torch.tensor([NUM_OUTPUTS, 48]))
    found = numbers("compressed-tensors", tensors, config_groups={"group_0": group})
    assert torch.equal(found[0], torch.tensor([1.0] * 32 + [2.0] * 16))


def test_groups_of_a_size_of_their_own_and_an_order_of_zeros() -> None:
    found = numbers("gptq", gptq(128, 4), group_size=128)
    assert torch.equal(found[0], torch.arange(1.0, 5.0).repeat_interleave(32))
    natural = torch.arange(64, dtype=torch.int32) // 16
    orders = (natural, torch.zeros_like(natural))
    assert torch.equal(*(numbers("gptq", gptq(64, 4, g_idx=order)) for order in orders))


def test_zero_points_of_auto_round() -> None:
    """Stored zero points of 7 mean 8 in one version, and 7 in the other."""
    for packing, expected in (("auto_gptq", 1.0), ("gptqmodel", 2.0)):
        found = numbers("auto-round", gptq(64, 1), packing_format=f"auto_round:{packing}")
        assert found.unique().tolist() == [expected]


@pytest.mark.parametrize("structure", [[64, 64], [1, 32]])
def test_blocks_are_those_of_the_config(structure: list[int]) -> None:
    rows, columns = -(-NUM_OUTPUTS // structure[0]), -(-64 // structure[1])
    scales = torch.arange(1.0, rows * columns + 1).view(rows, columns)
    group = {"weights": {"type": "float", "strategy": "block", "block_structure": structure}}
    found = numbers("compressed-tensors", eight_bits(FP8, scales), config_groups={"group_0": group})
    expected = scales.repeat_interleave(structure[0], 0)[:NUM_OUTPUTS].repeat_interleave(structure[1], 1)[:, :64]
    assert torch.equal(found, expected)


def test_eight_bits_in_groups() -> None:
    halves = torch.tensor([1.0, 2.0]).repeat_interleave(32)
    for dtype in (FP8, torch.int8):
        scales = torch.tensor([1.0, 2.0]).expand(NUM_OUTPUTS, 2).contiguous()
        assert torch.equal(numbers("compressed-tensors", eight_bits(dtype, scales))[0], halves)
    exponents = torch.tensor([126, 129], dtype=torch.uint8).expand(NUM_OUTPUTS, 2).contiguous()
    found = numbers("compressed-tensors", eight_bits(FP8, exponents), format="mxfp8-quantized")
    assert torch.equal(found[0], torch.tensor([0.5] * 32 + [4.0] * 32))


# ---- refusals

FP4 = {
    "weight_packed": torch.zeros(NUM_OUTPUTS, 16, dtype=torch.uint8),
    "weight_scale": torch.ones(NUM_OUTPUTS, 2).to(FP8),
}
NAN_FLOATS = {"weight": torch.full((NUM_OUTPUTS, 64), NAN).to(FP8), "weight_scale": torch.ones(1)}
BROKEN: list[tuple[str, Tensors, str]] = [
    ("gptq", gptq(64, 1, scales=torch.full((1, NUM_OUTPUTS), NAN)), "scales has nan in 8 of 8 values"),
    ("gptq", gptq(64, 1, scales=torch.ones(1, NUM_OUTPUTS).int()), r"scales of torch\.int32"),
    ("gptq", gptq(64, 1, scales=torch.ones(NUM_OUTPUTS)), r"scales of \[8\]"),
    ("gptq", gptq(64, 1, bias=torch.full((NUM_OUTPUTS,), INF)), "bias has inf in 8 of 8 values"),
    ("compressed-tensors", packed(weight_scale=torch.full((NUM_OUTPUTS, 2), INF)), "weight_scale has inf in 16 of 16"),
    ("compressed-tensors", packed(weight_shape=torch.zeros(2).long()), r"weight_shape \[0, 0\]"),
    ("compressed-tensors", packed(weight_packed=torch.ones(NUM_OUTPUTS, 4)), r"weight_packed of torch\.float32"),
    ("compressed-tensors", eight_bits(torch.int8, torch.ones(NUM_OUTPUTS, 1).long()), r"weight_scale of torch\.int64"),
    ("compressed-tensors", NAN_FLOATS, "a weight contains NaN"),
    ("mxfp4", {**FP4, "weight_scale": torch.full((NUM_OUTPUTS, 1), 255, dtype=torch.uint8)}, "weight_scale has 255, w"),
    ("compressed-tensors", FP4, "weight_scale_2 is missing"),
    (
        "compressed-tensors",
        {**FP4, "weight_global_scale": torch.zeros(1)},
        "weight_scale / weight_global_scale has inf",
    ),
]


def test_what_is_no_number_is_named() -> None:
    for method, tensors, said in BROKEN:
        with pytest.raises(ModelError, match=f"^file: layer: .*{said}") as caught:
            numbers(method, tensors)
        assert "recreate it" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_gemv_with_another_size_of_groups_than_the_files() -> None:
    """GEMV files pad scales with zeros, so with a wrong group size some scales would be ignored."""
    tensors = {
        "qweight": torch.zeros(NUM_OUTPUTS, 128, dtype=torch.int32),
        "qzeros": torch.zeros(NUM_OUTPUTS, 4, dtype=torch.int32),
        "scales": torch.ones(NUM_OUTPUTS, 32).half(),
    }
    settings = {"version": "gemv", "group_size": 128}
    with pytest.raises(ModelError, match="more than 8 groups of scales, with group_size 128"):
        numbers("awq", tensors, **settings)
    tensors["scales"][:, 8:] = 0
    assert not numbers("awq", tensors, **settings).any()


def test_settings_are_refused_by_their_field() -> None:
    rotation = {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}
    settings: list[tuple[str, dict[str, object], str]] = [
        ("awq", {"version": "gemv"}, "version gemv needs group_size"),
        ("awq", {"group_size": "all"}, "group_size 'all' is not a whole number"),
        ("fp8", {"weight_block_size": [128]}, r"weight_block_size \[128\] is not a size"),
        ("fp8", {"weight_block_size": "128x128"}, "weight_block_size '128x128' is not a size"),
        (
            "compressed-tensors",
            {"config_groups": {"W4A16": ["Linear"]}},
            r"config_groups\.W4A16: \['Linear'\] is not a",
        ),
        (
            "compressed-tensors",
            {"transform_config": rotation},
            r"transform_config\.config_groups\.R4: location 'input' is",
        ),
    ]
    for method, given, said in settings:
        with pytest.raises(ModelError, match=f"^config.json.*{said}"):
            numbers(method, {}, **given)


def test_weights_that_are_no_numbers_are_not_quantized() -> None:
    for scheme in SCHEMES:
        for value in (NAN, INF):
            weight = torch.ones(4, 64)
            weight[2, 5] = value
            with pytest.raises(ModelError, match=r"^file: layer: weight contains NaN or infinity; copy"):
                encoded(weight, scheme, "file: layer")


def test_static_activations_have_their_tensors() -> None:
    """If config.json has static activations, their tensors are required; otherwise they would count as dynamic."""
    tensors = eight_bits(torch.int8, torch.ones(NUM_OUTPUTS, 1))
    tensors["weight"] = tensors["weight"] * 3
    zero = {"input_zero_point": torch.tensor([7], dtype=torch.int8)}
    for symmetric, needed in ((True, {}), (False, zero)):
        inputs = {"dynamic": False, "strategy": "tensor", "symmetric": symmetric}
        group = {"weights": {"num_bits": 8}, "input_activations": inputs}
        given = {**tensors, "input_scale": torch.tensor([0.5]), **needed}
        assert (numbers("compressed-tensors", given, config_groups={"group_0": group}) == 3).all()
        for name in ("input_scale", *needed):
            left = {other: tensor for other, tensor in given.items() if other != name}
            with pytest.raises(ModelError, match=f"file: layer: static activations without {name}; the file does not"):
                numbers("compressed-tensors", left, config_groups={"group_0": group})


def test_what_rounds_activations_is_in_the_numerics() -> None:
    """The name differs from versions with a scale per rank's part of a row, so mixed versions are refused."""
    slim = Quantization("msmodelslim", "", has_int8_activations=True)
    for found, name in (
        (Quantization("", "", at_load="int8_wo"), "int8_wo"),
        (Quantization("", "", at_load="w4a8"), f"w4a8, {WHOLE_ROWS}"),
        (Quantization("smooth_quant", "", has_int8_activations=True), WHOLE_ROWS),
        (Quantization("compressed-tensors", "", is_w4a8=True), WHOLE_ROWS),
        (replace(slim, types={"w": "W8A16"}), ""),
        (replace(slim, types={"w": "FLOAT", "v": "W8A8"}), WHOLE_ROWS),
    ):
        assert found.numerics_name(is_on_cpu=False) == name
        differs = Numerics(quantization=name).difference(Numerics(quantization=found.at_load))
        assert differs == ((CODES_WAY, name, found.at_load or "none") if WHOLE_ROWS in name else None)
        assert found.numerics_name(is_on_cpu=True) in (name, ", ".join(filter(None, (name, LONG_SPANS))))
