"""Predicts how long a request would wait at an instance, and whether that meets the objectives. Pure arithmetic.

Predictions use workers' recent measurements (wire.Load) and their outstanding work; they guide choices and early
refusals, but are never used as deadlines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.costs.linear_costs import num_pairs_of
from pd_cluster.errors import Overloaded
from pd_cluster.kv.layer_groups import transfer_nbytes
from pd_cluster.transport.transport_table import slowest_nbytes_per_s
from pd_cluster.wire import pull_over

UNKNOWN_TOKENS_PER_S = 1000.0  # the assumed speed while no instance has computed a prompt
TRANSFER_SETUP_S = 0.005  # the time for credit, last payload and confirmation


@dataclass(frozen=True, slots=True)
class Goals:
    """Latency objectives; requests that would miss them are refused. 0: no objective."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


NO_GOALS = Goals()


def unknown_rate() -> float:
    return UNKNOWN_TOKENS_PER_S


def best_rate(instances: Sequence[Instance]) -> float:
    """Returns the highest measured speed of these instances, in prompt tokens/s."""
    return max((each.load.prefill_tokens_per_s for each in instances), default=0.0) or UNKNOWN_TOKENS_PER_S


def predict_ttft_s(
    instance: Instance, num_uncached: int, rate: Callable[[], float] = unknown_rate, num_prompt_tokens: int = 0
) -> float:
    """Returns the time until this instance has computed its outstanding work and these tokens of a prompt.

    `rate` returns the tokens/s to assume for an instance without a measurement; it is called only for such an instance.
    If the cost of attention was measured, it counts, too: this prompt's tokens attend to all tokens before them, and
    each outstanding token to as many as recent prompts' tokens did on average.
    """
    num_ahead = instance.prompt_tokens_before(num_prompt_tokens)
    num_tokens = num_ahead + num_uncached
    step_tokens, overhead_s, token_s, pair_s, num_earlier = instance.load.prompt_costs
    if not step_tokens:
        return num_tokens / rate()
    found_s = -(-num_tokens // step_tokens) * overhead_s + num_tokens * token_s
    if pair_s:
        num_pairs = num_pairs_of(num_uncached, max(0, num_prompt_tokens - num_uncached))
        found_s += (num_pairs + num_ahead * num_earlier) * pair_s
    shares_steps = instance.num_long and num_prompt_tokens <= instance.long_from
    return 2 * found_s if shares_steps else found_s  # twice the time, for steps shared with a long prompt


def predict_transfer_s(prefill: Instance, decode: Instance, num_tokens: int) -> float:
    """Returns the time from the last token's computation until the KV cache has arrived at the decode instance."""
    sources, targets = (each.info.layouts if each.info is not None else [] for each in (prefill, decode))
    nbytes, link = transfer_nbytes(sources, targets or sources, num_tokens), prefill.link_to(decode)
    if (measured := prefill.load.handover_costs.get(link.over)) is not None:
        return measured.seconds(nbytes)
    rate = slowest_nbytes_per_s(link.transports)  # the slowest lane's share arrives last
    return TRANSFER_SETUP_S + nbytes / rate


def predict_pull_s(source: Instance, target: Instance, num_tokens: int) -> float:
    """Returns the time in which the KV cache of this many tokens arrives from another prefill instance's caches. Until
    the first pull has been measured, a handover's time is assumed, although steps may hide a part of that.
    """
    layouts, link = source.info.layouts if source.info is not None else [], source.link_to(target)
    nbytes, costs = transfer_nbytes(layouts, layouts, num_tokens), source.load.handover_costs
    if (measured := costs.get(pull_over(link.over)) or costs.get(link.over)) is not None:
        return measured.seconds(nbytes)
    return TRANSFER_SETUP_S + nbytes / slowest_nbytes_per_s(link.transports)


def predict_step_s(decode: Instance) -> float:
    """Returns the current time of a step of its running sequences; 0 if there are none."""
    return decode.load.decode_step_s if decode.load.num_running else 0.0


def predict_tpot_s(decode: Instance) -> float:
    """Returns the current time per token of its running sequences, which may get several tokens in a step; 0 if there
    are none.
    """
    return predict_step_s(decode) / decode.load.tokens_per_step


def check_goals(
    goals: Goals,
    instances: Sequence[Instance],
    pair: tuple[Instance, Instance],
    num_uncached: int,
    num_prompt_tokens: int = 0,
    waited_s: float = 0.0,
) -> None:
    """Raises Overloaded, with the time after which the request may fit, if this pair would miss an objective.

    `waited_s`: how long the request has waited already. If the prefill instance has no work ahead, waiting would not
    help, so TTFT is not checked; the request also renews the measured rate, however old that is.
    """
    prefill, decode = pair
    if goals.ttft_s and prefill.prompt_tokens_before(num_prompt_tokens):
        ttft_s = waited_s + predict_ttft_s(prefill, num_uncached, lambda: best_rate(instances), num_prompt_tokens)
        if ttft_s > goals.ttft_s:
            raise Overloaded(
                f"the first token would come after {ttft_s:.2g} s, and the objective is {goals.ttft_s:g} s",
                max(1, math.ceil(ttft_s - goals.ttft_s)),
            )
    if goals.tpot_s and (tpot_s := predict_tpot_s(decode)) > goals.tpot_s:
        raise Overloaded(f"a token takes {1e3 * tpot_s:.3g} ms now, and the objective is {1e3 * goals.tpot_s:g} ms", 1)


def within_tpot(goals: Goals, instances: Sequence[Instance]) -> list[Instance]:
    """Returns all instances except decode instances that are already too slow; returns all if none is fast
    enough.
    """
    if not goals.tpot_s:
        return list(instances)
    fit = [i for i in instances if i.role != "decode" or predict_tpot_s(i) <= goals.tpot_s]
    return fit if any(i.role == "decode" and i.takes_requests for i in fit) else list(instances)
