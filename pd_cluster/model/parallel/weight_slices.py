"""Reads weights from the safetensors files slice by slice.

Skips the weights of other ranks and, for the text part of a multimodal model, the weights of the other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pd_cluster.checkpoints.tensor_layouts import WeightFolder
from pd_cluster.checkpoints.weight_files import text_name
from pd_cluster.errors import ModelError
from pd_cluster.model.parallel.parallel_plan import FUSED_EXPERTS, WeightCut
from pd_cluster.model.parallel.rank_tensors import WHOLE_PART, RankTensors
from pd_cluster.model.weights.stored_tensors import opened


def read_shard(
    folder: WeightFolder, part: RankTensors, is_text_part: bool = False, expert_width: int = 0
) -> dict[str, torch.Tensor]:
    """Returns a rank's weights by name. Raises ModelError.

    `is_text_part`: reads only the text model of a multimodal folder.
    `expert_width`: see `_is_turned`; 0: experts are stored as transformers expects them.
    """
    return _read(folder, part, text_name if is_text_part else str, expert_width)


def read_whole(folder: WeightFolder) -> dict[str, torch.Tensor]:
    """Returns all weights by name. Raises ModelError."""
    return _read(folder, WHOLE_PART, str)


def read_named(
    folder: WeightFolder, name_of: Callable[[str], str], part: RankTensors = WHOLE_PART
) -> dict[str, torch.Tensor]:
    """Returns a rank's weights by name; `name_of` returns a weight's name, or "" to skip it. Raises ModelError."""
    return _read(folder, part, name_of)


def has_head(folder: WeightFolder) -> bool:
    """Whether a multimodal folder has weights for the output layer of its text model. Raises ModelError."""
    return any(text_name(key).startswith("lm_head.") for key in names(folder))


def names(folder: WeightFolder) -> Iterator[str]:
    """Yields the names of all tensors. Raises ModelError."""
    for file in folder.files():
        yield from _names(file, folder)


def _names(file: Path, folder: WeightFolder) -> list[str]:
    try:
        with opened(file, folder) as stream:
            return list(stream.keys())
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error


def _read(
    folder: WeightFolder, part: RankTensors, name_of: Callable[[str], str], expert_width: int = 0
) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in folder.files():
        try:
            with opened(file, folder) as stream:
                for key in stream.keys():  # noqa: SIM118  (not a dict)
                    if name := part.name(name_of(key)):
                        weights[name] = _taken(stream.get_slice(key), name, part, expert_width)
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
    return weights


def _taken(stored: Any, name: str, part: RankTensors, expert_width: int) -> torch.Tensor:
    """Reads this rank's part of a stored tensor."""
    shape = tuple(stored.get_shape())
    turned = bool(expert_width) and _is_turned(name, shape, expert_width)
    if (own := part.own_experts(name)) is not None:
        taken = take(stored, own)
        return taken.transpose(1, 2).contiguous() if turned else taken
    if turned:
        stored, shape = stored[:].transpose(1, 2), (shape[0], shape[2], shape[1])
    return take(stored, part.cut(name, shape))


def _is_turned(name: str, shape: tuple[int, ...], width: int) -> bool:
    """Whether stacked experts are stored transposed: inputs before outputs. `width`: hidden_size.

    If both dimensions are equal, this cannot be determined; then experts are read unchanged, as in transformers.
    """
    found = FUSED_EXPERTS.search(name)
    if found is None or len(shape) != 3:
        return False
    at, other = (2, 1) if found["name"] == "gate_up_proj" else (1, 2)
    return shape[at] != width and shape[other] == width


def take(stored: object, cut: WeightCut) -> torch.Tensor:
    """Reads a cut of `stored`, a safetensors slice, which reads data only when it is indexed."""
    if cut.pieces is None:
        whole: torch.Tensor = stored[:]  # type: ignore[index]
        whole = whole.contiguous()
        return torch.zeros_like(whole) if cut.on_rank_0_only else whole
    before = (slice(None),) * cut.dim
    parts = [stored[(*before, slice(start, stop))] for start, stop in cut.pieces]  # type: ignore[index]
    taken: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.dim)
    if missing := cut.padded_to - len(taken) if cut.padded_to else 0:
        taken = torch.cat([taken, taken.new_zeros(missing, *taken.shape[1:])])
    return taken.contiguous()
