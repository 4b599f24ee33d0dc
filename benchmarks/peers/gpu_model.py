"""Writes a model with random weights, which are made on the device."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.gpu.gpu_messages import GpuSpec, Writer, child_main
from benchmarks.peers.make_model import make_model
from pd_cluster.devices.device import resolve, use


def measure(spec: GpuSpec, results: Writer) -> None:
    device, folder, start_s = resolve(spec.device), Path(spec.model), time.perf_counter()
    use(device)
    with results.section("model"):
        make_model(folder, spec.shape, torch.bfloat16, device.torch_name)
        results.figure("model written in", time.perf_counter() - start_s, "s")
        results.figure("model on disk", sum(file.stat().st_size for file in folder.iterdir()) / 1e9, "GB")


if __name__ == "__main__":
    child_main(measure)
