"""Messages between benchmarks and their child processes, as JSON files. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.model_shapes import ModelShape

S = TypeVar("S")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are submitted all at once. Request i has `prompts[i]` and gets exactly `output_lens[i]` tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A child's task; a warm-up, if any, comes first. `shape`: the model's. `quick`: measurements are small."""

    model: str
    shape: ModelShape
    num_threads: int
    warmup: Workload = Workload(name="warmup", prompts=[], output_lens=[])
    workloads: list[Workload] = []
    batch_size: int = 32
    rounds: int = 1
    quick: bool = False


class Run(msgspec.Struct, frozen=True):
    """One workload's result: seconds from the first request's start to the last token, and each request's tokens."""

    took_s: float
    outputs: list[list[int]]


class PeerResult(msgspec.Struct, frozen=True, kw_only=True):
    """A child's results. The names of `figures` contain their unit: `decode_1_ms`."""

    runs: dict[str, Run] = {}
    figures: dict[str, float] = {}


def given_spec(kind: type[S]) -> tuple[S, Path]:
    """Returns a child's task and the file for its results, from `python -m MODULE SPEC_FILE RESULT_FILE`."""
    spec_file, result_file = map(Path, sys.argv[1:])
    return msgspec.json.decode(spec_file.read_bytes(), type=kind), result_file


def child_main(measure: Callable[[Spec], PeerResult]) -> None:
    spec, result_file = given_spec(Spec)
    result_file.write_bytes(msgspec.json.encode(measure(spec)))
