"""Quantizes a model folder layer by layer into a folder of compressed-tensors. Interrupted jobs can be resumed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.quantization_config import COMPRESSED, Quantization
from pd_cluster.checkpoints.weight_files import INDEX
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.extras.quantize.layerwise import FolderTensors, Hidden, Layerwise, through
from pd_cluster.extras.quantize.quantize_layer import quantize_layer
from pd_cluster.extras.quantize.quantize_methods import round_to_nearest
from pd_cluster.extras.quantize.quantize_schemes import Scheme, Tensors
from pd_cluster.model.loading.quantized_files import LINEAR
from pd_cluster.model.weights.layer_tensors import FP8
from pd_cluster.model.weights.quantized_formats import decoded
from pd_cluster.model.weights.weight_forms import form_of

PARTIAL = ".partial"  # the folder of an unfinished job, within the output folder
STATE = "job.json"
CHUNK_NBYTES = 1 << 22
LAYER = re.compile(r"(?P<layer>(?:.*\.)?layers\.(?P<index>\d+))\.(?P<name>.+)\.(?P<part>\w+)$")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", INDEX)


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """`samples`: token ids for calibration; rounding to nearest ("rtn") needs none."""

    model: Path
    out: Path
    scheme: Scheme
    method: str
    samples: list[list[int]]

    @property
    def digest(self) -> str:
        """Returns a digest that identifies the model, the settings and the data."""
        what = [Checkpoint.open(str(self.model)).identity, self.scheme.name, self.method, self.samples]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    @torch.no_grad()
    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Returns the number of quantized layers. `progress` receives the numbers of finished and of all layers.

        Raises ConfigError for an output folder with other contents, ModelError for a model that cannot be quantized.
        """
        checkpoint = Checkpoint.open(str(self.model))
        if checkpoint.quantization is not None:
            raise ModelError(
                f"{checkpoint.quantization.place}: the model is already quantized; give the unquantized folder"
            )
        partial = self._partial()
        with FolderTensors(checkpoint.weights) as files:
            layers: dict[int, list[str]] = defaultdict(list)
            rest: list[str] = []
            for name in files:
                found = LAYER.match(name)
                (rest if found is None else layers[int(found["index"])]).append(name)
            chosen = [name for names in layers.values() for name in names if _is_quantized(name, files)]
            if not chosen:
                raise ModelError(f"{self.model}: no linear layer has a known name (…_proj)")
            scheme = self.scheme.fitted({files.shape(name)[1] for name in chosen})
            walk = None if self.method == "rtn" else _Walk(checkpoint, files, self.samples)
            for index in sorted(layers):
                file = partial / f"layer-{index:05}.safetensors"
                if (done := _earlier(file)) is None:
                    tensors = self._layer(index, layers[index], files, walk, scheme)
                    with self._writing():
                        save_file(tensors, _free(file.with_suffix(".new")), {"format": "pt"})
                        file.with_suffix(".new").rename(file)
                elif walk is not None:
                    walk.pass_by(index, done)
                progress(index + 1, len(layers))
            others = {name for names in layers.values() for name in names} - set(chosen)
            ignored = [name.removesuffix(".weight") for name in others if len(files.shape(name)) == 2]  # routers
            if rest:
                tensors = {name: files[name] for name in rest}
                with self._writing():
                    save_file(tensors, _free(partial / "rest.safetensors"), {"format": "pt"})
        config = checkpoint.whole or read_json(self.model / "config.json")
        self._finish(partial, {**config, "quantization_config": scheme.config(["lm_head", *sorted(ignored)])})
        return len(chosen)

    def _partial(self) -> Path:
        partial = self.out / PARTIAL
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out}: is a file; give another folder")
        state, digest = partial / STATE, self.digest
        has_work = self.out.exists() and (any(partial.glob("*.safetensors")) or {*self.out.iterdir()} - {partial})
        if has_work and (not state.exists() or b"".join(_chunks(state)) != digest.encode()):
            raise ConfigError(
                f"{self.out}: not empty, and not an unfinished job with the same settings; give another folder"
            )
        with self._writing():
            partial.mkdir(parents=True, exist_ok=True)
            _free(state.with_suffix(".new")).write_text(digest, "utf-8")
            state.with_suffix(".new").rename(state)
        return partial

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors in the block into ConfigError for a full disk or a folder that cannot be written."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{self.out}: cannot be written: {error}; make room or give another folder: the same command continues"
            ) from error

    def _layer(self, index: int, names: list[str], files: FolderTensors, walk: _Walk | None, scheme: Scheme) -> Tensors:
        for name in names:
            if _is_quantized(name, files) and not torch.stack(files[name].aminmax()).isfinite().all():
                raise ModelError(f"{self.model}: {name} contains NaN or infinity; copy the folder again or recreate it")
        if walk is not None:
            return walk.quantize(index, names, scheme, self.method)
        found: Tensors = {}
        for name in names:
            tensor = files[name]
            if not _is_quantized(name, files):
                found[name] = tensor
                continue
            stored = scheme.stored(*round_to_nearest(tensor, scheme))
            found |= {f"{name.removesuffix('weight')}{part}": each.contiguous() for part, each in stored.items()}
        return found

    def _finish(self, partial: Path, config: dict[str, Any]) -> None:
        parts = sorted(partial.glob("*.safetensors"))
        places: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            name = f"model-{number:05}-of-{len(parts):05}.safetensors"
            with safe_open(part, framework="pt") as opened:
                places |= dict.fromkeys(opened.keys(), name)
            self._copy(part, self.out / name)
        size = sum(part.stat().st_size for part in parts)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        with self._writing():
            _free(self.out / INDEX).write_text(json.dumps(index, indent=1), "utf-8")
        for file in self.model.iterdir():
            if file.is_file() and not file.name.endswith(NOT_COPIED) and file.name != "config.json":
                self._copy(file, self.out / file.name)
        with self._writing():
            _free(self.out / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
            shutil.rmtree(partial)

    def _copy(self, file: Path, to: Path) -> None:
        with self._writing(), _free(to).open("xb") as target:
            for chunk in _chunks(file):
                target.write(chunk)


def _free(file: Path) -> Path:
    """Removes a link or pipe of this name, so that writing the file neither follows the link nor waits for the pipe."""
    file.unlink(missing_ok=True)
    return file


def _chunks(file: Path) -> Iterator[bytes]:
    """Yields a file's contents. Raises ModelError for read errors, which would otherwise look like write errors."""
    try:
        with file.open("rb") as source:
            while chunk := source.read(CHUNK_NBYTES):
                yield chunk
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file}: cannot be read: {error}; the same command continues once it can be read")


