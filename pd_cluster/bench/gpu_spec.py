"""What `bench gpu` and its children tell each other: a spec file in, a file of JSON lines out, one line a figure.

A child writes each figure as soon as it has it, and says where it is: what was measured before it failed stays. Also
the shapes of the models, and what a step of one must read and compute. Knows nothing of goals; imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pd_cluster.bench.report import Better

BF16_NBYTES = 2


class GpuShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model with random weights. `name` is part of every figure's name."""

    name: str
    family: Literal["llama", "qwen3"]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False
    max_positions: int = 131072

    @property
    def layer_linear_weights(self) -> int:
        """Of one layer: qkv, o, gate and up, down."""
        attention, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * attention + 2 * kv + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Without the norms, which are a few thousand numbers."""
        return self.num_layers * self.layer_linear_weights + (1 if self.tied else 2) * self.head_weights

    @property
    def read_nbytes(self) -> int:
        """Weights that every decode step must read: the layers' matrices and the output layer.

        Of the embedding a step reads one row a sequence, which is left out, as are norms.
        """
        return BF16_NBYTES * (self.num_layers * self.layer_linear_weights + self.head_weights)

    @property
    def kv_nbytes_per_token(self) -> int:
        return BF16_NBYTES * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def decode_read_nbytes(self, batch: int, context_len: float) -> float:
        """Of one step in which every sequence attends to `context_len` tokens."""
        return self.read_nbytes + batch * context_len * self.kv_nbytes_per_token

    def prefill_flops(self, num_prompts: int, prompt_len: int) -> float:
        """Two a weight and token in the layers, the output layer for the last token of each prompt only, and attention:
        two products of head_dim for each pair of a query and a key that it may see.
        """
        linear = 2.0 * self.num_layers * self.layer_linear_weights * prompt_len
        pairs = prompt_len * (prompt_len + 1) / 2
        attention = 4.0 * self.num_layers * self.num_heads * self.head_dim * pairs
        return num_prompts * (linear + attention + 2.0 * self.head_weights)


LLAMA_8B = GpuShape(
    name="8B",
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)
QWEN_06B = GpuShape(
    name="0.6B",
    family="qwen3",
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    tied=True,
    max_positions=40960,
)
_TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
QUICK_SHAPES = (
    GpuShape(name="8B", family="llama", intermediate_size=96, vocab_size=320, **_TINY),  # type: ignore[arg-type]
    GpuShape(name="0.6B", family="qwen3", intermediate_size=96, vocab_size=320, tied=True, **_TINY),
)


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do. `model` is the folder of `shape`; `out` is where pages and pictures go.

    `sections` are the child's own, in order. `quick`: everything tiny; its figures mean nothing.
    """

    device: str
    dtype: str
    quick: bool
    out: str
    shape: GpuShape
    model: str
    sections: list[str]

    def sizes(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class Began(msgspec.Struct, frozen=True, tag=True):
    section: str


class Figure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One measured number; `samples` values are behind it."""

    name: str
    value: float
    unit: str
    better: Better
    samples: int = 1
    spread: float | None = None


class Ended(msgspec.Struct, frozen=True, tag=True):
    section: str


class Noted(msgspec.Struct, frozen=True, tag=True):
    """Something that whoever reads the figures must know."""

    text: str


class Device(msgspec.Struct, frozen=True, tag=True):
    """What was measured on, with the versions of what drives it."""

    name: str


Line = Began | Figure | Ended | Noted | Device


class Writer:
    """A child's results, on disk line by line."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)

    def put(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def figure(
        self, name: str, value: float, unit: str, better: Better, samples: int = 1, spread: float | None = None
    ) -> None:
        self.put(Figure(name=name, value=value, unit=unit, better=better, samples=samples, spread=spread))

    def note(self, text: str) -> None:
        self.put(Noted(text))

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.put(Began(name))
        yield
        self.put(Ended(name))


def read_lines(file: Path) -> list[Line]:
    """All whole lines; one that a child was ended in the middle of is dropped."""
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in whole.splitlines()]


def child_main(measure: Callable[[GpuSpec, Writer], None]) -> None:
    """The whole of a child: `python -m MODULE SPEC_FILE RESULT_FILE`."""
    spec_file, result_file = map(Path, sys.argv[1:])
    measure(msgspec.json.decode(spec_file.read_bytes(), type=GpuSpec), Writer(result_file))
