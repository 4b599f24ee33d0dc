"""Ways to corrupt the folder of a rank-5 LoRA adapter for the tiny llama, and the required error messages."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.lora_folder import WEIGHTS_FILE
from tests.support.sparse_files import padded

A_OF_Q, B_OF_Q = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB")


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def with_nan(folder: Path) -> None:
    changed(folder, lambda tensors: tensors[B_OF_Q].fill_(float("nan")))


def with_an_unknown_tensor(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.update({"base_model.model.secret.lora_A.weight": torch.ones(5, 64)}))


def with_the_wrong_shape(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.update({B_OF_Q: torch.ones(62, 5)}))


def with_a_huge_header(folder: Path) -> None:
    """Writes a header that declares 10 GB, in a sparse file of that size."""
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", 10 << 30))
        file.truncate(11 << 30)


def with_a_large_header(folder: Path) -> None:
    """Writes a header just below the limit for files."""
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", 7 << 30))
        file.truncate((7 << 30) + 8)


def with_a_header_longer_than_the_file(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 10 << 30) + b"{}")


def half_written(folder: Path) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])


def with_padding(folder: Path) -> None:
    """Adds 2 GiB of padding as a hole."""
    padded(folder / WEIGHTS_FILE, 2 << 30)


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def with_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


def with_a_pipe(folder: Path) -> None:
    """Replaces a file by a pipe to which no process writes."""
    (folder / WEIGHTS_FILE).unlink()
    os.mkfifo(folder / WEIGHTS_FILE)


def with_a_link_to_elsewhere(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to("/etc/hostname")


def with_too_high_a_rank(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 4096}))
    save_file({B_OF_Q: torch.ones(64, 4096), A_OF_Q: torch.ones(4096, 64)}, folder / WEIGHTS_FILE)


def with_a_slow_expression(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {"(a+)+" * 9 + "$": 2}}))


def with_an_expression_of_numbers(folder: Path) -> None:
    """Uses an expression for which matching a 40-digit name takes practically forever: 30 numbers, split in any way."""
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {r"\d+" * 30 + "x": 2}}))
    save_file(
        {name: torch.ones(4, 64) for name in (f"{'1' * 40}.lora_{side}.weight" for side in "AB")}, folder / WEIGHTS_FILE
    )


HOSTILE: list[tuple[Callable[[Path], None], str]] = [
    (with_nan, r"-0: .*q_proj: .*NaN or infinity"),
    (with_the_wrong_shape, r"-0: .*q_proj: .* do not fit"),
    (with_an_unknown_tensor, r"secret"),
    (with_a_huge_header, r"11811160064 bytes; at most"),
    (with_a_large_header, r"a header of 7516192768 bytes; at most"),
    (with_a_header_longer_than_the_file, r"not a safetensors file .its header does not fit"),
    (half_written, r"cut short"),
    (with_padding, r"2147483648 bytes follow its last tensor"),
    (without_weights, r"missing"),
    (with_a_pickle, r"may run code"),
    (with_a_pipe, r"not a file"),
    (with_a_link_to_elsewhere, r"leads out of its folder"),
    (with_too_high_a_rank, r"above --max-lora-rank 16"),
    (with_a_slow_expression, r"rank_pattern"),
    (with_an_expression_of_numbers, r"rank_pattern"),
]
