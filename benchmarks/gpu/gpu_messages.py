"""Files between `gpu` and its child processes: each child reads a spec file, and writes a file with one JSON line per
figure.

A child writes each figure at once, so results before a failure are kept. This module also has the model's shape, and
the bytes and operations of its steps. Knows nothing of goals; imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks import model_shapes
from benchmarks.engine_messages import given_spec
from benchmarks.model_shapes import ModelShape
from pd_cluster.result_tables import Better, spread

BF16_NBYTES = 2
WHOLE_FILE = "tokenizer.json"  # the last file that is written into a model's folder


class GpuShape(ModelShape, frozen=True, kw_only=True):
    """A model whose weights and KV cache are in bfloat16."""

    @property
    def read_nbytes(self) -> int:
        """The bytes of the weights that every decode step must read: the layers' matrices and the output layer.

        Norms, and the embedding's row that a step reads for each sequence, are left out.
        """
        return BF16_NBYTES * self.num_linear_weights

    def decode_read_nbytes(self, batch: int, context_len: float) -> float:
        """Returns the bytes of one step in which every sequence attends to `context_len` tokens."""
        kv_nbytes = BF16_NBYTES * 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return self.read_nbytes + batch * context_len * kv_nbytes

    def prefill_flops(self, num_prompts: int, prompt_len: int) -> float:
        """Returns the number of a prefill's operations: two per weight and token in the layers, the output layer, and
        attention.

        The output layer runs for the last token of each prompt only; attention has two products of head_dim for each
        pair of a query and a key that it may see.
        """
        head = math.prod(self.head)
        linear = 2.0 * (self.num_linear_weights - head) * prompt_len
        attention = 2.0 * self.num_layers * self.num_heads * self.head_dim * prompt_len * (prompt_len + 1)
        return num_prompts * (linear + attention + 2.0 * head)


LLAMA_8B = GpuShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    head_dim=128,
)
QUICK_SHAPE = GpuShape(**msgspec.structs.asdict(model_shapes.QUICK_SHAPE))
DECODE_BATCHES, QUICK_BATCHES = (1, 32, 128), (1, 3)
CONTEXT_LEN = 1024
NUM_PREFILL, PREFILL_LEN = 8, 2048


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A child's task. `model` is the folder of `shape`; `out` is the folder for pages and logs.

    `sections`: names in the child's module, in order. `quick`: everything is tiny, and the figures mean nothing.
    """

    device: str
    dtype: str
    quick: bool
    out: str
    shape: GpuShape
    model: str
    sections: tuple[str, ...] = ()

    def sizes(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @property
    def batches(self) -> tuple[int, ...]:
        """The numbers of sequences of decode steps."""
        return QUICK_BATCHES if self.quick else DECODE_BATCHES


class Figure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One measured number, from `samples` values."""

    name: str
    value: float
    unit: str
    better: Better
    samples: int = 1
    spread: float | None = None


class Noted(msgspec.Struct, frozen=True, tag=True):
    """A note that readers of the figures need."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    section: str
    why: str


class DeviceName(msgspec.Struct, frozen=True, tag=True):
    """The device measured, with the versions of its drivers and libraries."""

    name: str


Line = Figure | Noted | Failed | DeviceName


class Writer:
    """Writes a child's results to disk line by line."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)

    def put(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def figure(
        self, name: str, value: float, unit: str, better: Better = "lower", values: Sequence[float] = ()
    ) -> None:
        """`values`: the measurements from which the value is computed."""
        samples = max(1, len(values))
        self.put(Figure(name=name, value=value, unit=unit, better=better, samples=samples, spread=spread(values)))

    def note(self, text: str) -> None:
        self.put(Noted(text))

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Records a failure and continues with the next section."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.put(Failed(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


def read_lines(file: Path) -> list[Line]:
    """Returns all complete lines. Drops a line that the child's end has cut off."""
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in whole.splitlines()]


def child_main(measure: Callable[[GpuSpec, Writer], None]) -> None:
    """Runs a child: `python -m MODULE SPEC_FILE RESULT_FILE`."""
    spec, result_file = given_spec(GpuSpec)
    measure(spec, Writer(result_file))
