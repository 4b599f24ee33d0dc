"""Prompt adapter folders: what is read, and what is refused by name before loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.checkpoints.prompt_adapter_folder import PromptFolder, read_adapter
from pd_cluster.errors import ModelError
from pd_cluster.types.variants import lora_of, num_given_tokens, num_virtual_tokens
from tests.unit.test_lora_folder import write as write_lora

CONFIG: dict[str, Any] = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors or {"prompt_embeddings": torch.ones(4, 8)}, folder / "adapter_model.safetensors")
    return folder


def test_what_is_read(tmp_path: Path) -> None:
    soft = PromptFolder.read(write(tmp_path / "a"))
    assert (soft.kind, soft.num_tokens, soft.tensor.shape) == ("prompt", 4, (4, 8))
    assert (num_virtual_tokens(soft.digest), num_given_tokens(soft.digest), lora_of(soft.digest)) == (4, 0, "")
    prefix = PromptFolder.read(write(tmp_path / "b", peft_type="PREFIX_TUNING", prefix_projection=True))
    assert (num_virtual_tokens(prefix.digest), num_given_tokens(prefix.digest)) == (4, 4)
    assert PromptFolder.read(write(tmp_path / "c", peft_type="P_TUNING")).digest == soft.digest
    assert prefix.digest != soft.digest
    other = write(tmp_path / "d", {"prompt_embeddings": torch.cat((torch.ones(4, 7), torch.zeros(4, 1)), 1)})
    assert PromptFolder.read(other).digest != soft.digest


def test_either_kind_by_its_config(tmp_path: Path) -> None:
    assert isinstance(read_adapter(write(tmp_path / "a"), 16), PromptFolder)
    lora = write_lora(tmp_path / "b")
    assert isinstance(read_adapter(lora, 16), LoraFolder)
    with pytest.raises(ModelError, match="peft_type 'LORA': not one of PROMPT_TUNING"):
        PromptFolder.read(lora)
    with pytest.raises(ModelError, match="no such folder"):
        read_adapter(tmp_path / "c", 16)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    folder = PromptFolder.read(write(tmp_path / "a"))
    write(tmp_path / "a", {"prompt_embeddings": torch.zeros(4, 8)})
    with pytest.raises(ModelError, match="changed while it was loaded"):
        folder.weights()


def _link_out(folder: Path) -> None:
    (folder.parent / "secret").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("../secret")


def _cut(folder: Path) -> None:
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-3])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_link_out, "leads out of its folder"),
        (_cut, "cut short"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "expected a JSON object"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json: missing"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: missing"),
        (lambda folder: write(folder, {"other": torch.ones(4, 8)}), "'other': a prompt adapter has only"),
        (lambda folder: write(folder, {"prompt_embeddings": torch.ones(4)}), "expected a matrix"),
        (lambda folder: write(folder, {"prompt_embeddings": torch.ones(4, 8).int()}), "dtype 'I32'"),
        (lambda folder: write(folder, peft_type="MULTITASK_PROMPT_TUNING"), "peft_type 'MULTITASK_PROMPT_TUNING': not"),
        (lambda folder: write(folder, num_virtual_tokens=5), "num_virtual_tokens 5, but prompt_embeddings has 4 rows"),
        (lambda folder: write(folder, num_virtual_tokens=None), "num_virtual_tokens None, but"),
        (lambda folder: write(folder, num_transformer_submodules=2), "num_transformer_submodules 2: only decoders"),
        (lambda folder: write(folder, modules_to_save=["lm_head"]), "modules_to_save: whole modules"),
        (lambda folder: write(folder, something_new=3), "something_new 3: this field is not known here"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, spoil: Callable[[Path], Any], why: str) -> None:
    folder = write(tmp_path / "a")
    spoil(folder)
    with pytest.raises(ModelError, match=why):
        PromptFolder.read(folder)


def test_limits_and_names_of_virtual_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    assert PromptFolder.read(folder, 4).num_tokens == 4
    with pytest.raises(ModelError, match="num_virtual_tokens 4 is above --max-prompt-adapter-token 3; raise that"):
        PromptFolder.read(folder, 3)
    assert num_virtual_tokens("") == num_virtual_tokens("ab" * 32) == num_virtual_tokens("prompt-0-" + "ab" * 32) == 0
    assert num_virtual_tokens("prompt-x-y") == num_virtual_tokens("-1-") == 0
    assert lora_of("ab" * 32) == "ab" * 32