def _earlier(file: Path) -> Tensors | None:
    """Returns a layer that an earlier run has written; None if it is missing or incomplete."""
    try:
        return load_file(file) if file.exists() else None
    except SafetensorError:
        return None
    except OSError as error:
        raise _unreadable(file, error) from error


def _is_quantized(name: str, files: FolderTensors) -> bool:
    return (
        name.endswith(".weight") and bool(LINEAR.search(name.removesuffix(".weight"))) and len(files.shape(name)) == 2
    )


class _Walk:
    """The samples' hidden states as they pass through the layers."""

    def __init__(self, checkpoint: Checkpoint, files: FolderTensors, samples: list[list[int]]) -> None:
        if not samples:
            raise ConfigError("no text to calibrate with; give --calibration, or --method rtn")
        self._model, self._files = Layerwise(checkpoint, files), files
        self._hidden: Hidden
        self._hidden, self._called = self._model.start(samples)

    def quantize(self, index: int, names: list[str], scheme: Scheme, method: str) -> Tensors:
        prefix = f"model.layers.{index}."
        chosen = [name for name in names if _is_quantized(name, self._files)]
        linears = [name.removeprefix(prefix).removesuffix(".weight") for name in chosen]
        with self._model.layer(index) as layer:
            stored = quantize_layer(layer, linears, scheme, method, self._hidden, self._called[index])
            self._hidden = through(layer, self._hidden, self._called[index])
            left = dict(layer.named_parameters())
            found = {f"{prefix}{name}.{part}": each for name, parts in stored.items() for part, each in parts.items()}
            for name in names:
                path = name.removeprefix(prefix)
                if path.removesuffix(".weight") not in stored:
                    found[name] = left[path].detach().to(self._files[name].dtype).clone()
        return {name: each.contiguous() for name, each in found.items()}

    def pass_by(self, index: int, tensors: Tensors) -> None:
        """Passes the samples through a layer that an earlier run has quantized."""
        prefix = f"model.layers.{index}."
        modules: dict[str, Tensors] = defaultdict(dict)
        for name, tensor in tensors.items():
            path, _, part = name.removeprefix(prefix).rpartition(".")
            modules[path][part] = tensor
        with self._model.layer(index) as layer:
            for path, parts in modules.items():
                module: Any = layer.get_submodule(path)
                for part, tensor in _numbers(path, parts).items():
                    getattr(module, part).data.copy_(tensor)
            self._hidden = through(layer, self._hidden, self._called[index])


def _numbers(path: str, parts: Tensors) -> Tensors:
    """Returns a module's parameters, dequantized."""
    if "weight_packed" not in parts and ("weight" not in parts or parts["weight"].dtype not in (torch.int8, FP8)):
        return parts
    # Other schemes have one scale per row.
    is_w4a8 = "weight_packed" not in parts and parts["weight_scale"].shape[-1] > 1
    read = decoded(path, parts, Quantization(COMPRESSED, path, is_w4a8=is_w4a8))
    weight = form_of(read, path).weight.of(read, torch.float32)
    return {"weight": weight.matrix()} | ({} if weight.bias is None else {"bias": weight.bias})
