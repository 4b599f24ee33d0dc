"""Reads from a loaded model's modules what each layer keeps per sequence. Takes no size from a config.

One token passes through the model while its attention is replaced by one that records its arguments. Afterwards
transformers' cache holds one tensor per plane for each layer. If a layer's arguments are larger than its cache, the
layer rebuilds heads from what it keeps (latent attention). These caches determine the groups of layers, each with its
own pool.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import AttentionInterface

from pd_cluster.errors import ConfigError, ModelError, called
from pd_cluster.kv.kv_layout import CODE_BITS, INDEX, LATENT, KVLayout, can_hold, keys_and_values, latents
from pd_cluster.model.layers.attention.sdpa import WindowOfModule, window_of
from pd_cluster.model.layers.states.state_planes import StateParts, parts_of, state_modules
from pd_cluster.model.layers.states.torch_functions import use_torch_functions
from pd_cluster.wire import Plane

NAME = "pd_cluster_declaring"
INDEXED = "indexed_attention"  # transformers' type of layers with an indexer, which chooses keys
STATE_DTYPE = "float32"  # the dtype of states, whatever the model's dtype
NOTHING: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()


class AttentionArguments(NamedTuple):
    """The arguments of a layer's attention; `window`: how many tokens a token attends to, 0 for all."""

    keys: torch.Tensor  # [1, num_heads, num_tokens, width]
    value_width: int
    window: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns the number of heads, the width of keys and the width of values."""
        return self.keys.shape[1], self.keys.shape[3], self.value_width


Seen = dict[int, AttentionArguments]  # layer index -> arguments of its attention
_seen: ContextVar[Seen] = ContextVar("_seen")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of a layer: `num_heads` vectors per plane for every token, and `state` for the whole sequence.

    A layer may have either, both or none.
    """

    num_heads: int = 0
    planes: tuple[Plane, ...] = ()  # empty: no keys and values
    window: int = 0  # how many tokens a token attends to, including itself; 0: all
    state: StateParts | None = None
    reads: int | None = None  # the layer whose keys and values it attends to, if it has none of its own

    @property
    def index_plane(self) -> Plane | None:
        """Returns the plane of the indexer's keys; None: the layer has no indexer."""
        return next((plane for plane in self.planes if plane.name == INDEX), None)

    @property
    def apart_from_index(self) -> LayerCache:
        """Returns the cache per token without the index plane, which may differ between the layers of a group."""
        return LayerCache(self.num_heads, tuple(plane for plane in self.planes if plane.name != INDEX))


def caches_of(model: Any) -> tuple[LayerCache, ...]:
    """Returns the cache of each layer on this rank.

    Raises ModelError if a layer keeps neither planes nor a known state, if layers with the same window have different
    planes, or if layers have different states.
    """
    use_torch_functions(model)
    seen = Seen()
    token_ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode(), _recording(model, seen):
        output = model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **_mask(model, token_ids))
    cache = output.get("cache", output.get("past_key_values"))  # renamed in transformers 5.24
    modules = state_modules(model)
    found = tuple(_cache_of(model, index, layer, seen, modules) for index, layer in enumerate(cache.layers))
    _check_alike(model.config.model_type, found)
    return found


def _check_alike(model_type: str, caches: Sequence[LayerCache]) -> None:
    """Raises ModelError unless layers with the same window have equal planes, and all states are equal."""
    index_planes = {each.index_plane for each in caches} - {None}
    firsts, state = dict[int, int](), next((each.state for each in caches if each.state is not None), None)
    for index, each in enumerate(caches):
        first = firsts.setdefault(each.window, index) if each.planes else index
        if each.apart_from_index != caches[first].apart_from_index or len(index_planes) > 1:
            raise ModelError(
                f"{model_type}: layer {index} keeps {each.num_heads} heads of {_widths(each.planes)}, but layer "
                f"{first} keeps {caches[first].num_heads} of {_widths(caches[first].planes)}"
            )
        if each.state not in (None, state):
            raise ModelError(f"{model_type}: layer {index} keeps {each.state}, but other layers keep {state}")


def _all_planes(caches: Sequence[LayerCache]) -> tuple[Plane, ...]:
    """Returns the planes of all layers without duplicate names, in their order within a layer."""
    return tuple({plane.name: plane for cache in reversed(caches) for plane in cache.planes}.values())


