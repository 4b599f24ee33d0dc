"""Finds out what each layer of a loaded model keeps of a token, by its own modules. Asks no config for a size.

A token goes through the model, whose cache of transformers' then holds one tensor a plane for each layer, and through
an attention that notes what it is given. Where that is more than the cache holds, the heads are made anew from what is
kept (latent attention).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import AttentionInterface

from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.kv.layout import CODE_BITS, INDEX, LATENT, KVLayout, can_hold, keys_and_values, latents
from pd_cluster.wire import Plane

NAME = "pd_cluster_declaring"
INDEXED = "indexed_attention"  # transformers' type of layers in which an indexer chooses keys
Seen = dict[int, tuple[int, int]]  # layer -> heads and width of the keys that its attention is given
_seen: ContextVar[Seen] = ContextVar("_seen")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer keeps `num_heads` vectors of each plane for every token."""

    num_heads: int
    planes: tuple[Plane, ...]

    @property
    def index_plane(self) -> Plane | None:
        """Returns the plane of an indexer's keys; None: the layer has none."""
        return next((plane for plane in self.planes if plane.name == INDEX), None)

    @property
    def apart_from_index(self) -> LayerCache:
        """Returns the same without that plane: the part in which all layers are alike."""
        return LayerCache(self.num_heads, tuple(plane for plane in self.planes if plane.name != INDEX))


def caches_of(model: Any) -> tuple[LayerCache, ...]:
    """Returns what each layer keeps, on this rank. Raises ModelError: it keeps something else than planes."""
    seen = Seen()
    token_ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode(), _noting(model, seen):
        output = model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **_mask(model, token_ids))
    cache = output.get("cache", output.get("past_key_values"))  # 5.24 has renamed it
    found = tuple(_cache_of(model, index, layer, seen) for index, layer in enumerate(cache.layers))
    index_planes = {each.index_plane for each in found} - {None}
    for index, each in enumerate(found):
        if each.apart_from_index != found[0].apart_from_index or len(index_planes) > 1:
            raise ModelError(f"{model.config.model_type}: layer {index} keeps {each}, and layer 0 {found[0]}")
    return found


def _all_planes(caches: tuple[LayerCache, ...]) -> tuple[Plane, ...]:
    """Returns the planes of all layers, each name once, in their order in a layer."""
    return tuple({plane.name: plane for cache in reversed(caches) for plane in cache.planes}.values())


def _mask(model: Any, token_ids: torch.Tensor) -> dict[str, Any]:
    """Returns the mask that an indexer asks for, which transformers makes for attentions that it knows."""
    if not is_indexed(model.config):
        return {}
    return {"attention_mask": {INDEXED: torch.zeros(1, 1, 1, 1, device=token_ids.device)}}


def is_indexed(config: Any) -> bool:
    """Whether an indexer chooses the keys that layers of such a model see."""
    return INDEXED in (getattr(config, "layer_types", None) or ())


def cache_argument(model: Any) -> str:
    """Returns the name under which a model of transformers takes its cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def has_latents(caches: tuple[LayerCache, ...]) -> bool:
    return caches[0].planes[0].name == LATENT


def layout_of(caches: tuple[LayerCache, ...], block_size: int, dtype: str, draft_head: str = "") -> KVLayout:
    """Returns the layout of a pool of this dtype. Raises ConfigError for one that cannot hold such vectors.

    `draft_head`: the identity of the one that writes the last layer; "": all layers are the model's own.
    """
    planes = _all_planes(caches)
    layers = tuple(tuple(index for index, each in enumerate(caches) if plane in each.planes) for plane in planes)
    are_alike = all(len(each) == len(caches) for each in layers)
    assert all(each.num_heads == caches[0].num_heads for each in caches)
    layout = KVLayout(
        len(caches),
        caches[0].num_heads,
        planes,
        block_size,
        dtype,
        plane_layers=() if are_alike else layers,
        num_draft_layers=int(bool(draft_head)),
        draft_head=draft_head,
    )
    if layout.has_index and dtype in CODE_BITS:
        raise ConfigError(
            f"{called('kv_cache_dtype')} {dtype}: the keys by which an indexer chooses stay numbers; leave it out"
        )
    if layout.has_latents and dtype == "int4":
        raise ConfigError(f"{called('kv_cache_dtype')} int4: latents keep 8 bits or more; use int8 or fp8")
    if not can_hold(planes, dtype):
        widths = ", ".join(str(plane.width) for plane in planes)
        raise ConfigError(f"{called('kv_cache_dtype')} {dtype}: vectors of {widths} numbers, an odd number; use int8")
    return layout


def _cache_of(model: Any, index: int, layer: Any, seen: Seen) -> LayerCache:
    place = f"{model.config.model_type}: layer {index}"
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if index not in seen:
        raise ModelError(f"{place} does not call the attention that it is given; this model cannot be served")
    if not isinstance(layer, DynamicLayer) or keys is None or values is None:
        raise ModelError(f"{place} keeps {type(layer).__name__}, not keys and values; this model cannot be served")
    num_heads, width, value_width = keys.shape[1], keys.shape[3], values.shape[3]
    if (num_heads, width) != seen[index]:
        if values.shape[1] != num_heads:
            raise ModelError(f"{place} keeps {num_heads} and {values.shape[1]} heads, which a pool does not hold")
        return LayerCache(num_heads, (*latents(width, value_width), *_index_planes(layer)))
    if width != value_width:
        raise ModelError(
            f"{place} has keys of {width} numbers and values of {value_width}, which nothing here attends to"
        )
    return LayerCache(num_heads, keys_and_values(width))


def _index_planes(layer: Any) -> Iterator[Plane]:
    """Yields the plane of an indexer's keys [1, num_tokens, width], if the layer has them."""
    keys = getattr(layer, "indexer_keys", None)
    if keys is not None:
        yield Plane(INDEX, keys.shape[2])


def _note(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Stands for an attention: notes the shape of keys, and returns zeros [1, num_tokens, num_heads, width]."""
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    _seen.get()[layer_idx] = key.shape[1], key.shape[3]
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def _noting(model: Any, seen: Seen) -> Iterator[None]:
    AttentionInterface.register(NAME, _note)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    token = _seen.set(seen)
    try:
        for config in configs.values():
            config._attn_implementation = NAME
        yield
    finally:
        _seen.reset(token)
        for key, config in configs.items():
            config._attn_implementation = before[key]
