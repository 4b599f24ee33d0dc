"""Chooses how accelerators compute a model's LoRA adapters: with kernels on CUDA, with plain products elsewhere."""

from __future__ import annotations

import torch

from pd_cluster.devices.device import Device, has_triton
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.lora.device_addition import ActivationDevice
from pd_cluster.model.lora.lora_targets import LoraTargets
from pd_cluster.settings.lora_settings import AdapterSettings


def place_adapters(places: LoraTargets, settings: AdapterSettings, device: Device, dtype: str) -> None:
    """Makes an accelerator compute the adapters; call it before any adapter is loaded."""
    if device.traits.runs_triton and has_triton():
        to_tables(places, settings, device, dtype)
    else:
        places.rows.place = ActivationDevice(torch.device(device.torch_name), TORCH_DTYPES[dtype])


def to_tables(places: LoraTargets, settings: AdapterSettings, device: Device, dtype: str) -> None:
    from pd_cluster.model.kernels.cuda.linear.lora_tables import CudaTable  # Triton may be missing

    torch_dtype, there, rank = TORCH_DTYPES[dtype], torch.device(device.torch_name), settings.max_lora_rank
    places.move_to(device, lambda modules, inputs: CudaTable(modules, inputs, torch_dtype, there, rank))


def are_in_tables(model: CausalLM) -> bool:
    """Whether adapters are in tables, so that graphs can capture their kernel launches."""
    return model.adapters is not None and model.adapters.places.rows.has_tables
