"""Messages between `benchmarks engine` and the engines that it runs: files of JSON, so that no two share a process.

Knows nothing of goals or figures; imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are all submitted at once. Request i has `prompts[i]` and wants exactly `output_lens[i]` tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A child's task, the warm-up first; that is reported too, but only its tokens are used.

    `python` is the interpreter of a peer with an environment of its own; `gguf` is empty if not needed;
    `quick` makes the measurements small. `gguf_type` and `gguf_head_type` are ggml's names of types for all weights and
    for the output layer's, empty for the file's own.
    """

    model: str
    gguf: str = ""
    gguf_type: str = ""
    gguf_head_type: str = ""
    dtype: str = "float32"
    quantization: str | None = None
    quantize_head: str | None = None
    python: str = ""
    num_threads: int = 2
    batch_size: int = 32
    warmup: Workload
    workloads: list[Workload] = []
    quick: bool = False


class Run(msgspec.Struct, frozen=True):
    """One workload: seconds from the first request's start to the last token, and the tokens of each request."""

    took_s: float
    outputs: list[list[int]]


class PeerResult(msgspec.Struct, frozen=True, kw_only=True):
    """A child's results. The names of `figures` contain their unit: `decode_1_ms`."""

    version: str = ""
    settings: str = ""
    runs: dict[str, Run] = {}
    figures: dict[str, float] = {}


def child_main(measure: Callable[[Spec], PeerResult]) -> None:
    """Runs a child: `python -m MODULE SPEC_FILE RESULT_FILE`."""
    spec_file, result_file = map(Path, sys.argv[1:])
    result = measure(msgspec.json.decode(spec_file.read_bytes(), type=Spec))
    result_file.write_bytes(msgspec.json.encode(result))
