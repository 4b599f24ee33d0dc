"""Reads a quantized model folder, layer by layer, directly from its safetensors files.

A whole layer is decoded, and a rank keeps its share. A share that ends within a group of inputs only makes the groups
smaller. If a layer's activations are rounded to codes, its inputs are not split.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pd_cluster.checkpoints.quantization_config import ASCEND, Quantization
from pd_cluster.checkpoints.tensor_layouts import WeightFolder
from pd_cluster.checkpoints.weight_files import QUANTIZERS_TENSORS
from pd_cluster.errors import ModelError
from pd_cluster.model.layers.linear_weight import Tensors
from pd_cluster.model.parallel.parallel_plan import LAYER
from pd_cluster.model.parallel.rank_tensors import RankTensors
from pd_cluster.model.parallel.weight_slices import take
from pd_cluster.model.weights.layer_tensors import MORE_PRECISE, Parts
from pd_cluster.model.weights.load_time_quantization import encoded
from pd_cluster.model.weights.quantized_formats import WEIGHTS, decoded
from pd_cluster.model.weights.stored_tensors import opened
from pd_cluster.model.weights.weight_forms import form_of

log = logging.getLogger(__name__)

FUSED = re.compile(r"(?P<path>.*\.experts\.(?:gate_up_proj|down_proj))_(?P<part>blocks|scales)")
FUSED_PATH = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")
LINEAR = re.compile(r"\.layers\.\d+\..*(?:_proj|\.w[123])$")  # layers to quantize at load: no routers, no output layer
CODES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Weights = dict[str, torch.Tensor]
Rename = Callable[[str], str]


def read_quantized(
    folder: WeightFolder, found: Quantization, name_of: Rename, dtype: torch.dtype, part: RankTensors
) -> Weights:
    """Returns a rank's weights by name: quantized layers as parts of a form, others unchanged.

    `name_of`: maps a tensor's name in the files to its name in the model; "" if the tensor is not read. Embeddings and
    output layers are dequantized to `dtype`. Raises ModelError that names the layer and the tensor or file.
    """
    weights: Weights = {}
    num_quantized = num_scales = 0

    def own_name_of(key: str) -> str:
        return part.name(name_of(key))

    for path, tensors, file in _layers(folder, own_name_of, part):
        place = f"{file}: {path}"
        if not _has_codes(tensors):
            num_scales += len(tensors)
            tensors = {last: tensor for last, tensor in tensors.items() if last not in MORE_PRECISE}
            num_scales -= len(tensors)
        if found.at_load and LINEAR.search(path) and "weight" in tensors and tensors["weight"].dim() == 2:
            num_quantized += 1
            parts = encoded(tensors["weight"], found.at_load, place)
            if "bias" in tensors:
                parts["bias"] = tensors["bias"]
            _keep_parts(weights, path, parts, own_name_of, part)
            continue
        if not _is_quantized(tensors):
            for last, tensor in tensors.items():
                _keep(weights, own_name_of(_key(path, last)), tensor, part)
            continue
        kind = found.types.get(f"{path}.weight", "FLOAT") if found.method == ASCEND else ""
        if kind == "FLOAT":
            raise ModelError(
                f"{place} is quantized, but {found.place} does not list it, or lists it as FLOAT; copy the folder "
                f"again or recreate it"
            )
        num_quantized += 1
        parts = decoded(place, tensors, found, kind)
        if not LAYER.search(name_of(f"{path}.weight")):
            parts = numbers(parts, dtype)
        _keep_parts(weights, path, parts, own_name_of, part)
    if not num_quantized and found.at_load:
        raise ModelError(
            f"{found.place}: {folder.path} has no linear layer that could be quantized; remove the setting"
        )
    if not num_quantized and not num_scales:
        raise ModelError(f"{found.place}: {found.method}, but no tensor is quantized; remove the setting")
    if num_quantized:
        log.info("%d linear layers are quantized (%s)", num_quantized, found.at_load or found.method)
    if num_scales:
        log.info(
            "%d scales of activations or of the KV cache are ignored, since their layers are not quantized", num_scales
        )
    return weights


def _keep_parts(weights: Weights, path: str, parts: Parts, name_of: Rename, of_rank: RankTensors) -> None:
    takes_whole_rows = form_of(parts, path).rounds_activations
    if of_rank.plan is not None and of_rank.cuts(f"{path}.weight") and not takes_whole_rows:
        parts = _in_shares(parts, of_rank.plan.size)
    for part, tensor in parts.items():
        name = name_of(f"{path}{'_' if FUSED_PATH.search(path) else '.'}{part}")
        _keep(weights, name, tensor, of_rank, takes_whole_rows)


def numbers(parts: Parts, dtype: torch.dtype) -> Parts:
    """Returns the dequantized weight and the bias."""
    weight = form_of(parts, "").weight.of(parts, dtype)
    return {"weight": weight.matrix()} | ({} if weight.bias is None else {"bias": weight.bias})


def _in_shares(parts: Parts, size: int) -> Parts:
    """Divides groups of inputs so that no group spans the input features of two ranks."""
    codes = parts.get("codes")
    if codes is None or codes.shape[-1] % size:
        return parts
    num_inputs, num_groups = codes.shape[-1], parts["code_scales"].shape[-1]
    group = math.gcd(num_inputs // num_groups, num_inputs // size)
    times = num_inputs // group // num_groups
    finer = {name: parts[name].repeat_interleave(times, dim=-1) for name in ("code_scales", "code_zeros")}
    return {**parts, **finer}


def _keep(weights: Weights, name: str, tensor: torch.Tensor, part: RankTensors, takes_whole_rows: bool = False) -> None:
    if name:
        if part.cuts(name):
            tensor = take(tensor, part.cut(name, tuple(tensor.shape), takes_whole_rows))
        weights[name] = tensor


def _is_quantized(tensors: Tensors) -> bool:
    return any(part in QUANTIZERS_TENSORS or part == "blocks" for part in tensors) or any(
        tensor.dtype in CODES for part, tensor in tensors.items() if part in WEIGHTS
    )


def _key(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _has_codes(tensors: Tensors) -> bool:
    return any(part in WEIGHTS and tensor.dtype not in PLAIN for part, tensor in tensors.items())


def _layers(folder: WeightFolder, name_of: Rename, of_rank: RankTensors) -> Iterator[tuple[str, Tensors, Path]]:
    """Yields for each module its tensors, by the last component of their names, and one of their files.

    Reads only the rank's own part of stacked experts. Raises ModelError.
    """
    with ExitStack() as stack:
        places: dict[str, dict[str, tuple[Any, str, Path]]] = defaultdict(dict)
        for file in folder.files():
            try:
                stream = stack.enter_context(opened(file, folder))
                keys = list(stream.keys())
            except (OSError, RuntimeError, ValueError) as error:
                raise ModelError(f"{file}: cannot be read: {error}") from error
            for key in keys:
                if fused := FUSED.fullmatch(key):
                    path, part = fused["path"], fused["part"]
                else:
                    path, _, part = key.rpartition(".")
                if part in places[path]:
                    other = places[path][part][2]
                    raise ModelError(f"{file}: {key} is also in {other.name}; remove the outdated file")
                places[path][part] = (stream, key, file)
        for path, parts in places.items():
            if not name_of(f"{path}.weight"):
                continue
            *_, file = next(iter(parts.values()))
            try:
                tensors = {part: _stored(stream, key, of_rank) for part, (stream, key, _) in parts.items()}
            except (OSError, RuntimeError, ValueError) as error:
                raise ModelError(f"{file}: {path}: cannot be read: {error}") from error
            yield path, tensors, file


def _stored(stream: Any, key: str, of_rank: RankTensors) -> torch.Tensor:
    own = of_rank.own_experts(key)
    found: torch.Tensor = stream.get_tensor(key) if own is None else take(stream.get_slice(key), own)
    return found
