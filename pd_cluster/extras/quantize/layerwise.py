"""A model with one layer in memory at a time, for layer-by-layer processing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.tensor_layouts import WeightFolder
from pd_cluster.errors import ModelError
from pd_cluster.model.loading.transformers_modules import config_of
from pd_cluster.model.weights.stored_tensors import opened

LAYERS = "model.layers"
Hidden = list[torch.Tensor]  # [1, num_tokens, hidden_size] for each sample


class FolderTensors:
    """The tensors of a folder by name; a context manager."""

    def __init__(self, folder: WeightFolder) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._places: dict[str, Any] = {}

    def __enter__(self) -> FolderTensors:
        try:
            for file in self._folder.files():
                stream = self._stack.enter_context(opened(file, self._folder))
                self._places |= dict.fromkeys(stream.keys(), stream)
        except (OSError, RuntimeError, ValueError) as error:
            self._stack.close()
            raise ModelError(f"{self._folder.path}: cannot be read: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._places[name].get_tensor(name)
        return tensor


class _Recorder(torch.nn.Module):
    """Replaces a layer and records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.called_with: list[dict[str, Any]] = []

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            raise ModelError("this architecture passes arguments by position, which calibration does not support")
        self.called_with.append(kwargs)
        return hidden_states


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Puts the parameters that modules register on the meta device; buffers, which no file has, are kept."""
    register = torch.nn.Module.register_parameter

    def without_memory(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param if param is None else torch.nn.Parameter(param.to("meta"), requires_grad=False))

    torch.nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _put(module: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, torch.nn.Parameter(tensor, requires_grad=False))


class Layerwise:
    """A transformers model in float32 on the CPU. Its layers use memory only within `layer`; other modules always do.

    Raises ModelError for architectures whose layers are not `model.layers`, or whose weights have other names in files.
    """

    def __init__(self, checkpoint: Checkpoint, files: FolderTensors) -> None:
        config = config_of(checkpoint)
        architecture: Any = AutoModelForCausalLM._model_mapping[type(config)]
        config._attn_implementation = "eager"
        with _parameters_without_memory():
            self.model = architecture(config).eval()
        inner = getattr(self.model, "model", None)
        if inner is None or not hasattr(inner, "layers") or not hasattr(inner, "rotary_emb"):
            raise ModelError(
                f"{checkpoint.path}: {checkpoint.model_type} only supports --method rtn, which needs no data"
            )
        self._files, self._path = files, checkpoint.path
        self.num_layers = len(inner.layers)
        for name, module in inner.named_children():
            if name not in ("layers", "rotary_emb"):
                self._fill(module, f"model.{name}")

    def _fill(self, module: torch.nn.Module, path: str) -> None:
        names = [name for name, _ in module.named_parameters()]
        if missing := [name for name in names if f"{path}.{name}" not in self._files]:
            raise ModelError(f"{self._path}: {path}.{missing[0]} has another name in the files; use --method rtn")
        for name in names:
            _put(module, name, self._files[f"{path}.{name}"].to(torch.float32))

    def start(self, samples: list[list[int]]) -> tuple[Hidden, list[list[dict[str, Any]]]]:
        """Returns each sample's input of the first layer, and the layers' other arguments by layer and sample."""
        inner: Any = self.model.model
        layers, inner.layers = inner.layers, torch.nn.ModuleList(_Recorder() for _ in range(self.num_layers))
        hidden: Hidden = []
        norm, inner.norm = inner.norm, torch.nn.Identity()
        try:
            for sample in samples:
                hidden.append(inner(input_ids=torch.tensor([sample]), use_cache=False).last_hidden_state)
            return hidden, [recorder.called_with for recorder in inner.layers]
        finally:
            inner.layers, inner.norm = layers, norm

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.nn.Module]:
        """Yields a layer with its weights, and frees them afterwards."""
        inner: Any = self.model.model
        layer = inner.layers[index]
        self._fill(layer, f"{LAYERS}.{index}")
        try:
            yield layer
        finally:
            for name, parameter in list(layer.named_parameters()):
                _put(layer, name, parameter.to("meta"))


def through(layer: torch.nn.Module, hidden: Hidden, called_with: list[dict[str, Any]]) -> Hidden:
    """Returns the layer's outputs."""
    found = []
    for states, kwargs in zip(hidden, called_with, strict=True):
        result = layer(states, **kwargs)
        found.append(result[0] if isinstance(result, tuple) else result)
    return found
