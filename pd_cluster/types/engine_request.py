"""A sequence of a request in an engine."""

from __future__ import annotations

import enum
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple

from pd_cluster.types.request_outputs import DraftReport, FinishReason, Logprobs, Resumed
from pd_cluster.types.request_sampling import Sampling
from pd_cluster.types.request_spec import Pooling, RequestSpec, RopePositions
from pd_cluster.types.roles import Leg
from pd_cluster.types.variants import num_virtual_tokens


class Status(enum.Enum):
    """The state of a request in one engine."""

    WAITING = "waiting"  # holds nothing
    LANDING = "landing"  # holds blocks that a peer's KV is being copied into
    RUNNING = "running"  # takes part in steps
    PARKED = "parked"  # a computed beam that waits for the other beams of its search; gives up its blocks if necessary
    EXPORTING = "exporting"  # computed; holds blocks until the peer has them
    FINISHED = "finished"  # holds nothing; the engine forgets it


class Retention(NamedTuple):
    """Keeps cached blocks longer than others, until a time by the engine's clock. Owners share the space equally."""

    owner: str
    until_s: float


OWN: dict[str, bool] = {"own": True}  # marks the fields of a Request that its siblings do not share


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence in one engine. `order` and the output tokens suffice to resume it elsewhere.

    Other parts of the engine derive state from a request (masks, guides, beam searches), and store it keyed weakly by
    the request.

    With `sampling.n` above 1 the sequence of index 0 computes the prompt; the others are forked from it. Fields of the
    request spec that every step reads are repeated here.
    """

    request_id: str
    order: RequestSpec
    prompt_token_ids: list[int] = field(init=False)
    sampling: Sampling = field(init=False)
    pooling: Pooling | None = field(init=False)
    priority: int = field(init=False)
    most_tokens: int = field(init=False)
    rope_positions: RopePositions | None = field(init=False)
    gathers: bool = field(init=False)  # several of its tokens may be sent together, as its request spec allows
    num_virtual_tokens: int = field(init=False)  # the prompt's first tokens that an adapter provides
    batch: str = field(init=False)  # client's batch and priority; sequences with equal values wait for each other

    attempt: int = 0
    arrival_s: float = 0.0
    leg: Leg = "hybrid"
    transfer_id: str = ""
    peer: str = ""  # the connection or instance of the other leg
    client: str = ""  # the connection that receives the outputs
    kv_precision: str = ""  # how KV that landed differs from KV computed here (kv.pool_route.PoolRoute)
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache on first admission; -1: not yet admitted
    is_pull: bool = False  # the request only copies the KV cache of a prompt's beginning between two prefix caches
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)

    index: int = field(default=0, metadata=OWN)
    output_token_ids: list[int] = field(default_factory=list, metadata=OWN)
    num_unsent: int = field(default=0, metadata=OWN)  # how many of its last output tokens have not been sent
    draft_report: DraftReport | None = field(default=None, metadata=OWN)  # drafts since its last output
    num_draft_tokens: int = field(default=0, metadata=OWN)  # tokens drafted here
    num_accepted_tokens: int = field(default=0, metadata=OWN)  # drafted tokens that were right
    status: Status = field(default=Status.WAITING, metadata=OWN)
    num_computed_tokens: int = field(default=0, metadata=OWN)  # tokens whose KV is in this engine's pool
    tables: list[list[int]] = field(default_factory=lambda: [[]], metadata=OWN)  # its blocks in each group of layers
    swap_tables: list[list[int]] = field(default_factory=lambda: [[]], metadata=OWN)  # in host memory while swapped out
    block_hashes: list[bytes] = field(default_factory=list, metadata=OWN)  # hashes of full blocks, as far as needed
    num_hashed_blocks: int = field(default=0, metadata=OWN)  # how many of its first blocks the prefix cache knows
    num_preemptions: int = field(default=0, metadata=OWN)  # how many times it was preempted here
    is_resumed: bool = field(default=False, metadata=OWN)  # it and its siblings were resumed separately, not forked
    dropped: set[int] = field(default_factory=set, metadata=OWN)  # sequences cancelled before they were forked

    def __post_init__(self) -> None:
        order, sampling = self.order, self.order.sampling
        self.prompt_token_ids, self.sampling, self.priority = order.prompt_token_ids, sampling, order.priority
        self.pooling, self.most_tokens, self.rope_positions = order.pooling, order.most_tokens, order.rope_positions
        self.num_virtual_tokens = num_virtual_tokens(order.variant)
        self.gathers = order.gathers and sampling.logprobs is None and not sampling.beam_width
        self.batch = f"{order.batch} {order.priority}" if order.batch else ""

    @property
    def leg_key(self) -> str:
        """Names this leg in one engine; each attempt at a request has legs with other names."""
        return f"{self.request_id}#{self.attempt}"

    @property
    def key(self) -> str:
        """Names this sequence in one engine."""
        return self.key_of(self.index)

    def key_of(self, index: int) -> str:
        """Returns the key of the sequence with this index in the same leg."""
        return f"{self.leg_key}/{index}" if index else self.leg_key

    @property
    def retention(self) -> Retention | None:
        """Returns how long its blocks should stay cached; None: as long as there is space."""
        order = self.order
        return Retention(order.cache_salt, self.arrival_s + order.retention_s) if order.retention_s else None

    @property
    def is_swapped(self) -> bool:
        """Whether its KV cache waits in host memory."""
        return any(self.swap_tables)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_behind(self) -> int:
        """The number of tokens that are known but not yet computed; 1 when the request is decoding."""
        return self.num_tokens - self.num_computed_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Returns tokens [start, stop) of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt tokens must still be computed."""
        wanted = self.sampling.prompt_logprobs is not None and self.leg != "decode"
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def num_logit_rows(self, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` tokens to compute, counted from their end, need logits.

        `num_tokens` may include a token after those known here, whose value only the device knows yet.
        """
        if self.pooling is not None and self.pooling.kind != "logits":
            return 0
        if self.wants_prompt_logprobs:
            return num_tokens
        return 1 if num_tokens >= self.num_behind else 0

    def num_hidden_rows(self, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` tokens, counted from their end, need their final hidden states."""
        if self.pooling is None or self.pooling.kind == "logits":
            return 0
        if self.pooling.kind == "mean":
            return num_tokens
        return 1 if num_tokens == self.num_behind else 0

    @property
    def lacks_pixels(self) -> bool:
        """Whether this engine must compute images whose pixels were left out because a peer was expected to send their
        KV.
        """
        order = self.order
        if not order.images or self.num_computed_tokens >= order.spans[-1].stop:
            return False
        return any(not image.pixels for image in order.images)

    @property
    def computes_all(self) -> bool:
        """Whether every token must be computed here, without the prefix cache."""
        return self.wants_prompt_logprobs or (self.pooling is not None and self.pooling.kind == "mean")

    def finish_reason_after(
        self, token_id: int, num_output_tokens: int, eos_token_ids: frozenset[int], may_end: bool = True
    ) -> FinishReason | None:
        """Returns the reason if this token, the last of `num_output_tokens`, ends a sequence.

        `may_end`: an end or stop token ends the sequence; False within a guide's text, where it is plain text.
        """
        if may_end and token_id in self.sampling.stop_token_ids:
            return "stop"
        if may_end and token_id in eos_token_ids and (not self.sampling.ignore_eos or self.sampling.guide is not None):
            return "stop"  # a guide allows this token when nothing else may follow
        return "length" if num_output_tokens >= self.sampling.max_tokens else None


class StateCopy(NamedTuple):
    """A step copies the state after the request's first `num_tokens` tokens to `block`."""

    request: Request
    num_tokens: int
    block: int


_OWN = [each for each in fields(Request) if each.metadata == OWN]


def sibling(request: Request, **own: Any) -> Request:
    """Returns another sequence of the same request, which shares all fields that are not marked as its own."""
    fresh = {each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in _OWN}
    return replace(request, **{**fresh, **own})


def resume(request: Request, resumed: Resumed) -> Request:
    """Returns a sequence that resumes with the tokens that it got elsewhere. Siblings share only the prompt."""
    return sibling(
        request,
        index=resumed.index,
        output_token_ids=list(resumed.output_token_ids),
        is_resumed=True,
        prompt_logprobs=[],
    )
