"""The groups of layers of two instances: their lanes, the tokens and bytes to transfer, and the probe of a lane.

Each function takes one layout per group, in the order of the groups. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pd_cluster.kv.group_rule import Rule
from pd_cluster.kv.kv_layout import KVLayout, Lane, lanes, token_nbytes_of
from pd_cluster.wire import LayoutInfo


def lanes_of(sources: Sequence[KVLayout], targets: Sequence[KVLayout]) -> list[Lane]:
    """Lists the lanes of a link, group by group. See `lanes`."""
    pairs = enumerate(zip(sources, targets, strict=True))
    return [lane._replace(group=group) for group, pair in pairs for lane in lanes(*pair)]


def transfer_nbytes(sources: Sequence[LayoutInfo], targets: Sequence[LayoutInfo], num_tokens: int) -> int:
    """Counts the bytes that all ranks of an instance together send to another for a prompt of this many tokens.

    The target is assumed to have cached none of it. See `first_token_of` for windows.
    """
    total = 0
    for source, target in zip(sources, targets, strict=False):
        rule = Rule(source.rule, source.window)
        wanted = 1 if rule.is_state else num_tokens - first_token_of(rule, num_tokens, target.block_size)
        total += wanted * token_nbytes_of(source, target)
    return total


def first_token_of(rule: Rule, num_tokens: int, block_size: int) -> int:
    """Returns the first token of a prompt that a receiver with no cached blocks needs in a group."""
    return rule.num_passed(num_tokens, block_size) * block_size


def probe_layout(layout: KVLayout) -> KVLayout:
    """Returns the layout of the probe of a lane: all layers, or for states, which are large, only the first layer."""
    if not layout.holds.is_state:
        return layout
    first = layout.alike[0]
    return replace(layout, num_layers=1, planes=first.planes, plane_layers=(), layers=layout.layers[:1])
