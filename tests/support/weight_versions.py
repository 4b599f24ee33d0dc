"""Folders with other weights for a tiny model, as a trainer writes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make_version(base: Path, folder: Path, seed: int) -> Path:
    """Copies a model folder with each weight matrix's entries in another order: the same sizes, other answers."""
    shutil.copytree(base, folder)
    generator = torch.Generator().manual_seed(seed)
    for file in folder.glob("*.safetensors"):
        save_file({name: _shuffled(each, generator) for name, each in load_file(file).items()}, file, {"format": "pt"})
    return folder


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape).contiguous()
