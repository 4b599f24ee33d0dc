"""The groups of layers of two instances: whether they go together, their lanes, and the bytes between them.

Each function takes one layout a group, in the order of the groups. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout, Lane, lanes, token_nbytes_of
from pd_cluster.kv.pair_check import check_pair
from pd_cluster.kv.rule import Rule
from pd_cluster.wire import LayoutInfo


def lanes_of(sources: Sequence[KVLayout], targets: Sequence[KVLayout]) -> list[Lane]:
    """Lists the lanes of a link: those of its first group, then those of the next; see `lanes`."""
    pairs = enumerate(zip(sources, targets, strict=True))
    return [lane._replace(group=group) for group, pair in pairs for lane in lanes(*pair)]


def check_groups(sources: Sequence[KVLayout], targets: Sequence[KVLayout]) -> None:
    """Checks that both have the same groups, and that each can land; raises LinkError(retry=False). See check_pair."""
    theirs, ours = [each.holds for each in sources], [each.holds for each in targets]
    if theirs != ours:
        raise LinkError(
            f"groups of layers differ: {_lacking(theirs, ours)}; start both with the same model and the same options"
        )
    for source, target in zip(sources, targets, strict=True):
        if source.layers != target.layers:
            raise LinkError(
                f"the layers of the group that {_described(source.holds)} differ: {_numbers(source.layers)} on the "
                f"prefill instance and {_numbers(target.layers)} on the decode instance; start both with the same model"
            )
        check_pair(source, target)


def transfer_nbytes(sources: Sequence[LayoutInfo], targets: Sequence[LayoutInfo], num_tokens: int) -> int:
    """Counts the bytes of a prompt of so many tokens that travel between all ranks of two instances.

    Nothing of it is cached at the target. See `first_token_of` for windows.
    """
    total = 0
    for source, target in zip(sources, targets, strict=False):
        rule = Rule(source.rule, source.window)
        wanted = 1 if rule.is_state else num_tokens - first_token_of(rule, num_tokens, target.block_size)
        total += wanted * token_nbytes_of(source, target)
    return total


def first_token_of(rule: Rule, num_tokens: int, block_size: int) -> int:
    """Returns the first token of a prompt that a receiver without cached blocks wants of a group."""
    return rule.first_seen(num_tokens) // block_size * block_size


def _lacking(theirs: Sequence[Rule], ours: Sequence[Rule]) -> str:
    """Says which group which end lacks."""
    lacks = [f"the decode instance has none that {_described(rule)}" for rule in theirs if rule not in ours]
    lacks += [f"the prefill instance has none that {_described(rule)}" for rule in ours if rule not in theirs]
    return " and ".join(lacks) or "they come in another order"


def _described(rule: Rule) -> str:
    if rule.is_state:
        return "keeps a state"
    return f"attends to the last {rule.window} tokens" if rule.window else "attends to all tokens"


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "all"
