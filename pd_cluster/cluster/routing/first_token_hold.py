"""Holds a request's first token until the decode instance has taken over, so that the second follows one step later.

The first token often arrives while the decode instance computes a step for other sequences; the new sequence joins only
the next step. The hold lasts at most MOST_STEPS steps. Knows nothing of how tokens are delivered.
"""

from __future__ import annotations

from pd_cluster.cluster.placement.wait_prediction import predict_step_s
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.types import TokenOutput

MOST_STEPS = 1.5  # the longest hold, in decode steps: the rest of the current step, and time for messages
MOST_HELD_S = 0.1


def hold_s(stream: RequestStream, conn: str, token: TokenOutput) -> float:
    """Returns how long to hold this token, which an instance reported over `conn`; 0: deliver it at once."""
    prefill, decode = stream.prefill, stream.decode
    if token.position or token.finish_reason is not None or stream.first_s or stream.order.gathers:
        return 0.0
    if prefill is decode or stream.legs.get(conn) is not prefill or decode.conn not in stream.legs:
        return 0.0
    if decode.num_current_sequences <= stream.order.num_decoding:  # it decodes no other sequences
        return 0.0
    return min(MOST_STEPS * predict_step_s(decode), MOST_HELD_S)
