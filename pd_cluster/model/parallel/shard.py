"""One rank's weights, read from the safetensors files slice by slice: what another rank holds is never read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from pd_cluster.errors import ModelError
from pd_cluster.model.parallel.plan import Cut, Plan

INDEX = "model.safetensors.index.json"


def read_shard(folder: Path, plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """Name in the files to this rank's share. Raises ModelError."""
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as stream:
                for key in stream.keys():  # noqa: SIM118  (not a dict)
                    stored = stream.get_slice(key)
                    shape = tuple(stored.get_shape())
                    weights[key] = _take(stored, plan.cut(key, shape, rank))
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
    return weights


def weight_files(folder: Path) -> Iterator[Path]:
    """The files of the index if there is one, else all safetensors files."""
    index = folder / INDEX
    if index.exists():
        try:
            yield from (folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values())))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: cannot be read as an index of weights: {error}") from error
    else:
        yield from sorted(folder.glob("*.safetensors"))


def _take(stored: object, cut: Cut) -> torch.Tensor:
    """`stored` is a slice of safetensors: indexing it reads."""
    if cut.pieces is None:
        whole: torch.Tensor = stored[:]  # type: ignore[index]
        return torch.zeros_like(whole) if cut.on_rank_0_only else whole
    before = (slice(None),) * cut.dim
    parts = [stored[(*before, slice(start, stop))] for start, stop in cut.pieces]  # type: ignore[index]
    taken: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.dim)
    if missing := cut.padded_to - len(taken) if cut.padded_to else 0:
        taken = torch.cat([taken, taken.new_zeros(missing, *taken.shape[1:])])
    return taken.contiguous()
