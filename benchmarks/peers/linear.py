"""Child of `benchmarks linear`: one model's linear layers with weights of each form, in turn. Prints nothing.

`python -m benchmarks.peers.linear SPEC RESULT`: each time is the least of all layers and rounds. Layers have
weights of their own, so that a pass reads them from memory, not from a cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from benchmarks.engine.linear_spec import LinearSpec, LinearTimes
from pd_cluster.model.layers.linear import Linear, make_linear
from pd_cluster.native.memory import keep_what_is_freed
from pd_cluster.native.products import (
    bf16_linear,
    bf16_way,
    fp8_weight_only_linear,
    int4_linear,
    int8_linear,
    int8_weight_only_linear,
    quantize_rows,
)

GROUP = 128  # inputs of a scale of 4 bits
MOST_E4M3 = 448.0
READ_NBYTES, CHUNK_NBYTES = 1 << 30, 64 << 20
Times = dict[str, dict[int, float]]


def forms(weight: torch.Tensor) -> dict[str, tuple[int, Linear | None]]:
    """Returns this weight in each form, with its bytes: the linear layers' own, without padding."""
    count, outputs = weight.numel(), weight.shape[0]
    codes, scales = quantize_rows(weight)
    groups = weight.view(outputs, -1, GROUP)
    small = groups.abs().amax(-1) / 7.0
    four = (groups / small[..., None]).round().clamp(-8, 7).to(torch.int8).view_as(weight)
    eight = weight.abs().amax(-1, keepdim=True) / MOST_E4M3
    four_nbytes = count // 2 + small.numel() * 4
    return {
        "float32": (count * 4, make_linear(weight.clone())),
        "bfloat16": (count * 2, bf16_linear(weight.bfloat16(), None)),
        "int8": (count + outputs * 4, int8_linear(codes, scales, None)),
        "int8 weights": (count + outputs * 4, int8_weight_only_linear(codes, scales, None, None)),
        "fp8 weights": (
            count + outputs * 4,
            fp8_weight_only_linear((weight / eight).to(torch.float8_e4m3fn), eight, None),
        ),
        "int4 weights": (four_nbytes, int4_linear(four, small, None, None)),
        "int4 weights, bfloat16": (four_nbytes, int4_linear(four, small, None, None, activations="bfloat16")),
        "int4 weights, int8": (four_nbytes, int4_linear(four, small, None, None, activations="int8")),
    }


def read_bandwidth() -> float:
    """Returns bytes per second of the fastest read of a part of an array that no cache holds."""
    chunks = torch.ones(READ_NBYTES // CHUNK_NBYTES, CHUNK_NBYTES // 4).unbind()
    reads: tuple[Callable[[torch.Tensor], object], ...] = (torch.sum, lambda chunk: torch.dot(chunk, chunk))
    return CHUNK_NBYTES / min(_seconds(read, chunk) for read in reads for _ in range(3) for chunk in chunks)


def _seconds(function: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    begun_s = time.perf_counter()
    function(x)
    return time.perf_counter() - begun_s


def measure(spec: LinearSpec) -> LinearTimes:
    torch.manual_seed(0)
    torch.set_num_threads(spec.num_threads)
    keep_what_is_freed()  # as workers do
    products_s: Times = {}
    nbytes: dict[str, int] = {}
    for outputs, inputs in spec.shape.layer_linears():
        layers = [forms(torch.randn(outputs, inputs) * inputs**-0.5) for _ in range(spec.shape.num_layers)]
        for form, (size, _) in layers[0].items():
            nbytes[form] = nbytes.get(form, 0) + size
        for num_rows in spec.rows:
            x = torch.randn(num_rows, inputs)
            least: dict[str, float] = {}
            for _ in range(spec.rounds):
                for form in layers[0]:  # all layers of a form, so that none is still in the cache
                    products = [product for _, product in (layer[form] for layer in layers) if product is not None]
                    took_s = [_seconds(product, x) for product in products]
                    least[form] = min(least.get(form, float("inf")), *took_s)
            for form, took in least.items():
                of_form = products_s.setdefault(form, {})
                of_form[num_rows] = of_form.get(num_rows, 0.0) + took
    return LinearTimes(
        products_s=products_s, nbytes=nbytes, read_bytes_per_s=read_bandwidth(), bf16_way=bf16_way() or "no kernels"
    )


def main(spec: str, result: str) -> None:
    times = measure(msgspec.json.decode(spec, type=LinearSpec))
    Path(result).write_bytes(msgspec.json.encode(times))


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
