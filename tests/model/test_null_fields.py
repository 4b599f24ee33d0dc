"""A null in a folder's files: a default of transformers, or a refusal of one line that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ModelError
from pd_cluster.model.loader import load_model
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.copies import copy_of
from tests.support.paddle_layout import as_paddle

OTHERS = ("qwen2", "gemma2", "gpt_oss", "gpt2", "glm4", "ernie4_5_moe")
ARCHITECTURES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in (*OTHERS, "paddle"))]
BY_SHAPE = ("num_key_value_heads", "moe_intermediate_size", "moe_num_experts", "n_inner")  # refused by the weights


def fields_of(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in fields_of(value))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_field(checkpoint: Callable[..., Path], tmp_path: Path, architecture: str) -> None:
    if architecture == "paddle":
        folder = as_paddle(checkpoint("ernie4_5_moe"), tmp_path / "model")
    else:
        folder = copy_of(checkpoint(architecture), tmp_path, {})
    refused: list[tuple[str, str]] = []
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = folder / name
        whole = file.read_text("utf-8")
        for path in fields_of(json.loads(whole)):
            changed = place = json.loads(whole)
            for each in path[:-1]:
                place = place[each]
            place[path[-1]] = None
            file.write_text(json.dumps(changed), "utf-8")
            try:
                load_model(Checkpoint.open(str(folder)), "float32", CPU)
                Tokenizer(folder)
            except ModelError as error:
                refused.append((path[-1], str(error)))
        file.write_text(whole, "utf-8")
    assert len(refused) > 5
    for field, text in refused:
        assert "\n" not in text
        assert field in text or field in BY_SHAPE or architecture == "paddle", (field, text)


def test_tied_embeddings_that_are_null(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(checkpoint("llama"), tmp_path, {})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "tie_word_embeddings": None}))
    with pytest.raises(ModelError, match=r"config\.json: .*null for tie_word_embeddings: leave out, or give values$"):
        load_model(Checkpoint.open(str(folder)), "float32", CPU)
