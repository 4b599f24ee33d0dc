"""Quantizes the output layer when a model is loaded. A tied embedding stays unquantized."""

from __future__ import annotations

from typing import Any

import torch

from pd_cluster.errors import ModelError, called
from pd_cluster.model.layers.linear_weight import UnpackedLinear, WeightTensors
from pd_cluster.model.weights.load_time_quantization import encoded
from pd_cluster.model.weights.weight_forms import form_of

ROWS_AT_ONCE = 8192  # rows that are converted to float32 and quantized at a time, so as to need little memory


def quantize_head(model: Any, scheme: str) -> None:
    """Replaces the output layer of a transformers model, or of a rank's share.

    Each output feature has its own scale, so ranks that share the vocabulary get the same codes. Raises ModelError.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        name = type(model).__name__
        raise ModelError(f"{called('quantize_head')} {scheme}: {name} has no plain output layer; remove the setting")
    path = next(name for name, module in model.named_modules() if module is head)
    weight = head.weight.detach()
    pieces = [encoded(weight[at : at + ROWS_AT_ONCE], scheme, path) for at in range(0, len(weight), ROWS_AT_ONCE)]
    parts = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    if head.bias is not None:
        parts["bias"] = head.bias.detach()
    model.set_submodule(path, UnpackedLinear(WeightTensors(form_of(parts, path), parts, weight.dtype), weight.shape))
