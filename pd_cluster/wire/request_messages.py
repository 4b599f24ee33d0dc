"""Messages of requests: from a scheduler to a worker and back."""

from __future__ import annotations

import msgspec

from pd_cluster.types import Leg, LegEnd, PooledOutput, PromptOutput, RequestSpec, Resumed, Tier, TokenOutput
from pd_cluster.wire.message_base import Message, Owner
from pd_cluster.wire.resume_messages import Keep


class PullHint(msgspec.Struct, frozen=True, array_like=True):
    """A prefill instance that has the first `num_tokens` tokens of a prompt in its caches.

    `peer`: its name@epoch. `within_s`: the time in which the receiver would compute the tokens that it lacks. `wakes`:
    the peer's link to the receiver is at rest (docs/glossary.md), so `Wake` has been sent to the peer.
    """

    peer: str
    num_tokens: int
    within_s: float
    wakes: bool = False


class Wake(Message, frozen=True):
    """Asks the receiver to open its link to the prefill instance `peer` (name@epoch), which will pull KV through it."""

    peer: str


class Submit(Message, frozen=True):
    """One leg of one attempt at a request."""

    request_id: str
    attempt: int
    transfer_id: str
    leg: Leg
    peer: str  # "name@epoch" of the other leg's worker; "" for a hybrid leg
    order: RequestSpec
    deadline_s: float  # seconds from now; 0: none
    resumed: list[Resumed] = []  # for a hybrid leg: the sequences that resume; empty: all, from the beginning
    weight: int = 0  # the work that the sender expects of this leg, in tokens; loads report the sums to all schedulers
    may_be_full: bool = False  # the receiver may refuse it because too many legs already wait (`LegEnd.is_full`)
    encoders: list[str] = []  # for each image, its encoder's name@epoch or "" for none; empty: no image has an encoder
    keep: Keep | None = None  # asks for a record that outlives the sender's connection
    owner: Owner = b""  # the client's pseudonym, if the request has an adapter; clients take turns in loading adapters
    pull: PullHint | None = None  # a peer whose caches may have the prompt's prefix
    weights_epoch: int = 0  # the version of the weights of both legs; an instance with another version refuses the leg


class Abort(Message, frozen=True):
    request_id: str
    attempt: int
    index: int = -1  # the sequence of the leg to abort; -1: all


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event of a transfer on a worker, with its time by that worker's monotonic clock."""

    transfer_id: str
    at_s: float
    what: str
    numbers: dict[str, int] = {}


class Outputs(Message, frozen=True):
    """Outputs of one step for one scheduler: tokens, vectors of prompts, and the legs that ended.

    `now_s`: the present time by the clock of the events.
    """

    tokens: list[TokenOutput] = []
    ended: list[LegEnd] = []
    prompts: list[PromptOutput] = []
    events: list[TraceEvent] = []
    now_s: float = 0.0
    pooled: list[PooledOutput] = []


class CacheKeys(Message, frozen=True):
    """The full blocks that a worker can share since its last message (`added`), and those that it no longer can
    (`removed`).

    A key is the first 8 bytes of a block's hash (kv/prefix_index.py); keys are concatenated. `is_whole`: the message
    replaces all earlier ones. `tier`: the fastest tier that has the added blocks.
    """

    added: bytes = b""
    removed: bytes = b""
    is_whole: bool = False
    tier: Tier = "device"
