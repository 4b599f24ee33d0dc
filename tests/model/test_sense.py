"""A quantized folder whose codes are in another order than its config says is noticed when it is loaded."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from pd_cluster.settings.engine import SHIPPED_MODEL
from tests.support.engines import make_core
from tests.support.quantized import FORMATS, Format, Written, rewritten
from tests.support.ranks import ranks

WARNING = "does not know how 1, 2, 3 goes on"
ORDERS = {"as it is": list(range(8)), "even ones first": [0, 2, 4, 6, 1, 3, 5, 7], "backwards": list(range(7, -1, -1))}


def reordered(form: Format, order: list[int]) -> Format:
    """The format with the codes of its words, zero points included, in another order."""

    def write(weight: torch.Tensor, group: int) -> Written:
        parts, numbers = form.write(weight, group)
        for name, words in parts.items():
            if words.dtype == torch.int32 and words.dim() == 2:
                codes = torch.stack([words >> 4 * field & 15 for field in order], -1)
                parts[name] = sum(codes[..., at] << 4 * at for at in range(8)).to(torch.int32)
        return parts, numbers

    return dataclasses.replace(form, write=write)


def turn_vocabulary(folder: Path) -> None:
    """Gives the last tokens the first places: digits are then in the second rank's share of the vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "embed_tokens" in name or "lm_head" in name]:
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary.values(), default=0)
    last = max([last, *(each["id"] for each in tokenizer["added_tokens"])])
    for text in vocabulary:
        vocabulary[text] = last - vocabulary[text]
    for each in tokenizer["added_tokens"]:
        each["id"] = last - each["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["awq", "gptq 4", "packed 4"])
def test_another_order_of_the_codes(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, order: str) -> None:
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path, reordered(FORMATS[name], ORDERS[order]))
    make_core(folder, num_blocks=128)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if order == "as it is":
        assert not warnings
    else:
        (warning,) = warnings
        assert warning.startswith(f"{folder}: ")
        assert WARNING in warning
        assert "quantization_config" in warning


def test_a_tokenizer_s_padding_is_not_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it is saved after a calibration."""
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path, FORMATS["awq"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=256)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(folder / "tokenizer.json"))
    make_core(folder, num_blocks=128)
    assert WARNING not in caplog.text


def test_ranks_ask_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path, reordered(FORMATS["awq"], ORDERS["backwards"]))
    turn_vocabulary(folder)
    with ranks(folder, 2, num_blocks=128):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert "chance 6.9" in warning  # of 1,024 tokens


def test_plain_weights_are_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, checkpoint: Callable[..., Path]
) -> None:
    """They have one order only, and a model that knows nothing may be what somebody wants to train or measure."""
    make_core(checkpoint("llama"), num_blocks=128)
    assert WARNING not in caplog.text


def test_models_for_vectors_need_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path, reordered(FORMATS["awq"], ORDERS["backwards"]))
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    make_core(folder, num_blocks=128)
    assert WARNING not in caplog.text
