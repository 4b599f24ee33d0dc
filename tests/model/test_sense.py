"""A quantized folder whose codes are in another order than its config says is noticed when it is loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


def test_ranks_ask_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = rewritten(SHIPPED_MODEL, tmp_path, reordered(FORMATS["awq"], ORDERS["backwards"]))
    with ranks(folder, 2, num_blocks=128):
        pass
    assert sum(WARNING in record.getMessage() for record in caplog.records) == 1


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