def _mask(model: Any, token_ids: torch.Tensor) -> dict[str, Any]:
    """Returns the attention mask that an indexer requires. transformers creates it only for its own attentions."""
    if not is_indexed(model.config):
        return {}
    return {"attention_mask": {INDEXED: torch.zeros(1, 1, 1, 1, device=token_ids.device)}}


def is_indexed(config: Any) -> bool:
    """Whether an indexer chooses the keys that layers of such a model attend to."""
    return INDEXED in (getattr(config, "layer_types", None) or ())


def cache_argument(model: Any) -> str:
    """Returns the name of the cache argument of a transformers model."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def has_index(caches: Sequence[LayerCache]) -> bool:
    return any(each.index_plane for each in caches)


def has_latents(caches: Sequence[LayerCache]) -> bool:
    return any(each.planes and each.planes[0].name == LATENT for each in caches)


def has_states(caches: Sequence[LayerCache]) -> bool:
    return any(each.state is not None for each in caches)


def layouts_of(
    caches: Sequence[LayerCache],
    block_size: int,
    dtype: str,
    draft_head: str = "",
    split_windows: bool = False,
) -> tuple[KVLayout, ...]:
    """Returns the layouts of a model's groups of layers: one that keeps all tokens, one for windows, one for states.

    `dtype`: for the pools of keys and values; states are float32. `draft_head`: the identity of the draft head that
    writes the last layer; "": all layers belong to the model. `split_windows`: layers with the smallest window form
    their own group if other layers attend to all tokens and there is no draft head. Layers with a larger window stay
    with the others. Raises ConfigError for a dtype that cannot hold the vectors, and ModelError for layers that one
    pool cannot hold.
    """
    attending = [index for index, each in enumerate(caches) if each.planes]
    if not attending:
        raise ModelError("no layer of this model keeps keys and values; a model of states alone cannot be served")
    windows = {caches[index].window for index in attending}
    window = min(windows - {0}, default=0) if split_windows and 0 in windows and not draft_head else 0
    near = [index for index in attending if window and caches[index].window == window]
    rest = [index for index in attending if index not in near]
    found = [_layout_of_keys(caches, rest, block_size, dtype, draft_head)]
    if near:
        found.append(replace(_layout_of_keys(caches, near, block_size, dtype), rule="window", window=window))
    if (states := layout_of_states(caches)) is not None:
        found.append(states)
    return tuple(found)


def least_layouts(caches: Sequence[LayerCache], block_size: int, dtype: str) -> tuple[KVLayout, ...]:
    """Returns the layouts with the fewest groups that can hold the model: windows form their own group only if their
    planes differ from the others'.
    """
    kept = {each.apart_from_index for each in caches if each.planes}
    return layouts_of(caches, block_size, dtype, split_windows=len(kept) > 1)


def layout_of(caches: Sequence[LayerCache], block_size: int, dtype: str, draft_head: str = "") -> KVLayout:
    """Returns the layout of one pool for all layers that keep keys and values, see `layouts_of`."""
    return layouts_of(caches, block_size, dtype, draft_head)[0]


def layout_of_states(caches: Sequence[LayerCache]) -> KVLayout | None:
    """Returns the layout of a pool whose blocks are states of sequences; None: no layer keeps a state."""
    layers = tuple(index for index, each in enumerate(caches) if each.state is not None)
    if not layers:
        return None
    state = caches[layers[0]].state
    assert state is not None
    of_group = () if len(layers) == len(caches) else layers
    return KVLayout(len(layers), state.num_heads, state.planes, 1, STATE_DTYPE, rule="state", layers=of_group)


def _layout_of_keys(
    caches: Sequence[LayerCache], layers: list[int], block_size: int, dtype: str, draft_head: str = ""
) -> KVLayout:
    """Returns the layout of the keys and values of these layers."""
    own = [caches[index] for index in layers]
    for index, each in zip(layers, own, strict=True):
        if each.apart_from_index != own[0].apart_from_index:
            raise ModelError(
                f"layer {index} keeps {each.num_heads} heads of {_widths(each.planes)}, but layer {layers[0]} "
                f"keeps {own[0].num_heads} of {_widths(own[0].planes)}; one pool cannot hold both, and windows get a "
                f"separate pool only on CPUs, without {called('kv_host_cache')}, prompt adapters, a draft model and "
                f"{called('disable_hybrid_kv_cache_manager')}"
            )
    planes = _all_planes(own)
    with_plane = tuple(tuple(at for at, each in enumerate(own) if plane in each.planes) for plane in planes)
    are_alike = all(len(each) == len(own) for each in with_plane)
    layout = KVLayout(
        len(own),
        own[0].num_heads,
        planes,
        block_size,
        dtype,
        plane_layers=() if are_alike else with_plane,
        num_draft_layers=int(bool(draft_head)),
        draft_head=draft_head,
        layers=() if len(own) == len(caches) else tuple(layers),
    )
    _check_dtype(layout)
    return layout


def _check_dtype(layout: KVLayout) -> None:
    """Raises ConfigError if a pool of the layout's dtype cannot hold the layout's vectors."""
    dtype, flag = layout.dtype, called("kv_cache_dtype")
    if layout.has_index and dtype in CODE_BITS:
        raise ConfigError(f"{flag} {dtype}: the index keys of this model cannot be quantized; use auto")
    if layout.has_latents and dtype == "int4":
        raise ConfigError(f"{flag} int4: latents need at least 8 bits; use int8 or fp8")
    if not can_hold(layout.planes, dtype):
        raise ConfigError(f"{flag} {dtype}: vectors of {_widths(layout.planes)} values, an odd number; use int8")


def _widths(planes: Sequence[Plane]) -> str:
    return ", ".join(str(plane.width) for plane in planes)


def _cache_of(model: Any, index: int, layer: Any, seen: Seen, modules: dict[int, torch.nn.Module]) -> LayerCache:
    place = f"{model.config.model_type}: layer {index}"
    state = _state_of(place, layer, modules.get(index))
    if index not in seen:
        if state is not None or isinstance(layer, NOTHING):
            return LayerCache(state=state)
        raise ModelError(f"{place} does not call the registered attention; this model cannot be served")
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    attended = seen[index]
    if keys is None:
        reads = next((other for other in seen if other < index and seen[other].keys is attended.keys), None)
        if reads is not None:
            return LayerCache(window=attended.window, reads=reads)
    if not isinstance(layer, DynamicLayer) or keys is None or values is None:
        raise ModelError(f"{place} keeps {type(layer).__name__}, not keys and values; this model cannot be served")
    num_heads, planes = _planes_of(place, keys, values, attended)
    return LayerCache(num_heads, (*planes, *_index_planes(layer)), attended.window, state)


def _planes_of(
    place: str, keys: torch.Tensor, values: torch.Tensor, attended: AttentionArguments
) -> tuple[int, tuple[Plane, ...]]:
    """Returns the number of heads and the planes of a cache's tensors, [1, num_heads, num_tokens, width] each."""
    num_heads, width, value_width = keys.shape[1], keys.shape[3], values.shape[3]
    if (num_heads, width, value_width) != attended.shape:
        if values.shape[1] != num_heads:
            raise ModelError(
                f"{place} keeps {num_heads} and {values.shape[1]} heads of keys and values, which a pool cannot hold"
            )
        return num_heads, latents(width, value_width)
    return num_heads, keys_and_values(width, value_width)


