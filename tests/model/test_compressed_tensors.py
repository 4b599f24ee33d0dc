"""compressed-tensors' own library as a second reader: our folders and hand-written ones are the same numbers to it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.model.layers.weight import HeldLinear
from pd_cluster.model.modules import load_plain
from pd_cluster.model.quantize.job import QuantizeJob
from pd_cluster.model.quantize.schemes import SCHEMES
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import random_prompt
from tests.support.quantized import FORMATS, change_config, rewritten

pytest.importorskip("compressed_tensors", reason="the extra `test` brings it")
PROMPT = random_prompt(random.Random(1), 24)


def config(name: str, strategy: str, **weights: Any) -> dict[str, Any]:
    """Returns a quantization_config with all that the library wants to know."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


WRITTEN = {
    "packed asymmetric": config("pack-quantized", "group", group_size=16, symmetric=False),
    "packed 8": config("pack-quantized", "group", group_size=16, num_bits=8),
    "mxfp4": config("mxfp4-pack-quantized", "group", group_size=32, type="float"),
}


def assert_same(folder: Path) -> None:
    """Compares the weights to the bit, and then the logits of transformers' modules."""
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_plain(Checkpoint.open(str(folder)), "float32", CPU)
    held = {name: module for name, module in ours.named_modules() if isinstance(module, HeldLinear)}
    assert held
    for name, module in held.items():
        assert torch.equal(module.parts.value.matrix(), theirs.get_submodule(name).weight), name
        plain = torch.nn.Linear(module.in_features, module.out_features)
        plain.weight.data, plain.bias = module.parts.value.matrix(), theirs.get_submodule(name).bias
        ours.set_submodule(name, plain)
    ours.config._attn_implementation = theirs.config._attn_implementation
    with torch.inference_mode():
        found, expected = (model.eval()(torch.tensor([PROMPT])).logits for model in (ours, theirs))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_folders_that_quantize_writes(tmp_path: Path, scheme: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2")
    QuantizeJob(folder, tmp_path / "out", SCHEMES[scheme], "rtn", []).run()
    assert_same(tmp_path / "out")


@pytest.mark.parametrize("name", WRITTEN)
def test_folders_written_bit_by_bit(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", hidden_size=64, intermediate_size=96)
    quantized, _ = rewritten(folder, tmp_path, FORMATS[name])
    change_config(quantized, quantization_config=WRITTEN[name])
    assert_same(quantized)
