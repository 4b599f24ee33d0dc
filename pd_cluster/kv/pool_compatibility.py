"""Checks whether KV cache from one pool can land in another. Knows nothing of transports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pd_cluster.errors import LinkError, called
from pd_cluster.kv.group_rule import MAX_PEER_BLOCK_SIZE, Rule
from pd_cluster.kv.kv_layout import DTYPE_NBYTES, KVLayout, can_hold, can_split_heads
from pd_cluster.settings.engine_config import MAX_BLOCK_SIZE


def check_groups(source: Sequence[KVLayout], target: Sequence[KVLayout]) -> None:
    """Checks the layouts of all groups of layers, in order. Raises LinkError(retry=False), which names the group."""
    theirs, ours = ([each.holds for each in layouts] for layouts in (source, target))
    if theirs != ours:
        raise LinkError(
            f"groups of layers differ: {_missing(theirs, ours)}; start both with the same model, on the same kind of "
            f"device{_on_both(theirs, ours)}"
        )
    for each, other in zip(source, target, strict=True):
        check_pair(each, other)
        if each.window and other.block_size > MAX_PEER_BLOCK_SIZE:
            raise LinkError(
                f"{called('block_size')} {other.block_size} of the decode instance is too large for layers with a "
                f"window; use at most {MAX_PEER_BLOCK_SIZE}"
            )


def _missing(theirs: Sequence[Rule], ours: Sequence[Rule]) -> str:
    """Returns which end lacks which group."""
    lacks = [f"the decode instance has no group that {_describe(rule)}" for rule in theirs if rule not in ours]
    lacks += [f"the prefill instance has no group that {_describe(rule)}" for rule in ours if rule not in theirs]
    return " and ".join(lacks) or "their order differs"


def _on_both(theirs: Sequence[Rule], ours: Sequence[Rule]) -> str:
    """Returns the settings that merge windows into the group "all", if only one end has a group with a window."""
    if all(rule in theirs and rule in ours for rule in (*theirs, *ours) if rule.window):
        return ""
    adapters, merges = called("enable_prompt_adapter"), called("disable_hybrid_kv_cache_manager")
    return (
        f", and both or neither with {called('kv_host_cache')}, a draft model or head, or {adapters}; an instance "
        f"without these can have {merges} instead"
    )


def _describe(rule: Rule) -> str:
    if rule.is_state:
        return "keeps a state"
    return f"attends to the last {rule.window} tokens" if rule.window else "attends to all tokens"


def _group(layout: KVLayout) -> str:
    return f"{layout.rule} {layout.window}" if layout.window else layout.rule


def check_pair(source: KVLayout, target: KVLayout) -> None:
    """Checks that KV cache from `source` can land in `target`.

    Raises LinkError(retry=False), which names the field. Block size, dtype and tensor parallel size may differ: see
    pack.py and `lanes`. Draft heads may also differ; then their layers are not sent: see `num_common_layers`.
    """
    where = f" of group {_group(source)}" if source.layers else ""
    for name, theirs, ours in _compared(source, target):
        if theirs != ours:
            raise LinkError(
                f"KV layout{where} differs: {name} is {theirs} on the prefill instance and {ours} on the decode "
                f"instance; start both with the same model"
            )
    for layout in (source, target):
        if why := _inconsistency(layout):
            raise LinkError(f"KV layout is invalid: {why}")


def _compared(source: KVLayout, target: KVLayout) -> Iterator[tuple[str, object, object]]:
    """Yields the fields of the transferred layers that must be equal: public name, source's value, target's value."""
    if source.draft_head != target.draft_head:
        source, target = source.without_head, target.without_head
    for name in ("rule", "window", "num_layers", "layers", "num_draft_layers", "num_kv_heads"):
        yield name, getattr(source, name), getattr(target, name)
    if (names := [plane.name for plane in source.planes]) != [plane.name for plane in target.planes]:
        yield "planes", ", ".join(names), ", ".join(plane.name for plane in target.planes)
        return
    for theirs, ours in zip(source.planes, target.planes, strict=True):
        yield f"{theirs.name}_head_dim", theirs.width, ours.width
        yield f"{theirs.name}_num_heads", source.num_heads_of(theirs), target.num_heads_of(ours)
    yield "plane_layers", source.plane_layers, target.plane_layers


def _inconsistency(layout: KVLayout) -> str:
    """Returns why no pool can have this layout; "" if it is valid."""
    for heads in dict.fromkeys((layout.num_kv_heads, *map(layout.num_heads_of, layout.planes))):
        if not can_split_heads(heads, layout.tp_size):
            return f"{heads} KV heads cannot be split over {layout.tp_size} ranks"
        if layout.num_kv_heads % heads:
            return f"a plane has {heads} heads, which do not divide the model's {layout.num_kv_heads}"
    if why := _wrong_group(layout):
        return why
    num_layers, num_draft = layout.num_layers, layout.num_draft_layers
    if bool(layout.draft_head) != bool(num_draft) or not 0 <= num_draft < num_layers:
        return f"{num_draft} of {num_layers} layers belong to the draft head, which is {layout.draft_head or 'none'}"
    if not _has_planes(layout) or min(plane.width for plane in layout.planes) < 1:
        return "a layer has no planes, or an empty plane"
    if not can_hold(layout.planes, layout.dtype):
        return f"{layout.dtype} has two values per byte, but a width is odd"
    is_rank = 0 <= layout.tp_rank < layout.tp_size
    if layout.dtype not in DTYPE_NBYTES or not 1 <= layout.block_size <= MAX_BLOCK_SIZE or not is_rank:
        rank = f"rank {layout.tp_rank} of {layout.tp_size}"
        return f"blocks of {layout.block_size} tokens of {layout.dtype!r}, {rank}"
    return ""


def _wrong_group(layout: KVLayout) -> str:
    """Returns why no group of layers can have this rule and these layers; "" if the group is valid."""
    rule, layers = layout.holds, layout.layers
    if (rule.name == "window") != (rule.window > 0):
        return f"the rule is {rule.name}, with a window of {rule.window} tokens"
    if rule.is_state and (layout.block_size, layout.dtype) != (1, "float32"):
        return f"blocks of states have {layout.block_size} tokens of {layout.dtype!r}; they must have one of float32"
    if layers and (len(layers) != layout.num_layers or list(layers) != sorted({*layers}) or layers[0] < 0):
        return f"{layout.num_layers} layers of a group do not match {len(layers)} layers of the model, in order"
    return ""


def _has_planes(layout: KVLayout) -> bool:
    """Whether each layer has a plane, and each plane lists only existing layers, each once."""
    if not layout.plane_layers:
        return bool(layout.planes)
    known = range(layout.num_layers)
    is_known = all(list(layers) == sorted({*layers} & {*known}) for layers in layout.plane_layers)
    return is_known and len(layout.plane_layers) == len(layout.planes) and all(each.planes for each in layout.alike)
