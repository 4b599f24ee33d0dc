"""Layouts of folders whose tensors differ from transformers' in name or shape. Each is an entry of `LAYOUTS`.

Maps the model's tensors to parts of stored tensors by names and shapes only; imports no torch and reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pd_cluster.checkpoints import internlm_layout, paddle_layout
from pd_cluster.checkpoints.tensor_place import TensorPlace
from pd_cluster.checkpoints.weight_files import stored_dtypes, weight_files
from pd_cluster.errors import ModelError
from pd_cluster.numerics import overridden

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """Maps a folder's tensors to those of the model, whose config is in transformers' form.

    `names`: returns a stored tensor's names in the model; empty if it is not read. `places`: also returns their
    positions, from the tensor's shape. `dtypes`: header's dtype -> actual dtype. `is_spare`: whether a tensor of this
    name belongs to a part of the model that is not served.
    """

    name: str
    names: Callable[[str], tuple[str, ...]]
    places: Callable[[str, tuple[int, ...]], tuple[TensorPlace, ...]]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    is_spare: Callable[[str], bool] = lambda key: False


class StoredPart(NamedTuple):
    """A tensor of a safetensors file, its dtype, and its names in the model."""

    file: Path
    key: str
    dtype: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """A folder of safetensors files, and their layout, if it differs from transformers'."""

    path: Path
    layout: Layout | None = None

    def files(self) -> Iterator[Path]:
        """Raises ModelError."""
        yield from weight_files(self.path)

    def stored(self) -> Iterator[StoredPart]:
        """Yields all tensors; reads only the headers. Raises ModelError."""
        for file in self.files():
            for key, dtype in stored_dtypes(file).items():
                yield StoredPart(file, key, self.dtype(dtype), self.names(key))

    def names(self, key: str) -> tuple[str, ...]:
        return (key,) if self.layout is None else self.layout.names(key)

    def dtype(self, stored: str) -> str:
        """Returns the actual dtype for a dtype in a header."""
        return stored if self.layout is None else self.layout.dtypes.get(stored, stored)


def translated(folder: Path, config: Config, overrides: Config) -> tuple[dict[str, Any], Layout | None]:
    """Returns a folder's config.json in transformers' form, and the layout; None: transformers' own.

    `overrides`: the operator's overrides, which take precedence over InternLM's field `rotary`. Raises ModelError.
    """
    unsafe = sorted(folder.glob("*.pdparams"))
    if unsafe and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{unsafe[0]}: reading this format can run code, so it is never loaded; give the folder with safetensors, "
            f"or convert it: tools/paddle2torch of PaddlePaddle/ERNIE"
        )
    for translate in LAYOUTS:
        if (found := translate(folder, config, overrides)) is not None:
            return found
    return dict(config), None


def _kimi(folder: Path, config: Config, overrides: Config) -> tuple[dict[str, Any], None] | None:
    """Kimi-K2's folders refer to their own code, but according to the model card, model and tensors are DeepSeek-V3's.

    The same holds for K2.5's text models.
    """
    text = config.get("text_config")
    if isinstance(text, dict) and (found := _kimi(folder, text, overrides)) is not None:
        return {**config, "text_config": found[0]}, None
    if config.get("model_type") != "kimi_k2":
        return None
    return {**{name: value for name, value in config.items() if name != "auto_map"}, "model_type": "deepseek_v3"}, None


def _internlm(folder: Path, config: Config, overrides: Config) -> tuple[dict[str, Any], Layout] | None:
    if config.get("model_type") not in internlm_layout.TYPES:
        return None
    rotary = {name: value for name, value in overrides.items() if name == "rotary"}
    found = internlm_layout.as_llama(overridden(config, rotary))
    heads = found.get("num_attention_heads"), found.get("num_key_value_heads")
    return found, Layout(
        "InternLM's", internlm_layout.llama_names, lambda key, shape: internlm_layout.places(key, shape, *heads)
    )


def _paddle(folder: Path, config: Config, overrides: Config) -> tuple[dict[str, Any], Layout] | None:
    if not paddle_layout.may_be(config):
        return None
    keys = {key for file in weight_files(folder) for key in stored_dtypes(file)}
    if not any(key.startswith(paddle_layout.PREFIX) for key in keys):
        return None
    found = paddle_layout.as_transformers(config, has_head=paddle_layout.HEAD in keys)
    sizes = paddle_layout.PaddleSizes.of(found)
    return found, Layout("Paddle's", sizes.names, sizes.places, paddle_layout.DTYPES, paddle_layout.is_spare)


LAYOUTS = (_internlm, _paddle, _kimi)
