"""Times recurrent layers between their projections, for a prompt: token by token, and by flash-linear-attention's chunk
kernels.

On a CPU, only the C kernels are timed. If the package fla is missing or fails its trial, a note replaces the figures of
its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.gpu.gpu_messages import GpuSpec, Writer, child_main
from benchmarks.peers.gpu_profile import launches_s
from pd_cluster.devices.device import Device, resolve, use
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.state_rows import Segment, StateRows
from pd_cluster.model.layers.states.recurrent_kernels import NativeStates, RecurrentKernel
from pd_cluster.native.recurrence_values import ConvHeads, Convolution, GatedDelta, GatedNorm, Mamba2, StateInputs
from pd_cluster.wire import Plane

NUM_ROWS, QUICK_ROWS = 4096, 80


class LayerShape(NamedTuple):
    """`shared`: the number of heads of queries and keys, or of groups of B and C.

    `widths`: the widths of a key and a value, or of B and x.
    """

    recurrence: type[GatedDelta] | type[Mamba2]
    num_heads: int
    shared: int
    widths: tuple[int, int]
    has_channel_decays: bool = False


SHAPES = {
    "Qwen3-Next": LayerShape(GatedDelta, 32, 16, (128, 128)),
    "Kimi-Linear": LayerShape(GatedDelta, 32, 32, (128, 128), has_channel_decays=True),
    "Nemotron-H": LayerShape(Mamba2, 128, 8, (128, 64)),
}
QUICK_SHAPES = {name: each._replace(num_heads=4, shared=2, widths=(16, 24)) for name, each in SHAPES.items()}
QUICK_SHAPES["Kimi-Linear"] = QUICK_SHAPES["Kimi-Linear"]._replace(shared=4)


class Layer(NamedTuple):
    convolution: Convolution
    recurrence: GatedDelta | Mamba2
    inputs: StateInputs


def measure(spec: GpuSpec, results: Writer) -> None:
    device, num_rows = resolve(spec.device), spec.sizes(NUM_ROWS, QUICK_ROWS)
    use(device)
    for name, shape in (QUICK_SHAPES if spec.quick else SHAPES).items():
        with results.section(name), torch.inference_mode():
            layer = layer_of(shape, num_rows, device)
            for way, kernel in ways(layer, device, results).items():
                run = steps(layer, kernel, device)
                took_ms = [1e3 * each for each in launches_s(run, device, spec.sizes(5, 1), spec.sizes(7, 1))]
                results.figure(
                    f"states of {name}, {num_rows} tokens, {way}", median(took_ms), "ms", "lower", values=took_ms
                )


def layer_of(shape: LayerShape, num_rows: int, device: Device) -> Layer:
    """Makes a layer of random weights, and the projections of one prompt."""
    torch.manual_seed(0)
    dtype, place = (torch.bfloat16 if device.is_accelerator else torch.float32), device.torch_name
    random = partial(torch.randn, dtype=dtype, device=place)
    heads, shared, (key_width, value_width) = shape.num_heads, shape.shared, shape.widths
    of_keys, of_values = ConvHeads(shared, key_width), ConvHeads(heads, value_width)
    is_delta = shape.recurrence is GatedDelta
    parts = (of_keys, of_keys, of_values) if is_delta else (of_values, of_keys, of_keys)
    num_channels, num_features = 2 * shared * key_width + heads * value_width, heads * value_width
    convolution = Convolution(random(num_channels, 4), None, parts, True)
    num_decays = heads * key_width if shape.has_channel_decays else heads
    bias, rates = random(num_decays), torch.rand(heads, device=place) + 0.05
    recurrence: GatedDelta | Mamba2
    if is_delta:
        norm = GatedNorm("silu after", random(value_width), 1e-6)
        recurrence = GatedDelta(heads, shared, key_width, value_width, bias, rates, norm)
    else:
        norm, limits = GatedNorm("silu before", random(num_features), 1e-6), (0.0, float("inf"))
        recurrence = Mamba2(heads, shared, value_width, key_width, bias, rates, random(heads), limits, norm)
    rows = StateInputs(
        random(num_rows, num_channels), random(num_rows, num_decays), random(num_rows, heads),
        random(num_rows, num_features),
    )  # fmt: skip
    return Layer(convolution, recurrence, rows if is_delta else rows._replace(betas=None))


def ways(layer: Layer, device: Device, results: Writer) -> dict[str, RecurrentKernel]:
    if not device.is_accelerator:
        return {"in C": NativeStates.of(layer.convolution, layer.recurrence)}
    from pd_cluster.model.kernels.cuda.states.chunk_choice import ChunkChoice
    from pd_cluster.model.kernels.cuda.states.triton_states import TritonStates

    found: dict[str, RecurrentKernel] = {"token by token": TritonStates(layer.convolution, layer.recurrence)}
    choice = ChunkChoice()
    chunks = choice.kernel_for(layer.convolution, layer.recurrence)
    if chunks is None:
        results.note("flash-linear-attention (fla) is not installed, or failed its trial: no chunks were measured")
        return found
    return found | {f"in chunks by {choice.name}": TritonStates(layer.convolution, layer.recurrence, chunks)}


def steps(layer: Layer, kernel: RecurrentKernel, device: Device) -> Callable[[], object]:
    """Returns a function that computes the prompt once, from the state that the previous call left."""
    parts = layer.convolution.parts
    kept = [Plane(f"conv_{at}", 3 * part.channels, part.num_heads) for at, part in enumerate(parts)]
    recurrence = layer.recurrence
    columns = recurrence.key_width if isinstance(recurrence, GatedDelta) else recurrence.state_size
    width = kernel.num_features // recurrence.num_heads * columns
    planes = (Plane("state", width, recurrence.num_heads), *kept)
    layout = KVLayout(1, recurrence.num_heads, planes, 1, "float32", rule="state", layers=(0,))
    pool = KVPool(layout, 1, device)
    rows = StateRows.of(pool, [Segment(0, len(layer.inputs.convolved), 0)])
    return lambda: kernel(layer.inputs, pool.planes(0), rows)


if __name__ == "__main__":
    child_main(measure)
