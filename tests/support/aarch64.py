"""Compiles the C kernels for aarch64 as the product does, and runs them under qemu-aarch64 on this machine.

`EmulatedOps` is a `CpuOps` whose kernels run in the emulator's process; tests of the kernels use it instead of
`CpuOps`. Emulation checks results and compilation. It shows neither speed nor the effects of aarch64's weaker memory
ordering.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cpu import ops
from pd_cluster.model.layers.ops import Heads, Rope
from pd_cluster.native import build, packed_products

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = "Debian has them as gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user"
SYSROOT = Path("/usr/aarch64-linux-gnu")
DRIVER = Path(__file__).with_name("aarch64_driver.c")
FLAGS = tuple(flag for flag in build.FLAGS if flag != "-march=native")  # a cross compiler has no native target
COMPILE_DEADLINE_S = 100.0
CALL_DEADLINE_S = 100.0
ARENA_NBYTES = 64 << 20
ALIGNMENT = 64
INPUTS_OF_WORD = {1: 2, 2: 4, 3: 8, 4: 4}  # key: how a product's weights are packed, see packed_weights.h


@dataclass(frozen=True, slots=True)
class _Range:
    """A memory range that a call reads and, if `is_result`, also writes."""

    address: int | None
    nbytes: int
    is_result: bool = False


class Emulator:
    """Calls the C kernels in the emulator's process, with the C functions' arguments and this process's addresses."""

    def __init__(self, process: subprocess.Popen[str], arena: mmap.mmap) -> None:
        self._process, self._arena = process, arena
        self._end = 0
        self.pool_nbytes = 0  # set before each pd_attend, whose arguments do not include it

    def pd_norm(
        self,
        x: int,
        delta: int | None,
        weight: int,
        out: int,
        num_rows: int,
        features: int,
        eps: float,
        num_threads: int,
    ) -> None:
        nbytes = num_rows * features * 4
        ranges = (
            _Range(x, nbytes, True),
            _Range(delta, nbytes),
            _Range(weight, features * 4),
            _Range(out, nbytes, True),
        )
        self._call("pd_norm", ranges, num_rows, features, _bits(eps), num_threads)

    def pd_gate(self, gate_up: int, out: int, num_rows: int, features: int, activation: int, num_threads: int) -> None:
        nbytes = num_rows * features * 4
        ranges = (_Range(gate_up, 2 * nbytes), _Range(out, nbytes, True))
        self._call("pd_gate", ranges, num_rows, features, activation, num_threads)

    def pd_copy(self, target: int, source: int, nbytes: int) -> None:
        self._call("pd_copy", (_Range(target, nbytes, True), _Range(source, nbytes)), nbytes, keep_alignment=True)

    def pd_attend(self, step_address: int, layer_address: int, pool: int, qkv: int, out: int) -> None:
        step = ops.StepFields.from_buffer_copy(ctypes.string_at(step_address, ctypes.sizeof(ops.StepFields)))
        layer = ops.LayerFields.from_buffer_copy(ctypes.string_at(layer_address, ctypes.sizeof(ops.LayerFields)))
        num_seqs, num_tokens, dim = step.num_seqs, step.num_tokens, layer.head_dim
        num_blocks = (ctypes.c_int32 * (num_seqs + 1)).from_address(step.table_starts)[num_seqs]
        sizes = {
            "query_starts": (num_seqs + 1) * 4,
            "context_lens": num_seqs * 4,
            "block_table": num_blocks * 4,
            "table_starts": (num_seqs + 1) * 4,
            "order": num_seqs * 4,
            "together": num_seqs * 4,
            "slots": num_tokens * 8,
            "cos": num_tokens * dim * 4,
            "sin": num_tokens * dim * 4,
            "key_limits": num_tokens * 4,
            "q_norm": dim * 4,
            "k_norm": dim * 4,
            "sinks": layer.num_heads * 4,
        }
        self._end = ALIGNMENT
        for each in (step, layer):
            for name, kind in each._fields_:
                if kind is ctypes.c_void_p:
                    setattr(each, name, self._put(_Range(getattr(each, name), sizes[name])))
        ranges = (
            _Range(ctypes.addressof(step), ctypes.sizeof(step)),
            _Range(ctypes.addressof(layer), ctypes.sizeof(layer)),
            _Range(pool, self.pool_nbytes, True),
            _Range(qkv, num_tokens * (layer.num_heads + 2 * layer.num_kv_heads) * dim * 4, True),
            _Range(out, num_tokens * layer.num_heads * dim * 4, True),
        )
        self._call("pd_attend", ranges, keep_arena=True)

    def pd_way(self, address: int) -> int:
        return self._call("pd_way", (_Range(address, ctypes.sizeof(packed_products.ProductCall)),))

    def pd_scratch_nbytes(self, address: int) -> int:
        return self._call("pd_scratch_nbytes", (_Range(address, ctypes.sizeof(packed_products.ProductCall)),))

    def pd_product(self, address: int) -> None:
        nbytes = ctypes.sizeof(packed_products.ProductCall)
        product = packed_products.ProductCall.from_buffer_copy(ctypes.string_at(address, nbytes))
        outputs = -(-product.outputs // packed_products.PANEL) * packed_products.PANEL
        num_spans = product.num_groups * product.spans_of_group
        out = _Range(product.out, product.num_rows * product.outputs * 4, True)
        sizes = {
            "x": product.num_rows * product.inputs * 4,
            "words": outputs * num_spans * product.span_padded * 32 // INPUTS_OF_WORD[product.form] // 8,
            "scales": outputs * product.num_groups * 4,
            "zeros": outputs * product.num_groups * 4,
            "bias": outputs * 4,
            "scratch": self.pd_scratch_nbytes(address),
        }
        self._end = ALIGNMENT
        for name, size in sizes.items():
            setattr(product, name, self._put(_Range(getattr(product, name), size)))
        product.out = self._put(out)
        self._call("pd_product", (_Range(ctypes.addressof(product), nbytes),), keep_arena=True)
        ctypes.memmove(out.address, self._arena[product.out : product.out + out.nbytes], out.nbytes)

    def _call(
        self,
        name: str,
        ranges: tuple[_Range, ...],
        *numbers: int,
        keep_arena: bool = False,
        keep_alignment: bool = False,
    ) -> int:
        """Returns the function's return value, or 0 if it has none."""
        if not keep_arena:
            self._end = ALIGNMENT  # offset 0 would be a null pointer
        offsets = [self._put(each, keep_alignment) for each in ranges]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, (name, *offsets, *numbers))) + "\n")
        self._process.stdin.flush()
        assert wait([self._process.stdout], CALL_DEADLINE_S), f"{name} did not end within {CALL_DEADLINE_S} s"
        answer = self._process.stdout.readline()
        *returned, end = answer.split() or [""]
        assert end == "done", f"{name} ended the emulator: exit status {self._process.wait(CALL_DEADLINE_S)}"
        for each, offset in zip(ranges, offsets, strict=True):
            if each.is_result and each.nbytes:
                ctypes.memmove(each.address, self._arena[offset : offset + each.nbytes], each.nbytes)
        return int(returned[0]) if returned else 0

    def _put(self, each: _Range, keep_alignment: bool = False) -> int:
        """Copies a range into the arena and returns its offset there."""
        if each.address is None:
            return 0
        start = -(-self._end // ALIGNMENT) * ALIGNMENT + (each.address % ALIGNMENT if keep_alignment else 0)
        self._end = start + each.nbytes
        assert self._end <= ARENA_NBYTES, f"{self._end} bytes are needed, the arena has {ARENA_NBYTES}"
        self._arena[start : self._end] = ctypes.string_at(each.address, each.nbytes)
        return start


class EmulatedOps(ops.CpuOps):
    """`CpuOps` with one emulator per dtype of the pool, at least float32. Only the kernels run in the emulator."""

    def __init__(self, **emulators: Emulator) -> None:
        self.emulator, self._emulators = emulators["float32"], emulators
        self._norm, self._gate = self.emulator.pd_norm, self.emulator.pd_gate
        self._layers = {}

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        self._emulators[batch.pool.layout.dtype].pool_nbytes = batch.pool.data.nbytes
        return super().attend(heads, qkv, rope, batch)

    def _kernels_for(self, pool_dtype: str) -> Any:
        return self._emulators[pool_dtype]


@contextmanager
def emulator(
    cpu_flag: str, folder: Path, monkeypatch: pytest.MonkeyPatch, pool_dtype: str = "float32"
) -> Iterator[Emulator]:
    """Compiles the kernels with `cpu_flag` (-march=armv8-a, say) and starts the emulator. Skips without the tools."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing or not SYSROOT.is_dir():
        pytest.skip(f"not found: {', '.join(missing) or SYSROOT}. {PACKAGES}")
    monkeypatch.setenv("CC", COMPILER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    library = build.build((*FLAGS, cpu_flag, f"-DPOOL={ops.POOLS[pool_dtype]}"))
    driver, arena_file = folder / "driver", folder / "arena"
    command = [COMPILER, "-O1", "-std=gnu11", "-Wall", "-Wno-unused-function", f"-I{build.FOLDER}", str(DRIVER)]
    done = subprocess.run(
        [*command, "-o", str(driver), "-fopenmp", "-ldl"],
        capture_output=True,
        text=True,
        timeout=COMPILE_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with arena_file.open("w+b") as file:
        file.truncate(ARENA_NBYTES)
        arena = mmap.mmap(file.fileno(), ARENA_NBYTES)
    process = subprocess.Popen(
        [EMULATOR, "-cpu", "max", "-L", str(SYSROOT), str(driver), str(library), str(arena_file), str(ARENA_NBYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Emulator(process, arena)
    finally:
        process.kill()
        process.communicate(timeout=CALL_DEADLINE_S)
        arena.close()


def _bits(value: float) -> int:
    return int(struct.unpack("=I", struct.pack("=f", value))[0])
