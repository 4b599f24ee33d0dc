"""Measures a device's limits: copies within its memory, plain reads, and bfloat16 matrix products.

A copy's bandwidth counts both reads and writes. Reading alone is measured separately, by a sum.
"""

from __future__ import annotations

from importlib.metadata import version
from statistics import median

import torch

from benchmarks.gpu.gpu_messages import DeviceName, GpuSpec, Writer, child_main
from benchmarks.peers.gpu_profile import launches_s
from pd_cluster.devices.device import Device, memory, product, resolve, use

# rows, inner, columns: the products of a prefill step of the 8B model, and one that uses every device fully
PRODUCTS = ((8192, 4096, 28672), (8192, 14336, 4096), (8192, 8192, 8192), (16384, 8192, 8192))
QUICK_PRODUCTS = ((64, 64, 64), (32, 64, 96))


def measure(spec: GpuSpec, results: Writer) -> None:
    device = resolve(spec.device)
    use(device)
    name = f"{product(device)}; torch {torch.__version__}" if device.is_accelerator else "CPU"
    results.put(DeviceName(f"{name}, transformers {version('transformers')}"))
    if device.is_accelerator:
        results.figure("device memory", memory(device).total / 2**30, "GiB", "higher")
    with torch.inference_mode():
        with results.section("bandwidth"):
            copies(spec, device, results)
        with results.section("products"):
            products(spec, device, results)


def copies(spec: GpuSpec, device: Device, results: Writer) -> None:
    nbytes = spec.sizes(4 << 30, 1 << 16)
    source = torch.zeros(nbytes // 4, dtype=torch.float32, device=device.torch_name)
    target = torch.empty_like(source)
    count = spec.sizes(10, 1), spec.sizes(7, 1)
    copied_s = launches_s(lambda: target.copy_(source), device, *count)
    results.figure(
        "device-to-device copy, read + written", 2e-9 * nbytes / median(copied_s), "GB/s", "higher", copied_s
    )
    read_s = launches_s(lambda: source.sum(), device, *count)
    results.figure("read alone, by a sum", 1e-9 * nbytes / median(read_s), "GB/s", "higher", read_s)


def products(spec: GpuSpec, device: Device, results: Writer) -> None:
    rates = []
    for rows, inner, columns in QUICK_PRODUCTS if spec.quick else PRODUCTS:
        left = torch.randn(rows, inner, dtype=torch.bfloat16, device=device.torch_name)
        right = torch.randn(columns, inner, dtype=torch.bfloat16, device=device.torch_name).t()
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=device.torch_name)

        def run(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> None:
            torch.mm(left, right, out=out)

        took_s = launches_s(run, device, spec.sizes(20, 1), spec.sizes(7, 1))
        rates.append(2e-12 * rows * inner * columns / median(took_s))
        results.figure(f"bf16 product {rows} x {inner} x {columns}", rates[-1], "TFLOP/s", "higher", took_s)
    results.figure("bf16 products, the best", max(rates), "TFLOP/s", "higher", rates)


if __name__ == "__main__":
    child_main(measure)
