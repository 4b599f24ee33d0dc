"""Divides a step of recurrent layers: long sequences are advanced by chunk kernels, the others token by token.

A chunk kernel advances several sequences at a time, each by one run of consecutive rows. If a sequence's state is
copied on the way (a checkpoint), the sequence has several runs. Each run begins with the state after the previous one,
so the runs of a sequence are in different passes. Knows nothing of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.devices.device import Device
from pd_cluster.model.inputs.forward_batch import on_device
from pd_cluster.model.inputs.state_rows import NO_BLOCK, Segment

LEAST_ROWS = 64  # the least number of rows of a long sequence: one chunk
MOST_RUNS = 32  # runs in one pass, limited because each needs memory for its state before and its state after

Table = npt.NDArray[np.int32]  # see inputs/state_rows.py


class ChunkPass(NamedTuple):
    """Runs of different sequences, on the device."""

    rows: slice | torch.Tensor  # the rows of all runs, one run after the other
    cu_seqlens: torch.Tensor  # [num_runs + 1] int64: the runs' ends among these rows
    host_cu_seqlens: torch.Tensor  # the same, on the host
    blocks: torch.Tensor  # [num_runs] int64
    kept: torch.Tensor  # [num_kept] int64: the runs after which states are copied
    keeps: torch.Tensor  # [num_kept] int64: the blocks that receive these copies

    @classmethod
    def of(cls, runs: Sequence[Segment], device: Device) -> ChunkPass:
        firsts, stops, blocks, keeps = np.array(runs, dtype=np.int64).T
        ends = np.append(0, (stops - firsts).cumsum())
        (kept,) = np.nonzero(keeps != NO_BLOCK)
        arrays = {"cu_seqlens": ends, "blocks": blocks, "kept": kept, "keeps": keeps[kept]}
        is_one_range = bool((firsts[1:] == stops[:-1]).all())
        if not is_one_range:
            arrays["rows"] = np.concatenate([np.arange(*each) for each in zip(firsts, stops, strict=True)])
        found = on_device(arrays, device)
        rows = slice(int(firsts[0]), int(stops[-1])) if is_one_range else found.pop("rows")
        return cls(rows=rows, host_cu_seqlens=torch.from_numpy(ends), **found)


def divided(table: Table) -> tuple[Table, list[list[Segment]]]:
    """Returns the segments of short sequences, and the runs of each pass over the long ones."""
    short, passes = list[Table](), list[list[Segment]]()
    for own in _sequences(table):
        if own[-1, 1] - own[0, 0] < LEAST_ROWS:
            short.append(own)
            continue
        for at, run in enumerate(_runs(own)):
            if at == len(passes):
                passes.append([])
            passes[at].append(run)
    parts = [runs[at : at + MOST_RUNS] for runs in passes for at in range(0, len(runs), MOST_RUNS)]
    return np.concatenate([table[:0], *short]), parts


def _sequences(table: Table) -> Iterator[Table]:
    """Yields the segments of each sequence."""
    (ends,) = np.nonzero(np.append(table[1:, 2] != table[:-1, 2], True))
    first = 0
    for end in ends.tolist():
        yield table[first : end + 1]
        first = end + 1


def _runs(segments: Table) -> Iterator[Segment]:
    """Joins the segments of one sequence up to each copy of its state."""
    first = int(segments[0, 0])
    for at, (_, stop, block, keep) in enumerate(segments.tolist(), start=1):
        if keep != NO_BLOCK or at == len(segments):
            yield Segment(first, stop, block, keep)
            first = stop
