"""What a request would wait for at an instance, in seconds, and whether that is good enough. Pure arithmetic.

Predictions stand on what workers measured of late (wire.Load) and on what is outstanding there; they are for choosing
and for refusing early, never for a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster.cluster.instance import Instance
from pd_cluster.errors import Overloaded
from pd_cluster.kv.layout import DTYPE_NBYTES

UNKNOWN_TOKENS_PER_S = 1000.0  # of an instance that has computed no prompt yet, when no other has either
TRANSFER_SETUP_S = 0.005  # credit, last payload, confirmation
TRANSFER_NBYTES_PER_S = {"dist": 1e9}  # docs/benchmarks/kv.md, rounded down
LOCAL_NBYTES_PER_S = 4e9  # same-host memory


@dataclass(frozen=True, slots=True)
class Goals:
    """What requests are promised; what can't be met is refused. 0: no promise."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


def predict_ttft_s(instance: Instance, num_uncached: int, rates: Sequence[float] = ()) -> float:
    """Until this instance has computed what is ahead and these tokens.

    `rates`: of all instances in tokens/s, for one that has not measured its own: the best of the others stands in.
    """
    rate = instance.load.prefill_tokens_per_s or max(rates, default=0.0) or UNKNOWN_TOKENS_PER_S
    return (_prompt_tokens_ahead(instance) + num_uncached) / rate


def predict_transfer_s(prefill: Instance, decode: Instance, num_tokens: int) -> float:
    """Until the KV cache of these tokens has come to the decode instance, after the last of them was computed."""
    layout = prefill.info.layout if prefill.info is not None else None
    if layout is None:
        return TRANSFER_SETUP_S
    head_dims = layout.k_head_dim + layout.v_head_dim
    nbytes = num_tokens * layout.num_layers * layout.num_kv_heads * head_dims * DTYPE_NBYTES[layout.dtype]
    link = prefill.load.links.get(decode.key, "")
    name = link.partition("(")[2].rstrip(")").partition(",")[0]
    return TRANSFER_SETUP_S + nbytes / TRANSFER_NBYTES_PER_S.get(name, LOCAL_NBYTES_PER_S)


def predict_tpot_s(decode: Instance) -> float:
    """As its running sequences have it now; 0 when there are none."""
    return decode.load.decode_step_s if decode.load.num_running else 0.0


def check_goals(
    goals: Goals, instances: Sequence[Instance], prefill: Instance, decode: Instance, num_uncached: int
) -> None:
    """Raises Overloaded, with the time after which it may fit, when this pair would miss a goal.

    Where nobody is ahead, waiting would not help; and the prediction is tried, however old its rate is.
    """
    if goals.ttft_s and _prompt_tokens_ahead(prefill):
        ttft_s = predict_ttft_s(prefill, num_uncached, [i.load.prefill_tokens_per_s for i in instances])
        if ttft_s > goals.ttft_s:
            raise Overloaded(
                f"the first token would come after {ttft_s:.2g} s, and {goals.ttft_s:g} s are promised",
                max(1, math.ceil(ttft_s - goals.ttft_s)),
            )
    if goals.tpot_s and (tpot_s := predict_tpot_s(decode)) > goals.tpot_s:
        raise Overloaded(f"a token takes {1e3 * tpot_s:.3g} ms now, and {1e3 * goals.tpot_s:g} ms are promised", 1)


def within_tpot(goals: Goals, instances: Sequence[Instance]) -> list[Instance]:
    """Without decode instances that are too slow already, as long as others are left."""
    if not goals.tpot_s:
        return list(instances)
    fit = [i for i in instances if i.role != "decode" or predict_tpot_s(i) <= goals.tpot_s]
    return fit if any(i.role == "decode" and i.takes_requests for i in fit) else list(instances)


def _prompt_tokens_ahead(instance: Instance) -> int:
    """A decode instance's outstanding tokens are mostly of sequences that decode already."""
    return instance.tokens_ahead if instance.role == "prefill" else instance.load.num_queued_tokens
