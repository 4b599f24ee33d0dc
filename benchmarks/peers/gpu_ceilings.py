"""A device's limits: copies within its memory, plain reads, and bfloat16 matrix products.

A copy's bandwidth counts both reads and writes. Reading alone is measured beside it, by a sum.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.spec import Device as Name
from benchmarks.gpu.spec import GpuSpec, Writer, child_main
from benchmarks.peers.gpu_clock import Timed, time_launches
from pd_cluster.devices.device import Device, memory, product, resolve, use

# rows, inner, columns: the products of a prefill step of the 8B model, and one that fills every device
PRODUCTS = ((8192, 4096, 28672), (8192, 14336, 4096), (8192, 8192, 8192), (16384, 8192, 8192))
QUICK_PRODUCTS = ((64, 64, 64), (32, 64, 96))


def measure(spec: GpuSpec, results: Writer) -> None:
    device = resolve(spec.device)
    use(device)
    results.put(Name(described(device)))
    if device.is_accelerator:
        results.figure("device memory", memory(device).total / 2**30, "GiB", "higher")
    with results.section("bandwidth"), torch.inference_mode():
        copies(spec, device, results)
    with results.section("products"), torch.inference_mode():
        products(spec, device, results)


def described(device: Device) -> str:
    if not device.is_accelerator:
        return "CPU"
    versions = f"torch {torch.__version__}, transformers {version('transformers')}, triton {_version('triton')}"
    return f"{product(device)}; {versions}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def copies(spec: GpuSpec, device: Device, results: Writer) -> None:
    nbytes = spec.sizes(4 << 30, 1 << 16)
    source = torch.zeros(nbytes // 4, dtype=torch.float32, device=device.torch_name)
    target = torch.empty_like(source)
    num_launches, num_tries = spec.sizes(10, 1), spec.sizes(7, 1)
    copied = time_launches(lambda: target.copy_(source), device, num_launches, num_tries)
    put_rate(results, "device-to-device copy, read + written", 2 * nbytes / 1e9, "GB/s", copied)
    read = time_launches(lambda: source.sum(), device, num_launches, num_tries)
    put_rate(results, "read alone, by a sum", nbytes / 1e9, "GB/s", read)


def products(spec: GpuSpec, device: Device, results: Writer) -> None:
    best: tuple[float, Timed] | None = None
    for rows, inner, columns in QUICK_PRODUCTS if spec.quick else PRODUCTS:
        left = torch.randn(rows, inner, dtype=torch.bfloat16, device=device.torch_name)
        right = torch.randn(columns, inner, dtype=torch.bfloat16, device=device.torch_name).t()
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=device.torch_name)

        def run(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> None:
            torch.mm(left, right, out=out)

        took = time_launches(run, device, spec.sizes(20, 1), spec.sizes(7, 1))
        tflop = 2e-12 * rows * inner * columns
        put_rate(results, f"bf16 product {rows} x {inner} x {columns}", tflop, "TFLOP/s", took)
        if best is None or tflop / took.took_s > best[0] / best[1].took_s:
            best = tflop, took
    assert best is not None
    put_rate(results, "bf16 products, the best", best[0], "TFLOP/s", best[1])


def put_rate(results: Writer, name: str, amount: float, unit: str, took: Timed) -> None:
    results.figure(name, amount / took.took_s, unit, "higher", took.samples, took.spread)


if __name__ == "__main__":
    child_main(measure)