def _state_of(place: str, layer: Any, module: torch.nn.Module | None) -> StateParts | None:
    """Returns the state of a layer as its module declares it. Raises ModelError if transformers' cache differs."""
    if not getattr(layer, "is_conv_states_initialized", None):
        return None
    shapes = [
        [tuple(each.shape[1:]) for each in states.values() if each is not None]
        for states in (layer.conv_states, layer.recurrent_states)
    ]
    if module is None:
        raise ModelError(
            f"{place} keeps a state of {shapes} that no listed module computes; this model cannot be served"
        )
    state = parts_of(module)
    recurrent = [] if state.recurrent is None else [tuple(state.recurrent)]
    if shapes != [[(state.num_channels, state.kernel_size)], recurrent]:
        raise ModelError(
            f"{place} keeps a state of {shapes}, but its module declares {state}; this model cannot be served"
        )
    return state


def _index_planes(layer: Any) -> Iterator[Plane]:
    """Yields the plane of the index keys [1, num_tokens, width], if the layer has them."""
    keys = getattr(layer, "indexer_keys", None)
    if keys is not None:
        yield Plane(INDEX, keys.shape[2])


def _note(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    sliding_window: int | type[WindowOfModule] | None = WindowOfModule,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces an attention: records its arguments, and returns zeros [1, num_tokens, num_heads, width]."""
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    _seen.get()[layer_idx] = AttentionArguments(key, value.shape[3], window_of(module, sliding_window) or 0)
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def _recording(model: Any, seen: Seen) -> Iterator[None]:
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
